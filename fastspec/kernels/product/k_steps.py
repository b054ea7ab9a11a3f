"""Order of the sum over K in the kernels for many rows.

A pass over K computes one of S partial sums, in steps of 64 values. `by_groups` adds partial sums in a fixed order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(32)  # words of a row in a step: 64 values, half a K tile of 128


@gluon.constexpr_function
def steps_of(K, S, KT, depth):
    """Returns the number of steps of a pass over K, rounded up to a multiple of `depth`. Extra steps multiply zeros."""
    steps = -(-K // (S * KT)) * (KT // 64)
    return -(-steps // depth) * depth


@gluon.jit
def place_of(step, STEPS: gl.constexpr, K_TILE: gl.constexpr, S: gl.constexpr):
    """Returns the index, along K in words, of the first word that a step multiplies. A word has two values.

    Steps are numbered through all passes, STEPS in each pass. Pass p reads the K tiles p, p + S, p + 2 S and so on.
    K_TILE: words of a K tile.
    """
    HALVES: gl.constexpr = K_TILE // WORDS
    within = step % STEPS
    return step // STEPS * K_TILE + within // HALVES * (S * K_TILE) + within % HALVES * WORDS


@gluon.jit
def in_order(parts):
    """Adds the elements of a tuple, from the first to the last."""
    total = parts[0]
    for i in gl.static_range(1, len(parts)):
        total = total + parts[i]
    return total


@gluon.jit
def as_tree(parts):
    """Adds the elements of a tuple as a balanced binary tree. Their number is a power of two."""
    if len(parts) == 1:
        return parts[0]
    else:
        return as_tree(parts[: len(parts) // 2]) + as_tree(parts[len(parts) // 2 :])


@gluon.jit
def by_groups(parts, PAIRWISE: gl.constexpr):
    """Adds the elements of a tuple: first each group of PAIRWISE neighbours, then the sums of the groups, in order.

    If PAIRWISE is 0, adds all elements as one binary tree.
    """
    if PAIRWISE == 0:
        return as_tree(parts)
    else:
        total = in_order(parts[:PAIRWISE])
        for i in gl.static_range(PAIRWISE, len(parts), PAIRWISE):
            total = total + in_order(parts[i : i + PAIRWISE])
        return total
