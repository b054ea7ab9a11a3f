"""The norm in front of a product with quantised weights and few rows, within it: factors of rows, before the loop.

Bits are those of `linear.norm`: the squares are summed in the order that belongs to the weight's split of K. Each
program does this for its rows once, spread over all threads, so that a row costs a few instructions of each.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.linear.epilogue import add_squares, added_up, folded, no_squares, root_scale

IN_FLIGHT = gl.constexpr(8)  # K tiles of x


@gluon.jit
def _repeated(scale, N: gl.constexpr):
    """[n] -> [N], over and over; what follows the last row is not stored."""
    for _ in gl.static_range(3):
        if scale.shape[0] < N:
            scale = gl.reshape(gl.permute(gl.join(scale, scale), (1, 0)), [2 * scale.shape[0]])
    return scale


@gluon.jit
def row_scales(x_at, M, eps, K: gl.constexpr, S: gl.constexpr, KT: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr):
    """1 / root of the mean of squares of the M rows at x_at, words [M, K / 2] -> fp32 [N].

    ROWS: a power of two, M at least.
    """
    RUNS: gl.constexpr = KT // 8  # of 8 values, in a K tile
    T: gl.constexpr = (K + S * KT - 1) // (S * KT)
    STEP: gl.constexpr = S * KT // 2
    lay: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [2, S // 2, 1], [2, 1, 0])
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, lay))), 1), 2)
    run = gl.arange(0, S * RUNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, lay)))
    run = gl.expand_dims(gl.expand_dims(run, 0), 2)
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, lay))), 0), 1)
    place = run * 4 + word
    of = gl.minimum(row, M - 1) * (K // 2) + place
    total = no_squares(gl.full([ROWS, S * RUNS, 4], 0, gl.int32, layout=lay))
    for first in gl.static_range(0, T, IN_FLIGHT):
        xs = ()
        for i in gl.static_range(first, min(T, first + IN_FLIGHT)):
            xs = xs + (gl.load(x_at + (of + i * STEP), mask=place + i * STEP + row * 0 < K // 2, other=0),)
        for i in gl.static_range(len(xs)):
            total = add_squares(total, xs[i], gl.bfloat16)
    runs: gl.constexpr = gl.BlockedLayout([1, RUNS], [32, 1], [S, 1], [1, 0])
    ways: gl.constexpr = gl.BlockedLayout([1, S], [32, 1], [S, 1], [1, 0])
    sums = folded(gl.convert_layout(gl.reshape(total, [ROWS * S, RUNS]), runs))
    squares = added_up(gl.convert_layout(gl.reshape(sums, [ROWS, S]), ways))
    return _repeated(root_scale(squares, K, eps), N)
