"""Intervals for rates: what a mean over few prompts is worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

RESAMPLES = 2000
LEVEL = 0.95


def rate(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Sum over sum: tokens per second of a set of prompts weighs each prompt by its time."""
    return sum(numerators) / sum(denominators)


def rate_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95% bootstrap interval of `rate` over prompts drawn again with replacement.

    Raises:
        ValueError: no samples, or not as many numerators as denominators.
    """
    ones = [1.0] * len(numerators)
    return ratio_interval(numerators, denominators, ones, ones, resamples=resamples, seed=seed)


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    base_numerators: Sequence[float],
    base_denominators: Sequence[float],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """95% bootstrap interval of one rate over another on the same prompts: both are drawn together.

    Raises:
        ValueError: no samples, or the four are not of one length.
    """
    samples = list(zip(numerators, denominators, base_numerators, base_denominators, strict=True))
    if not samples:
        raise ValueError("no samples, so no interval")
    draw = random.Random(seed)
    drawn = []
    for _ in range(resamples):
        a, b, c, d = (sum(column) for column in zip(*draw.choices(samples, k=len(samples)), strict=True))
        drawn.append(a / b / (c / d))
    drawn.sort()
    outside = (1 - LEVEL) / 2
    return drawn[int(outside * resamples)], drawn[int((1 - outside) * resamples) - 1]
