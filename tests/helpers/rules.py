"""Exact numbers out of float64 ones."""

from __future__ import annotations

from fractions import Fraction

DENOMINATOR = 2**26


def exact(value: float) -> Fraction:
    """The fraction with a denominator of at most 2^26 that a float64 in [0, 1] stands for.

    Two such fractions lie at least 2^-52 apart, and a quotient of exact numbers is off by at most 2^-54: if it is a
    fraction of this kind at all, it is this one.
    """
    found = Fraction(value).limit_denominator(DENOMINATOR)
    assert abs(found - Fraction(value)) <= Fraction(1, 2**54), f"{value} is no fraction with a small denominator"
    return found
