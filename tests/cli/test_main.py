"""What a command imports, and how its process ends: at once, or as Python ends it where that has more to do."""

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

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
# a command in place of ours, which leaves something that shows whether the process is taken apart
COMMAND = """
import atexit, mmap, sys, types
if {tool!r}:
    file = open({tool!r}, "r+b")
    mapped = mmap.mmap(file.fileno(), 0)
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


def ended(code: object, tool: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process whose command ends with a code, and that has a tool's file mapped."""
    command = [sys.executable, "-c", COMMAND.format(code=code, tool=tool)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["--version", "--help", "generate --help", "pairs", "pairs Qwen/Qwen3-8B"])
def test_what_computes_nothing_imports_nothing_heavy(command: str) -> None:
    heavy = "numpy", "torch", "transformers", "triton", "huggingface_hub", "jinja2", "fastspec.generator"
    code = f"""
import sys
from fastspec.cli.app import app
app({command.split()!r}, standalone_mode=False)
print("imported", *[name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[-2].split() == ["imported"], done.stderr


@pytest.mark.parametrize("code", [None, 0, 2])
def test_a_command_ends_without_being_taken_apart(code: int | None) -> None:
    assert ended(code) == (code or 0, "text, at exit\n", "")


def test_a_text_in_place_of_a_code_is_left_to_python() -> None:
    assert ended("no") == (1, "text, at exit\ntaken apart\n", "no\n")


@pytest.mark.skipif(not entry.MAPPED.exists(), reason="needs Linux")
def test_a_profiler_in_the_process_is_left_its_end(tmp_path: Path) -> None:
    tool = tmp_path / "nsight.so"
    tool.write_bytes(bytes(4096))
    assert ended(3, str(tool)) == (3, "text, at exit\ntaken apart\n", "")


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes with which the process would have ended."""
    found: list[int] = []
    all_threads = threading.enumerate
    others = set(all_threads()) - {threading.current_thread()}  # of other tests in this process
    monkeypatch.setattr(threading, "enumerate", lambda: [each for each in all_threads() if each not in others])
    monkeypatch.setattr(os, "_exit", found.append)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(entry, "MAPPED", Path("/no/such/file"))
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
