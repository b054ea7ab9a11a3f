"""How the process of a command ends: at once, with all that was written, or as Python ends it where that has more to do."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fastspec.cli import __main__ as entry

# a command in place of ours, which leaves something that shows whether the process is taken apart
COMMAND = """
import atexit, sys, types
class Left:
    def __del__(self):
        print("taken apart")
left = Left()
atexit.register(print, "at exit")
def app(prog_name):
    sys.stdout.write("text, ")
    raise SystemExit({code!r})
sys.modules["fastspec.cli.app"] = stub = types.ModuleType("fastspec.cli.app")
stub.app = app
from fastspec.cli.__main__ import main
main()
"""


def ended(code: object, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process whose command ends with a code."""
    path = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "utf-8"}
    clean = {name: value for name, value in os.environ.items() if name not in entry.WATCHED}
    command = [sys.executable, "-c", COMMAND.format(code=code)]
    done = subprocess.run(command, env={**clean, **path, **environment}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("code", [None, 0, 2])
def test_a_command_ends_without_being_taken_apart(code: int | None) -> None:
    assert ended(code) == (code or 0, "text, at exit\n", "")


def test_what_python_has_to_do_is_left_to_it() -> None:
    assert ended("no") == (1, "text, at exit\ntaken apart\n", "no\n")
    assert ended(3, CUDA_INJECTION64_PATH="/of/a/profiler") == (3, "text, at exit\ntaken apart\n", "")


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes with which the process would have ended."""
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    for name in entry.WATCHED:
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_thread_is_waited_for(exits: list[int]) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        entry.end_now(0)
        assert exits == []
    finally:
        over.set()
        thread.join()
    entry.end_now(0)
    assert exits == [0]


class Full:
    """A stream that nobody takes."""

    def flush(self) -> None:
        raise BrokenPipeError

    def write(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_nobody_takes_is_left_to_python(
    stream: str, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = Full()
    monkeypatch.setattr(sys, stream, given)
    entry.end_now(0)
    monkeypatch.setattr(sys, stream, None)  # it was closed before the command began
    assert exits == []
    entry.end_now(0)
    assert exits == [0]
