"""The order of sums over K: how kernels of many rows walk through it, steps of 64 values, pass by pass, and what is
added to what.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(32)  # of a row in a step: 64 values, half a K tile of 128


@gluon.constexpr_function
def steps_of(K, S, KT, depth):
    """Steps of a pass over K, a multiple of `depth`: those that are too many multiply zeros."""
    steps = -(-K // (S * KT)) * (KT // 64)
    return -(-steps // depth) * depth


@gluon.jit
def place_of(step, STEPS: gl.constexpr, K_TILE: gl.constexpr, S: gl.constexpr):
    """Where in K the step begins, in words: passes have STEPS steps, and each starts one K tile further on."""
    HALVES: gl.constexpr = K_TILE // WORDS
    within = step % STEPS
    return step // STEPS * K_TILE + within // HALVES * (S * K_TILE) + within % HALVES * WORDS


@gluon.jit
def in_order(parts):
    """The sum of a tuple, from its first to its last."""
    total = parts[0]
    for i in gl.static_range(1, len(parts)):
        total = total + parts[i]
    return total


@gluon.jit
def as_tree(parts):
    """The sum of a tuple of a power of two: of its halves, each added so."""
    if len(parts) == 1:
        return parts[0]
    else:
        return as_tree(parts[: len(parts) // 2]) + as_tree(parts[len(parts) // 2 :])


@gluon.jit
def by_groups(parts, PAIRWISE: gl.constexpr):
    """The sum of a tuple: of PAIRWISE neighbours at a time, then of these, each from the first to the last.

    PAIRWISE 0: as one binary tree.
    """
    if PAIRWISE == 0:
        return as_tree(parts)
    else:
        total = in_order(parts[:PAIRWISE])
        for i in gl.static_range(PAIRWISE, len(parts), PAIRWISE):
            total = total + in_order(parts[i : i + PAIRWISE])
        return total
