"""Warns after a call whose draft tokens cost more time than they saved."""

from __future__ import annotations

from contextlib import ExitStack

from fastspec.engine.explain import break_even_advice, lookup_advice, may_lose
from fastspec.engine.settings import Settings
from fastspec.output import Stats
from fastspec.scheduling.draft_length import DraftPlan
from fastspec.scheduling.loop import Loop
from fastspec.shapes import GREEDY


def advice_on_drafts(stats: Stats, settings: Settings, loop: Loop, drafting: DraftPlan) -> str | None:
    """Returns a warning if the draft tokens of a call cost more time than they saved.

    Returns None if they saved time, or if this cannot be judged now.
    The cost of a draft model is estimated from the bytes of its weights. The cost of lookup drafting is measured: one
    step without draft tokens and one step with them are timed, once for each batch size. With CUDA graphs it is not
    measured, because a captured step takes about the same time with a few more tokens.

    Args:
        stats: statistics of the call.
        settings: settings of the generator.
        loop: loop of the generator. It is measured only if no other call runs.
        drafting: plan whose controller of greedy steps stores the measured times.
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
