"""The steady loop: one graph launch a step, and nothing that waits, copies or allocates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastspec.engine.engine import Engine
from fastspec.inputs.options import RowOptions
from fastspec.scheduling.requests import Request
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import GREEDY
from tests.helpers.scheduling import run_all
from tests.helpers.steady import calls_of, check_nothing_waits_or_allocates, check_one_launch, waits_raise
from tests.helpers.tiny import capture_all, tiny_engine

pytestmark = pytest.mark.gpu
STEPS = 200
GREEDY_ROW = RowOptions(0.0, 0, 1.0, 0.0, seed=0)


def steady(engine: Engine, k: int) -> Iterator[dict[int, list[int]]]:
    """A loop of many more steps than are looked at."""
    capture_all(engine, {k}, GREEDY)
    requests = [Request([1, 2, 3], 3000, GREEDY_ROW), Request([4], 3000, GREEDY_ROW)]
    return iter(run_all(engine, requests, (), GREEDY, lambda made: k))


@pytest.mark.parametrize("k", [0, 4])
def test_a_steady_loop_neither_waits_nor_allocates(k: int) -> None:
    engine = tiny_engine(batch=2, max_length=3100, device="cuda", graphs=True, depth=2)
    loop = steady(engine, k)
    next(loop)
    check_nothing_waits_or_allocates(loop, STEPS)


def test_admission_does_not_wait_either() -> None:
    """Rows that end, prompts that come in, rows that move: all of it queued."""
    engine = tiny_engine(batch=2, device="cuda", graphs=True, depth=2)
    capture_all(engine, {4}, GREEDY)

    def run() -> None:
        requests = [Request(list(range(length)), 20 + length, GREEDY_ROW) for length in (1, 40, 3, 70, 2, 9)]
        for _ in run_all(engine, requests, (), GREEDY, lambda made: 4):
            pass

    run()  # kernels of prompts are compiled at their first use
    with waits_raise():
        run()


def test_the_mode_sees_a_wait() -> None:
    with waits_raise(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("depth", [1, 2])
def test_one_launch_a_step(depth: int) -> None:
    engine = tiny_engine(batch=2, max_length=3100, device="cuda", graphs=True, depth=depth)
    check_one_launch(steady(engine, 4), STEPS)


def test_the_trace_sees_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill beside every replay, as a forgotten reset would be."""
    engine = tiny_engine(batch=2, max_length=3100, device="cuda", graphs=True)
    loop = steady(engine, 4)
    collect = Scheduler._collect

    def planted(self: Scheduler, step: object) -> dict[int, list[int]]:
        engine.state.draft_probs.zero_()
        return collect(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "_collect", planted)
    calls = calls_of(loop, STEPS)
    assert any(count >= STEPS for name, count in calls.items() if "Launch" in name and "Graph" not in name)
