"""RMSNorm before a packed product with many rows: x * gamma, rounded once, and a factor for the sums of each row.

Products of up to 8 rows compute the norm in every CTA. This kernel computes it once. The bits are the same, because
both sum the squares in the same order, by the splits of K of the product.
"""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch
from fastspec.kernels.product.epilogue import add_squares, added_up, folded, no_squares, root_scale, times_gamma

BLOCK = gl.constexpr(16)  # number of groups of S K tiles that are loaded ahead


@gluon.constexpr_function
def _warps(lanes):
    return max(1, lanes // 32)


@gluon.jit
def _words(at, of, first: gl.constexpr, T: gl.constexpr, STEP: gl.constexpr, K: gl.constexpr):
    """Loads the 32-bit words at offsets `of` in each of up to BLOCK groups of S K tiles, from group `first` on.

    Words beyond K are zero. at: address of the row. T: number of all groups of the row. STEP: words of a group.
    """
    found = ()
    for i in gl.static_range(first, min(T, first + BLOCK)):
        found = found + (gl.load(at + (of + i * STEP), mask=of + i * STEP < K // 2, other=0),)
    return found


@gluon.jit
def norm_kernel(
    x_ptr,  # int32 words [M, K / 2]
    gamma_ptr,  # int32 words [K / 2]
    out_ptr,  # int32 words [M, K / 2]
    scale_ptr,  # fp32 [M]
    eps,
    K: gl.constexpr,
    S: gl.constexpr,
    KT: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Computes x * gamma and 1 / sqrt(mean(x^2) + eps) of one row of x in each CTA.

    S, KT: number of splits of K, and values of K in a K tile, of the product that follows.
    """
    RUNS: gl.constexpr = KT // 8  # number of 16-byte loads per K tile and row
    WARPS: gl.constexpr = _warps(S * RUNS)
    T: gl.constexpr = (K + S * KT - 1) // (S * KT)
    STEP: gl.constexpr = S * KT // 2
    lay: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    run = gl.expand_dims(gl.arange(0, S * RUNS, layout=gl.SliceLayout(1, lay)), 1)
    of = run * 4 + gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, lay)), 0)
    row = gl.program_id(0).to(gl.int64)
    here = x_ptr + row * (K // 2)
    there = out_ptr + row * (K // 2)
    # loaded before the wait: gamma comes from device memory, x from the L2 cache
    gs = _words(gamma_ptr, of, 0, T, STEP, K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = no_squares(gl.full([S * RUNS, 4], 0, gl.int32, layout=lay))
    for first in gl.static_range(0, T, BLOCK):
        xs = _words(here, of, first, T, STEP, K)
        if first > 0:
            gs = _words(gamma_ptr, of, first, T, STEP, K)
        for i in gl.static_range(len(xs)):
            total = add_squares(total, xs[i], DTYPE)
            at = of + (first + i) * STEP
            gl.store(there + at, times_gamma(xs[i], gs[i], DTYPE), mask=at < K // 2)
    merged: gl.constexpr = gl.BlockedLayout([S, RUNS], [1, 32], [1, WARPS], [1, 0])
    splits = folded(gl.convert_layout(gl.reshape(total, [S, RUNS]), merged))
    square = added_up(gl.reshape(splits, [1, S]))
    at = gl.arange(0, 1, layout=square.type.layout)
    gl.store(scale_ptr + row + at, root_scale(square, K, eps))


def norm_rows(
    x: Tensor, gamma: Tensor, eps: float, splits: int, k_tile: int, dtype: gl.dtype, pdl: bool
) -> tuple[Tensor, Tensor]:
    """Returns x * gamma [M, K] in x's dtype, and 1 / sqrt(mean(x^2) + eps), fp32 [M].

    Args:
        x, gamma: [M, K] and [K], bf16 or fp16, contiguous.
        eps: epsilon of the norm.
        splits, k_tile: `split_k` and `k_tile` of the `Split` of the product that follows.
        dtype: x's dtype in Gluon.
        pdl: see `packed_linear`.
    """
    rows, k = x.shape
    scaled, factor = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    launch(
        norm_kernel,
        (rows,),
        *(each.view(torch.int32) for each in (x, gamma, scaled)),
        factor,
        eps,
        **{"K": k, "S": splits, "KT": k_tile, "PDL": pdl, "DTYPE": dtype},
        num_warps=max(1, splits * k_tile // 256),
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return scaled, factor
