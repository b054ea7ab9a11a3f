"""Requests run to their end on a scheduler of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from fastspec.adaptive.controller import DraftLengthPolicy
from fastspec.engine.engine import Engine
from fastspec.kv_cache.prefix import PrefixCache
from fastspec.scheduling.requests import CallPlan, Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler


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
    call = CallPlan(stop_ids, sampler, choose_k, top_logprobs, policy, lengths_of(requests))
    return Scheduler(engine).run(requests, call)


def with_prefix_cache(engine: Engine, budget: int | None = None) -> Engine:
    """The engine with a prefix cache, and rows of other calls wait for so many prompt tokens a step."""
    unit = math.lcm(engine.pages.page_size, engine.sizes.grid_unit)
    return replace(engine, prefix=PrefixCache(engine.pages, unit), sizes=replace(engine.sizes, budget=budget))


def check_pages(engine: Engine) -> None:
    """Recounts pages and what is kept of them."""
    engine.pages.check_integrity()
    if engine.prefix is not None:
        engine.prefix.check_integrity()


def nothing_leaked(engine: Engine) -> None:
    """Every page is free, but for those that are kept and that no row has; and these can be had."""
    check_pages(engine)
    assert engine.pages.num_free + engine.pages.num_idle == engine.pages.num_pages - 1
    if engine.prefix is not None:
        assert engine.prefix.make_room(engine.pages.num_pages - 1)
        assert not len(engine.prefix)
        check_pages(engine)
