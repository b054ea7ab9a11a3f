"""Modules that print JSON lines, run in processes of their own: a test may have bound triton to its interpreter.

And functions of the kernels exchanged wherever they have been imported.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch


def module_output(name: str, *arguments: str) -> list[dict[str, Any]]:
    """What `python -m name arguments` printed, a line each."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, stream) for stream in ("stdout", "stderr")]
        process = _process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([name, arguments, list(map(str, paths))]) + "\n")
        process.stdin.flush()
        status = process.stdout.readline()
        assert status == "0\n", paths[1].read_text()[-4000:] if paths[1].exists() else "the process has ended"
        return [json.loads(line) for line in paths[0].read_text().splitlines()]


@cache
def _process() -> subprocess.Popen[str]:
    """A process that has imported what most modules need, and runs each in a fork of itself."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-m", "tests.helpers.modules"], env=env, text=True, **pipes)
    atexit.register(process.kill)
    return process


def _serve() -> None:
    for needed in ("fastspec.kernels.triton_ops", "tests.helpers.launches", "tests.helpers.machine_code"):
        import_module(needed)
    torch.empty_like(torch.empty(1, device="meta"))  # imports more of torch
    import_module("triton.runtime.cache").triton_key()  # reads all of Triton's files
    for line in sys.stdin:
        name, arguments, paths = json.loads(line)
        if (child := os.fork()) == 0:
            _run(name, arguments, paths)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(name: str, arguments: list[str], paths: list[str]) -> None:
    """Runs a module, whose output goes into these files."""
    for path, stream in zip(paths, (sys.stdout, sys.stderr), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    sys.argv[1:] = arguments
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def exchange(monkeypatch: pytest.MonkeyPatch, instead: dict[Any, Callable[..., Any]]) -> None:
    """Everywhere in the kernels that a function has been imported, another one in its place."""
    found = {id(function): other for function, other in instead.items()}  # Triton's functions make a key to be hashed
    for name, module in list(sys.modules.items()):
        if name.startswith("fastspec.kernels"):
            for at, function in list(vars(module).items()):
                if id(function) in found:
                    monkeypatch.setattr(module, at, found[id(function)])


if __name__ == "__main__":
    _serve()
