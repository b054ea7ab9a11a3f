"""Modules that print JSON lines, run in processes of their own: a test may have bound triton to its interpreter.

And functions of the kernels exchanged wherever they have been imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Hashable
from typing import Any

import pytest


def module_output(name: str, *arguments: str) -> list[dict[str, Any]]:
    """What `python -m name arguments` printed, a line each."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", name, *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def exchange(monkeypatch: pytest.MonkeyPatch, instead: dict[Any, Callable[..., Any]]) -> None:
    """Everywhere in the kernels that a function has been imported, another one in its place."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fastspec.kernels"):
            for at, function in list(vars(module).items()):
                if isinstance(function, Hashable) and function in instead:
                    monkeypatch.setattr(module, at, instead[function])
