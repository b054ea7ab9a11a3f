"""Order of sums over K in kernels for many rows: steps of 64 values, passes of steps, and how passes are added."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(32)  # words of a row in a step: 64 values, half a K tile of 128


@gluon.constexpr_function
def steps_of(K, S, KT, depth):
    """Returns the number of steps of a pass over K, a multiple of `depth`. Extra steps multiply zeros."""
    steps = -(-K // (S * KT)) * (KT // 64)
    return -(-steps // depth) * depth


@gluon.jit
def place_of(step, STEPS: gl.constexpr, K_TILE: gl.constexpr, S: gl.constexpr):
    """Returns the word of K at which a step begins.

    A pass has STEPS steps, and each pass starts one K tile after the last.
    """
    HALVES: gl.constexpr = K_TILE // WORDS
    within = step % STEPS
    return step // STEPS * K_TILE + within // HALVES * (S * K_TILE) + within % HALVES * WORDS


@gluon.jit
def in_order(parts):
    """Sums a tuple from its first element to its last."""
    total = parts[0]
    for i in gl.static_range(1, len(parts)):
        total = total + parts[i]
    return total


@gluon.jit
def as_tree(parts):
    """Sums a tuple of a power of two of elements as a binary tree of its halves."""
    if len(parts) == 1:
        return parts[0]
    else:
        return as_tree(parts[: len(parts) // 2]) + as_tree(parts[len(parts) // 2 :])


@gluon.jit
def by_groups(parts, PAIRWISE: gl.constexpr):
    """Adds each PAIRWISE neighbours of a tuple, then these sums, both in order.

    If PAIRWISE is 0, adds all as one binary tree.
    """
    if PAIRWISE == 0:
        return as_tree(parts)
    else:
        total = in_order(parts[:PAIRWISE])
        for i in gl.static_range(PAIRWISE, len(parts), PAIRWISE):
            total = total + in_order(parts[i : i + PAIRWISE])
        return total
