"""Warns after a call whose drafts cost more time than they saved."""

from __future__ import annotations

from contextlib import ExitStack

from fastspec.engine.explain import break_even_advice, lookup_advice, may_lose
from fastspec.engine.settings import Settings
from fastspec.output import Stats
from fastspec.scheduling.draft_length import DraftPlan
from fastspec.scheduling.loop import Loop
from fastspec.shapes import GREEDY


def advice_on_drafts(stats: Stats, settings: Settings, loop: Loop, drafting: DraftPlan) -> str | None:
    """Returns a warning if the drafts of a call cost more time than they saved.

    None: they saved time, or it cannot be judged now. The cost of a draft model is estimated by its weight bytes. For
    lookup a plain step and a step with drafts are timed, once for each number of rows. This is left out with CUDA
    graphs, because a captured step takes about the same time with a few more tokens.

    Args:
        stats: counts of the call.
        settings: settings of the generator.
        loop: runs the measurement, if no other call runs.
        drafting: its controller of greedy steps keeps the measured times.
    """
    if advice := break_even_advice(stats, settings.layout):
        return advice
    engine = loop.scheduler.engine
    if engine.runner.static or settings.layout.ranks > 1 or not may_lose(stats, settings.layout):
        return None
    rows, controller = engine.shapes.bucket(len(stats.rows)), drafting.controller(GREEDY, None)
    known = controller.times.measured
    missing = [k for k in (0, stats.k) if (rows, k) not in known]
    if missing:
        with ExitStack() as stack:
            try:
                stack.enter_context(loop.alone())
            except RuntimeError:  # other calls run
                return None
            stack.enter_context(engine.on_device())
            controller.know({(rows, k): engine.step_seconds(rows, k, GREEDY) for k in missing})
    return lookup_advice(stats, known[rows, 0], known[rows, stats.k])
