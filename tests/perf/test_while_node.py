"""The host's side of loops on the device: what it reads of launches that may end before they made all their steps."""

from __future__ import annotations

import pytest

from fastspec.inputs.options import RowOptions
from fastspec.runtime.engine import Engine
from fastspec.runtime.scheduler import Request, Scheduler
from fastspec.shapes import GREEDY
from perf.experiments.while_node import read_loops
from tests.helpers.tiny import tiny_engine

K = 4


def first_step(engine: Engine, new: int) -> tuple[Scheduler, Request]:
    request = Request([1, 2, 3], new, RowOptions(0.0, 0, 1.0, 0.0, seed=0))
    return Scheduler(engine, [request], (), GREEDY, lambda made: K), request


def read_back(n: int, ahead: int, *, leaves: bool) -> tuple[Request, Request, int]:
    """What the loop of one launch a step gives, what launches of n steps give, and the steps read too few.

    `leaves`: a launch ends when the row does, as it should.
    """
    engine = tiny_engine(batch=1, same=True)
    loop, wanted = first_step(engine, 50)
    for _ in loop:
        pass
    loop, request = first_step(engine, 50)
    next(iter(loop))
    body = engine._body(1, engine.shape(K, GREEDY, None, engine.state.tokens.shape[1]))

    def launch() -> None:
        for _ in range(n):
            if not leaves or engine.state.running.any():
                body()

    read_loops(engine, request, launch, n, ahead)
    return wanted, request, int(engine.ring.outbox.counter) - engine.ring.launched


@pytest.mark.parametrize(("n", "ahead"), [(1, 1), (4, 1), (4, 3), (64, 1)])
def test_loops_are_read_to_the_end(n: int, ahead: int) -> None:
    wanted, request, left = read_back(n, ahead, leaves=True)
    assert (request.new_tokens, request.steps, request.finish_reason) == (wanted.new_tokens, wanted.steps, "length")
    assert left == 0


def test_a_loop_that_is_not_left_shows() -> None:
    wanted, request, left = read_back(4, 2, leaves=False)
    assert request.new_tokens == wanted.new_tokens
    assert left == -(-(wanted.steps - 1) // 4) * 4 + 4 - (wanted.steps - 1)


def test_the_ring_is_not_overrun() -> None:
    engine = tiny_engine(batch=1)
    _, request = first_step(engine, 5)
    with pytest.raises(ValueError, match="64 slots"):
        read_loops(engine, request, lambda: None, 32, 3)
