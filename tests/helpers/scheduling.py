"""Requests run to their end on a scheduler of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastspec.runtime.engine import Engine
from fastspec.runtime.request import Call, Request, lengths_of
from fastspec.runtime.scheduler import Scheduler
from fastspec.runtime.step_timer import DraftLengthPolicy


def run_all(
    engine: Engine,
    requests: list[Request],
    stop_ids: tuple[int, ...],
    sampler: str,
    choose_k: Callable[[int], int],
    top_logprobs: int | None = None,
    policy: DraftLengthPolicy | None = None,
) -> Iterator[dict[int, list[int]]]:
    """Yields, after every step, the new tokens of each request that stepped, by its index."""
    call = Call(stop_ids, sampler, choose_k, top_logprobs, policy, lengths_of(requests))
    return Scheduler(engine).run(requests, call)
