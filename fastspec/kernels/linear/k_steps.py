"""The order in which kernels of many rows walk through K: steps of 64 values, pass by pass."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(32)  # of a row in a step: 64 values, half a slab of 128


@gluon.constexpr_function
def steps_of(K, S, KT, depth):
    """Steps of a pass over K, a multiple of `depth`: those that are too many multiply zeros."""
    steps = -(-K // (S * KT)) * (KT // 64)
    return -(-steps // depth) * depth


@gluon.jit
def place_of(step, STEPS: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr):
    """Where in K the step begins, in words: passes have STEPS steps, and each starts one slab further on."""
    HALVES: gl.constexpr = SLAB // WORDS
    within = step % STEPS
    return step // STEPS * SLAB + within // HALVES * (S * SLAB) + within % HALVES * WORDS
