"""Modules that print JSON lines, run in processes of their own: a test may have bound triton to its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def module_output(name: str, *arguments: str) -> list[dict[str, Any]]:
    """What `python -m name arguments` printed, a line each."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", name, *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
