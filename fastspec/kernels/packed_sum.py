"""The end of a packed product whose ways were left apart: adds them up in order, then bias, residual, one rounding.

Where a norm and another product come next, the row is there already, and goes on normed and regrouped as
`packed_norm.norm_rows` would leave it, to the same bits.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.device import launch
from fastspec.kernels.packed_norm import leave_factor
from fastspec.kernels.packed_parts import add_squares, in_order, no_squares, regrouped, times_gamma

COLUMNS = 512  # of one program that only adds up
WARPS = 4
ROW_WARPS = 16  # of one that norms a row, at most


@gluon.jit
def _sums(
    parts_ptr, scale_ptr, bias_ptr, residual_ptr, row, n, M, N: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """fp32 sums of columns n of a row with all that belongs to them; zeros from N on."""
    ways = ()
    for i in gl.static_range(S):
        ways = ways + (gl.load(parts_ptr + ((i * M + row).to(gl.int64) * N + n), mask=n < N, other=0.0),)
    total = in_order(ways)
    if scale_ptr is not None:
        total = total * gl.load(scale_ptr + row)
    if bias_ptr is not None:
        total += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    if residual_ptr is not None:
        total += gl.load(residual_ptr + (row.to(gl.int64) * N + n), mask=n < N, other=0.0).to(gl.float32)
    return total


@gluon.jit(do_not_specialize=["M"])
def sum_kernel(
    parts_ptr,  # fp32 [S, M, N]
    scale_ptr,  # fp32 [M] or None
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N] or None
    out_ptr,  # [M, N]
    M,
    N: gl.constexpr,
    S: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """COLUMNS columns of a row."""
    row = gl.program_id(0)
    n = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = _sums(parts_ptr, scale_ptr, bias_ptr, residual_ptr, row, n, M, N, S)
    gl.store(out_ptr + (row.to(gl.int64) * N + n), total.to(out_ptr.dtype.element_ty), mask=n < N)


@gluon.constexpr_function
def _room(K, S, KT):
    """Words of a row, up to a power of two, and of whole slabs."""
    return max(1 << (K // 2 - 1).bit_length(), S * KT // 2)


@gluon.jit(do_not_specialize=["M"])
def sum_norm_kernel(
    parts_ptr,  # fp32 [WAYS, M, K]
    bias_ptr,  # [K] or None
    residual_ptr,  # [M, K]
    out_ptr,  # [M, K]: the sums
    gamma_ptr,  # int32 words [K / 2]
    normed_ptr,  # int32 words [M, K / 2], regrouped: the sums * gamma
    factor_ptr,  # fp32 [M]
    eps,
    M,
    WAYS: gl.constexpr,  # of the product before
    K: gl.constexpr,
    S: gl.constexpr,  # of the product behind
    KT: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """A row."""
    RUNS: gl.constexpr = KT // 8  # in a slab: what one lane of the product loads at once
    STEP: gl.constexpr = S * KT // 2  # words
    ROOM: gl.constexpr = _room(K, S, KT)
    row = gl.program_id(0)
    n = gl.arange(0, 2 * ROOM, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = _sums(parts_ptr, None, bias_ptr, residual_ptr, row, n, M, K, WAYS).to(DTYPE)
    gl.store(out_ptr + (row.to(gl.int64) * K + n), total, mask=n < K)
    low, high = gl.split(gl.reshape(total.to(gl.int16, bitcast=True), [ROOM, 2]))
    words = (high.to(gl.int32) << 16) | (low.to(gl.int32) & 0xFFFF)
    word = gl.arange(0, ROOM, layout=words.type.layout)
    gamma = gl.load(gamma_ptr + word, mask=word < K // 2, other=0)
    to = normed_ptr + (row.to(gl.int64) * (K // 2) + regrouped(word))
    gl.store(to, times_gamma(words, gamma, DTYPE), mask=word < K // 2)

    row_of_words = gl.allocate_shared_memory(gl.int32, [ROOM], gl.SwizzledSharedLayout(1, 1, 1, [0]), words)
    lanes: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    squares = no_squares(gl.full([S * RUNS, 4], 0, gl.int32, layout=lanes))
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    for first in gl.static_range(0, (K // 2 + STEP - 1) // STEP * STEP, STEP):
        some = gl.reshape(row_of_words.slice(first, STEP).load(flat), [S * RUNS, 4])
        squares = add_squares(squares, gl.convert_layout(some, lanes), DTYPE)
    leave_factor(squares, factor_ptr + row, eps, K, S, RUNS, WARPS)


def add_up(
    parts: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None, out: Tensor, pdl: bool
) -> None:
    """out [M, N] = rounded(the sum of parts fp32 [S, M, N], in order, * scale [M] + bias [N] + residual [M, N])."""
    ways, rows, n = parts.shape
    launch(
        sum_kernel,
        (rows, triton.cdiv(n, COLUMNS)),
        *(parts, scale, bias, residual, out, rows),
        **{"N": n, "S": ways, "COLUMNS": COLUMNS, "WARPS": WARPS, "PDL": pdl},
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )


def add_up_and_norm(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: tuple[Tensor, float],
    split: tuple[int, int],
    dtype: gl.dtype,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `add_up` gives, [M, K] as residual, and what `norm_rows` makes of it for a product: regrouped, and factors.

    Args:
        parts: fp32 [S, M, K].
        norm: weight [K] and epsilon.
        split: ways and slab of the product that comes next.
        dtype: of residual, in Gluon's terms.
    """
    ways, rows, k = parts.shape
    warps = min(ROW_WARPS, max(4, triton.next_power_of_2(k) // 256))  # 8 columns to a thread
    out, normed = torch.empty_like(residual), torch.empty_like(residual)
    factor = residual.new_empty(rows, dtype=torch.float32)
    launch(
        sum_norm_kernel,
        (rows,),
        *(parts, bias, residual, out, norm[0].view(torch.int32), normed.view(torch.int32), factor, norm[1], rows),
        **{"WAYS": ways, "K": k, "S": split[0], "KT": split[1], "WARPS": warps, "PDL": pdl, "DTYPE": dtype},
        num_warps=warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out, normed, factor
