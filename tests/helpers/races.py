"""Two exponential races with the same numbers: how their winners go together, in exact fractions.

Token x wins the race of law q at time min over z of T_z / q_z, all T_z exponential of rate one and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise


def agreement(q: Sequence[Fraction], p: Sequence[Fraction]) -> Fraction:
    """Chance that both races have one winner: x wins both when T_x beats every T_z / max(q_z / q_x, p_z / p_x)."""
    both = [x for x in range(len(p)) if q[x] and p[x]]
    return sum(
        (1 / sum(max(q[z] / q[x], p[z] / p[x]) for z in range(len(p))) for x in both),
        Fraction(0),
    )


@cache
def joint(q: tuple[Fraction, ...], p: tuple[Fraction, ...]) -> list[list[Fraction]]:
    """[x][y]: chance that x wins the race of q while y wins the race of p."""
    return [[_chance(q, p, x, y) for y in range(len(p))] for x in range(len(q))]


def _chance(q: tuple[Fraction, ...], p: tuple[Fraction, ...], x: int, y: int) -> Fraction:
    if not q[x] or not p[y]:
        return Fraction(0)
    if x == y:
        return 1 / sum((max(q[z] / q[x], p[z] / p[x]) for z in range(len(p))), Fraction(0))
    # with a = T_x / q_x, b = T_y / p_y and r = b / a: y must not win q's race, nor x p's, so q_y/p_y <= r <= q_x/p_x;
    # the others lose both with chance exp(-sum max(q_z a, p_z b)); over a the integral is 1 / (c + d r)^2
    low = q[y] / p[y]
    high = q[x] / p[x] if p[x] else None
    if high is not None and high <= low:
        return Fraction(0)
    others = [z for z in range(len(p)) if z not in (x, y)]
    inner = sorted({q[z] / p[z] for z in others if p[z]})
    cuts = [low, *(cut for cut in inner if cut > low and (high is None or cut < high)), high]
    total = Fraction(0)
    for start, end in pairwise(cuts):
        assert start is not None
        middle = start + 1 if end is None else (start + end) / 2
        c = q[x] + sum((q[z] for z in others if q[z] > p[z] * middle), Fraction(0))
        d = p[y] + sum((p[z] for z in others if q[z] <= p[z] * middle), Fraction(0))
        total += (1 / (c + d * start) - (0 if end is None else 1 / (c + d * end))) / d
    return q[x] * p[y] * total
