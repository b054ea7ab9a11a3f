"""The norm in front of products with quantised weights: factors of rows, of squares that the tensor core adds up.

A row's sum of squares is an element of the product of rows with themselves, whose operands are those of the product
with the weight, in the same registers: so a product of few rows makes it for next to nothing, and needs no kernel in
front. Before many rows `norm_kernel` makes it in the same order: S sums of every S-th slab, then added in order.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch
from fastspec.kernels.linear.epilogue import added_up, root_scale, row_operand, times_gamma, weight_operand
from fastspec.kernels.linear.quantised.loads import rows_in
from fastspec.kernels.linear.quantised.plan import BLOCK

ROWS = gl.constexpr(BLOCK)
AHEAD = gl.constexpr(4)  # slabs whose loads are under way together


@gluon.jit
def squared(sums, words, left: gl.constexpr, right: gl.constexpr):
    """sums [S, 16, 8] and the products of 8 rows of x, words [S, UNIT / 2, 8], with each other, twice."""
    S: gl.constexpr = words.shape[0]
    rows = gl.permute(words, (0, 2, 1))
    twice = gl.reshape(gl.permute(gl.join(rows, rows), (0, 3, 1, 2)), [S, 16, words.shape[1]])
    return mma_v2(weight_operand(twice, gl.bfloat16, left), row_operand(words, gl.bfloat16, right), sums)


@gluon.jit
def factors_of(sums, K: gl.constexpr, eps):
    """1 / sqrt(mean(x^2) + eps) of rows, fp32 [8], of what `squared` left of each way."""
    S: gl.constexpr = sums.shape[0]
    lay: gl.constexpr = sums.type.layout
    i = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, lay))), 0), 2)
    j = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, lay))), 0), 1)
    ways = gl.sum(gl.where(i == j, sums, 0.0), axis=1)
    together: gl.constexpr = gl.BlockedLayout([1, S], [8, 4], [S, 1], [1, 0])
    return root_scale(added_up(gl.convert_layout(gl.permute(ways, (1, 0)), together)), K, eps)


@gluon.jit
def times(words, gamma):
    """Words [S, UNIT / 2, 8] of x times words [S, UNIT / 2, 1] of a norm's weight, each product rounded once."""
    words, gamma = gl.broadcast(words, gl.convert_layout(gamma, words.type.layout, assert_trivial=True))
    return times_gamma(words, gamma, gl.bfloat16)


@gluon.jit(do_not_specialize=["M"])
def code_norm_kernel(
    x_ptr,  # int32 words [M, K / 2]
    gamma_ptr,  # int32 words [K / 2]
    out_ptr,  # int32 words [M, K / 2]: x * gamma
    factor_ptr,  # fp32 [M]
    M,
    eps,
    K: gl.constexpr,
    S: gl.constexpr,
    KT: gl.constexpr,
    UNIT: gl.constexpr,
    PDL: gl.constexpr,
):
    """8 rows: x * gamma, and what the products are scaled by."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, UNIT // 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, UNIT // 8)
    x: gl.constexpr = gl.DotOperandLayout(1, mma, UNIT // 16)
    T: gl.constexpr = (K + S * KT - 1) // (S * KT)
    RAGGED: gl.constexpr = K % (S * KT) != 0
    STEP: gl.constexpr = S * KT // 2
    UNITS: gl.constexpr = KT // UNIT
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, x))), 1), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, UNIT // 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, x))), 0), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, x))), 0), 1)
    first = gl.program_id(0) * ROWS
    base = first.to(gl.int64) * (K // 2)
    place = s * (KT // 2) + k
    of = gl.minimum(m, M - 1 - first) * (K // 2) + place
    inside = (T - 1) * S + s < K // KT
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = gl.zeros([S, 16, ROWS], gl.float32, mma)
    for begin in gl.static_range(0, T, AHEAD):
        rows, gammas = (), ()
        for i in gl.static_range(begin, min(T, begin + AHEAD)):
            rows = rows + rows_in(x_ptr + base, of, i * STEP, inside, RAGGED and i == T - 1, KT, UNIT)
            gammas = gammas + rows_in(gamma_ptr, place, i * STEP, inside, RAGGED and i == T - 1, KT, UNIT)
        for i in gl.static_range(len(rows)):
            sums = squared(sums, rows[i], left, right)
            at = of + ((begin + i // UNITS) * STEP + i % UNITS * (UNIT // 2))
            there = (m < M - first) & (at < (m + 1) * (K // 2))
            gl.store(out_ptr + base + at, times(rows[i], gammas[i]), mask=there)
    factors = factors_of(sums, K, eps)
    row = gl.arange(0, ROWS, layout=factors.type.layout)
    gl.store(factor_ptr + first + row, factors, mask=row < M - first)


def norm_before(
    x: Tensor, gamma: Tensor, eps: float, ways: int, slab: int, unit: int, pdl: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [M, K], gamma [K], both bf16 -> (x * gamma [M, K], fp32 [M] 1 / sqrt(mean(x^2) + eps)).

    Args:
        x: contiguous. gamma: contiguous. ways, slab: the split of K of the product. unit: values of K of one product.
    """
    rows, k = x.shape
    scaled, factors = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    launch(
        code_norm_kernel,
        (-(-rows // BLOCK),),
        *(each.view(torch.int32) for each in (x, gamma, scaled)),
        *(factors, rows, eps),
        **{"K": k, "S": ways, "KT": slab, "UNIT": unit, "PDL": pdl},
        num_warps=ways,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return scaled, factors
