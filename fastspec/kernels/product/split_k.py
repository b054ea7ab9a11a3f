"""Kernels between packed products of many rows: add partial sums, bias and residual, and prepare the next product.

A sum is rounded once. For a next product with a norm, rows are multiplied with gamma and regrouped, as the TMA kernels
read them. The TMA kernel multiplies its sums by 1 / sqrt(mean(x^2) + eps). It gets the squares as one sum for each of
its splits of K, and adds these in the order of norm.py. So a CTA here has the part of a row that one split multiplies,
and even few rows give many CTAs.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.gluon_compat import copy_to_shared
from fastspec.kernels.common.launch import launch
from fastspec.kernels.product.epilogue import (
    STAYS,
    add_squares,
    folded,
    no_squares,
    regrouped,
    splits_scale,
    times_gamma,
)
from fastspec.kernels.product.k_steps import by_groups
from fastspec.kernels.product.quantised.conversion import raised_rows

COLUMNS = 512  # columns of one CTA of `sum_kernel`
WARPS = 4
FEW_PROGRAMS = 264  # two for each SM of an H200
# words of shared memory of a CTA, if there are few CTAs, or more: so at most three, or six, share an SM. CTAs start
# early; without this limit they would all start on the first free SMs
SPREAD = (16384, 8192)


@dataclass(frozen=True, slots=True)
class Parts:
    """Partial sums of a product, one for each split of K.

    Attributes:
        sums: fp32 [SPLITS, M, N].
        pairwise: number of neighbouring splits that are added first; 0: all are added as one binary tree.
        factors: fp32 [N], a factor for the sum of each column, for weights in codes. None for 16-bit weights.
    """

    sums: Tensor
    pairwise: int
    factors: Tensor | None = None

    @property
    def is_tree(self) -> bool:
        """True if splits are added as one binary tree, neighbours first."""
        return self.pairwise == 0 or len(self.sums) <= 2 or (len(self.sums), self.pairwise) == (4, 2)


@gluon.jit
def sums_of(
    parts_ptr, factors_ptr, bias_ptr, residual_ptr, factor, row, n, there, M,
    N: gl.constexpr, SPLITS: gl.constexpr, PAIRWISE: gl.constexpr,
):  # fmt: skip
    """Returns columns `n` of row `row`, in fp32: (sum of SPLITS partial sums * factors * factor) + bias + residual.

    factors_ptr: fp32 [N], a factor for each column. factor: factor of the row. If a pointer or the factor is None, its
    operation is left out. With SPLITS 0 the result is only the residual. Where the mask `there` is False, loaded values
    count as zero. Partial sums are loaded through shared memory, because the compiler keeps only few loads into
    registers in flight.
    """
    at = row.to(gl.int64) * N + n
    held = ()
    for i in gl.static_range(SPLITS):
        held = held + (gl.allocate_shared_memory(gl.float32, [n.shape[0]], gl.SwizzledSharedLayout(1, 1, 1, [0])),)
        from_way = parts_ptr + ((i * M + row).to(gl.int64) * N + n)
        copy_to_shared(held[i], from_way, mask=there)
    if SPLITS > 0:
        async_copy.commit_group()
    if residual_ptr is not None:
        residual = gl.load(residual_ptr + at, mask=there, other=0.0).to(gl.float32)
    if SPLITS > 0:
        async_copy.wait_group(0)
        splits = ()
        for i in gl.static_range(SPLITS):
            splits = splits + (held[i].load(n.type.layout),)
        total = by_groups(splits, PAIRWISE)
        if factors_ptr is not None:
            total = total * gl.load(factors_ptr + n, mask=there, other=0.0)
        if factor is not None:
            total = total * factor
        if bias_ptr is not None:
            total += gl.load(bias_ptr + n, mask=there, other=0.0).to(gl.float32)
        if residual_ptr is not None:
            total += residual
        return total
    else:
        return residual


@gluon.jit(do_not_specialize=["M"])
def sum_kernel(
    parts_ptr,  # fp32 [SPLITS, M, N]
    factors_ptr,  # fp32 [N] or None: see `Parts`
    squares_ptr,  # fp32 [S, M] or None: see `regroup_kernel`
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N] or None
    out_ptr,  # [M, N]
    eps,
    M,
    N: gl.constexpr,
    K: gl.constexpr,  # width of the normed rows
    SPLITS: gl.constexpr,
    PAIRWISE: gl.constexpr,  # number of neighbouring parts that are added first
    S: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Adds the partial sums of COLUMNS elements of one row, then bias and residual, rounds once and stores.

    With squares_ptr, the sum is multiplied by the row's factor of the norm before the bias is added.
    """
    row = gl.program_id(0)
    n = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    factor = None
    if squares_ptr is not None:
        factor = splits_scale(squares_ptr, row, None, M, eps, K, S)
    total = sums_of(parts_ptr, factors_ptr, bias_ptr, residual_ptr, factor, row, n, n < N, M, N, SPLITS, PAIRWISE)
    total = total.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + (row.to(gl.int64) * N + n), total, mask=n < N, eviction_policy=STAYS)


@gluon.jit
def leave_given(
    total, word, place, row, split, gamma, gamma_ptr, regrouped_ptr, squares_ptr, M,
    K: gl.constexpr, S: gl.constexpr, KT: gl.constexpr, ROOM: gl.constexpr, SHARED: gl.constexpr, WARPS: gl.constexpr,
    DTYPE: gl.constexpr, RAISE: gl.constexpr,
):  # fmt: skip
    """Stores `total`, the part of a row that one split of the next product multiplies, times gamma and regrouped.

    With gamma, also stores the sum of squares of this part. word: indices of the part's words. place: indices of these
    words in the row. For the other arguments see `regroup_kernel`.
    """
    K_TILE: gl.constexpr = KT // 2  # in words
    words_at = row.to(gl.int64) * (K // 2)
    low, high = gl.split(gl.reshape(total.to(gl.int16, bitcast=True), [ROOM, 2]))
    words = gl.convert_layout((high.to(gl.int32) << 16) | (low.to(gl.int32) & 0xFFFF), word.type.layout)
    regrouped_words = words
    if gamma_ptr is not None:
        regrouped_words = times_gamma(regrouped_words, gamma, DTYPE)
    if RAISE:
        regrouped_words = raised_rows(regrouped_words)
    gl.store(regrouped_ptr + (words_at + regrouped(place)), regrouped_words, mask=place < K // 2, eviction_policy=STAYS)
    if gamma_ptr is not None:
        mine = gl.allocate_shared_memory(gl.int32, [SHARED], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        mine.slice(0, ROOM).store(words)
        lanes: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
        squares = no_squares(gl.full([K_TILE // 4, 4], 0, gl.int32, layout=lanes))
        flat: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
        for first in gl.static_range(0, (K // 2 + S * K_TILE - 1) // (S * K_TILE) * K_TILE, K_TILE):
            some = gl.reshape(mine.slice(first, K_TILE).load(flat), [K_TILE // 4, 4])
            squares = add_squares(squares, gl.convert_layout(some, lanes), DTYPE)
        merged: gl.constexpr = gl.BlockedLayout([1, K_TILE // 4], [1, 32], [1, WARPS], [1, 0])
        square = folded(gl.convert_layout(gl.reshape(squares, [1, K_TILE // 4]), merged))
        gl.store(squares_ptr + (split * M + row) + gl.arange(0, 1, layout=square.type.layout), square)


@gluon.jit(do_not_specialize=["M"])
def regroup_kernel(
    parts_ptr,  # fp32 [SPLITS, M, K], or None: only the residual
    factors_ptr,  # fp32 [K] or None: see `Parts`
    bias_ptr,  # [K] or None
    residual_ptr,  # [M, K]
    out_ptr,  # [M, K], receives the sums; or None
    gamma_ptr,  # int32 words [K / 2], or None
    regrouped_ptr,  # int32 words [M, K / 2]: receives the sums times gamma, regrouped and raised
    squares_ptr,  # fp32 [S, M]: receives the sums' squares, by splits of the next product; None without gamma_ptr
    M,
    SPLITS: gl.constexpr,  # splits of the previous product
    PAIRWISE: gl.constexpr,  # number of its neighbouring parts that are added first
    K: gl.constexpr,
    S: gl.constexpr,  # splits of the next product
    KT: gl.constexpr,
    ROOM: gl.constexpr,  # words of a row for one split of the next product; a power of two
    SHARED: gl.constexpr,  # words of shared memory, at least ROOM; more, so that fewer CTAs share an SM
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
    RAISE: gl.constexpr,
):
    """Computes the part of one row that one split of the next product multiplies, and prepares it for this product.

    The row is the sum of partial sums, bias and residual. The part is stored times gamma and regrouped, together with
    its sum of squares. The grid is (split of the next product, row).
    """
    K_TILE: gl.constexpr = KT // 2  # in words
    split, row = gl.program_id(0), gl.program_id(1)
    word = gl.arange(0, ROOM, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    place = word // K_TILE * (S * K_TILE) + split * K_TILE + word % K_TILE
    i = gl.arange(0, 2 * ROOM, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    n = i // KT * (S * KT) + split * KT + i % KT
    gamma = None
    if gamma_ptr is not None:
        gamma = gl.load(gamma_ptr + place, mask=place < K // 2, other=0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = sums_of(parts_ptr, factors_ptr, bias_ptr, residual_ptr, None, row, n, n < K, M, K, SPLITS, PAIRWISE)
    total = total.to(DTYPE)
    if out_ptr is not None:
        gl.store(out_ptr + (row.to(gl.int64) * K + n), total, mask=n < K, eviction_policy=STAYS)
    leave_given(
        total, word, place, row, split, gamma, gamma_ptr, regrouped_ptr, squares_ptr, M,
        K, S, KT, ROOM, SHARED, WARPS, DTYPE, RAISE,
    )  # fmt: skip


def add_up(
    parts: Parts,
    squares: Tensor | None,
    norm: tuple[Tensor, float] | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    pdl: bool,
) -> None:
    """Writes out [M, N] = round(sum of partial sums * column factors [N] * row factors [M] + bias [N] + residual).

    Args:
        parts: partial sums of the product, and the column factors, if it has any.
        squares: fp32 [S, M], result of `permuted_rows`, for the norm before the product. None: rows have no factors.
        norm: weight and epsilon of that norm. A row's factor is 1 / sqrt(mean(x^2) + eps).
        bias: [N], or None.
        residual: [M, N], or None.
        out: [M, N].
        pdl: see `packed_linear`.
    """
    splits, rows, n = parts.sums.shape
    k, eps = (1, 0.0) if norm is None else (len(norm[0]), norm[1])
    launch(
        sum_kernel,
        (rows, triton.cdiv(n, COLUMNS)),
        *(parts.sums, parts.factors, squares, bias, residual, out, eps, rows),
        **{"N": n, "K": k, "SPLITS": splits, "PAIRWISE": parts.pairwise, "S": 0 if squares is None else len(squares)},
        **{"COLUMNS": COLUMNS, "WARPS": WARPS, "PDL": pdl},
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )


def permuted_rows(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    split: tuple[int, int],
    dtype: gl.dtype,
    pdl: bool,
    parts: Parts | None = None,
    bias: Tensor | None = None,
    raise_rows: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Prepares rows for a TMA kernel's product: adds partial sums, multiplies by the norm's weight, and regroups.

    Args:
        x: [M, K], 16-bit and contiguous.
        norm: weight [K] and epsilon of the norm before the product. None: no norm.
        split: (number of splits, values of K in a K tile) of the product.
        dtype: x's dtype in Gluon.
        pdl: see `packed_linear`.
        parts: partial sums [SPLITS, M, K] of the previous product. They and `bias` are first added to x. None: x is
            complete.
        bias: [K], bias of the previous product. None: no bias.
        raise_rows: True to multiply the regrouped rows by 2^64, exactly, for a product with 8-bit codes.

    Returns:
        - The sum [M, K], or x itself without `parts`.
        - The sum times the norm's weight, regrouped, [M, K].
        - fp32 [S, M]: the sum of squares of each row for each split of the product. None without a norm.
    """
    rows, k = x.shape
    splits, k_tile = split
    regrouped_words = torch.empty_like(x)
    out = x if parts is None else torch.empty_like(x)
    squares = None if norm is None else x.new_empty(splits, rows, dtype=torch.float32)
    room = triton.next_power_of_2(triton.cdiv(k, splits * k_tile)) * k_tile // 2
    warps = min(8, max(1, room // 128))
    gamma = None if norm is None else norm[0].view(torch.int32)
    launch(
        regroup_kernel,
        (splits, rows),
        *((None, None) if parts is None else (parts.sums, parts.factors)),
        *(bias, x, None if parts is None else out),
        *(gamma, regrouped_words.view(torch.int32), squares, rows),
        **{"SPLITS": 0, "PAIRWISE": 1} if parts is None else {"SPLITS": len(parts.sums), "PAIRWISE": parts.pairwise},
        **{"K": k, "S": splits, "KT": k_tile, "ROOM": room},
        **{"WARPS": warps, "PDL": pdl, "DTYPE": dtype, "RAISE": raise_rows},
        **{"SHARED": room if norm is None else max(room, SPREAD[splits * rows > FEW_PROGRAMS])},
        num_warps=warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out, regrouped_words, squares
