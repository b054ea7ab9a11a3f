"""How far counts may lie from what a law makes expect."""

from __future__ import annotations

import math


def chi_square_limit(degrees: int) -> float:
    """The 1 - 1e-6 quantile by Wilson and Hilferty's cube: one false alarm in a million seeds."""
    z = 4.7534
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
