"""Rows of first calls, from what a fresh process tells; and that process's program."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf import first_calls

GIVEN = argparse.Namespace(device="cpu", rows=2)


def test_the_slowest_kernels_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def said_by(command: list[str], env: dict[str, str]) -> str:
        asked.append(command)
        assert env["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
        jobs = [[f"kernel{n}", 1.0, 1.0 + n] for n in range(9)]
        return "noise\n" + json.dumps({"make": 1, "call": 2, "jobs": jobs, "waited": [], "compile": []}) + "\n"

    monkeypatch.setattr(first_calls, "said_by", said_by)
    row = first_calls.started((Path("t"), Path("d")), tmp_path, GIVEN, 4, "top_p")
    assert [kernel for kernel, _, _ in row["slowest"]] == [f"kernel{n}" for n in (8, 7, 6, 5, 4, 3)]
    assert (row["compiled"], row["first call"], row["k"]) == (9, "top_p", 4)
    told = json.loads(asked[0][-1])
    assert told["first"]["top_p"] == 0.9
    assert set(told["others"]) == set(first_calls.CALLS) - {"top_p"}


def test_the_program_times_compilations_and_waits(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The program of the fresh process, run here with a generator that compiles one kernel and waits for another."""
    import fastspec
    from fastspec.engine.engine import Engine
    from fastspec.kernels.common import compilers

    class Generator:
        def __init__(self, *_: Any, **__: Any) -> None:
            compilers._asked(None, json.dumps([False, {"kernel": ["m", "_draw_kernel"]}]).encode(), False)  # type: ignore[arg-type]

        def generate(self, *_: Any, **__: Any) -> None:
            compilers.KernelBehind.result(SimpleNamespace(name="_end_kernel"))  # type: ignore[arg-type]

    def slow(*_: Any, **__: Any) -> bool:
        import time

        time.sleep(0.03)
        return True

    monkeypatch.setattr(fastspec, "FastSpecGenerator", Generator)
    monkeypatch.setattr(compilers, "_asked", slow)
    monkeypatch.setattr(compilers.KernelBehind, "result", slow)
    monkeypatch.setattr(Engine, "compile", Engine.compile)
    sizes = {"target": "t", "draft": "d", "device": "cpu", "rows": 1, "k": 4, "first": {}, "others": {"greedy": {}}}
    monkeypatch.setattr("sys.argv", ["-c", json.dumps(sizes)])
    exec(compile(first_calls.CHILD, "child", "exec"), {})
    told = json.loads(capsys.readouterr().out)
    assert [job[0] for job in told["jobs"]] == ["_draw_kernel"]
    assert [wait[0] for wait in told["waited"]] == ["_end_kernel"]
    assert told["waited"][0][2] - told["waited"][0][1] >= 0.02
    assert "greedy" in told["others"]
