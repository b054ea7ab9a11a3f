"""Commands that generate import everything at once, and Python's collector of cycles rests meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("collecting", [True, False])
def test_nothing_is_collected_while_modules_are_imported(collecting: bool) -> None:
    """And what was imported is left out later; a process of its own, for the collector is the whole process's."""
    code = f"""
import gc
from fastspec.cli.imports import import_all
{"" if collecting else "gc.disable()"}
done = []
gc.callbacks.append(lambda phase, info: done.append(phase))
import_all()
assert not done, done
gc.callbacks.clear()
import sys
assert "fastspec.generator" in sys.modules
assert gc.isenabled() == {collecting}
frozen = gc.get_freeze_count()
assert frozen > 100_000
made = [[] for _ in range(frozen)]
import_all()  # nothing is left to be done
assert gc.get_freeze_count() <= frozen
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
