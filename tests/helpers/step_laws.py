"""Laws of whole decodes over a tiny vocabulary, from laws of single steps."""

from __future__ import annotations

from collections.abc import Callable

from fastspec.state import RUNNING

PROMPT = (1, 2)
Context = tuple[int, ...]
Laws = dict[tuple[Context, int], float]  # (tokens, finish) -> probability


def law_of_steps(outcomes: Callable[[list[Context]], list[Laws]]) -> Laws:
    """Law of finished rows that begin with PROMPT. `outcomes`: laws of one step for contexts of one length."""
    alive: dict[Context, float] = {PROMPT: 1.0}
    finished: Laws = {}
    while alive:
        length = min(map(len, alive))
        group = [context for context in alive if len(context) == length]
        for context, law in zip(group, outcomes(group), strict=True):
            mass = alive.pop(context)
            for (tokens, finish), weight in law.items():
                if finish == RUNNING:
                    alive[tokens] = alive.get(tokens, 0.0) + mass * weight
                else:
                    finished[tokens, finish] = finished.get((tokens, finish), 0.0) + mass * weight
    return finished
