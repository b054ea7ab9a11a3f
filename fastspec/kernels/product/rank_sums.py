"""All-reduce over GPUs between two packed products of many rows, and preparation of the second product's rows.

    x' = round(residual + (sum over ranks of x [+ bias]));  given = norm(x') regrouped, see `split_k.regroup_kernel`

One kernel computes both. The bits are those of `exchange.exchange_added` followed by `split_k.permuted_rows`. A CTA has
the part of a row that one split of the second product multiplies. It writes its rank's sums into the memory of the
other ranks (`Room`), in whole blocks, and waits for their sums; see exchange.py.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch
from fastspec.kernels.exchange_kernels import push, sum_ranks
from fastspec.kernels.product.epilogue import STAYS
from fastspec.kernels.product.split_k import FEW_PROGRAMS, SPREAD, Parts, leave_given, sums_of
from fastspec.kernels.room import BLOCK, LIMIT, Room


@gluon.jit(do_not_specialize=["M"])
def ranks_kernel(
    parts_ptr,  # fp32 [SPLITS, M, K] of this rank
    factors_ptr,  # fp32 [K] or None: see `Parts`
    bias_ptr,  # [K] or None
    residual_ptr,  # [M, K]
    out_ptr,  # [M, K], receives the sums
    gamma_ptr,  # int32 words [K / 2]
    given_ptr,  # int32 words [M, K / 2]: receives the sums times gamma, regrouped and raised
    squares_ptr,  # fp32 [S, M]: receives the sums' squares, by splits of the next product
    room,  # (buffers, turns) of `Room`
    M,
    elements,  # number of elements of the room
    limit,  # LIMIT of room.py
    SPLITS: gl.constexpr,  # SPLITS to SHARED: see `split_k.regroup_kernel`
    PAIRWISE: gl.constexpr,
    K: gl.constexpr,
    S: gl.constexpr,
    KT: gl.constexpr,
    ROOM: gl.constexpr,
    SHARED: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
    RAISE: gl.constexpr,
    RANK: gl.constexpr,  # RANK, SIZE: fields of `Room`
    SIZE: gl.constexpr,
    BLOCK: gl.constexpr,  # elements in a block of the room
    COUNT: gl.constexpr,  # number of blocks of a CTA
):
    """Computes the part of one row that one split of the next product multiplies, and prepares it for this product.

    The row is the sum over all ranks, plus bias and residual. The grid is (split of the next product, row).
    """
    K_TILE: gl.constexpr = KT // 2  # in words
    split, row = gl.program_id(0), gl.program_id(1)
    word = gl.arange(0, ROOM, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    place = word // K_TILE * (S * K_TILE) + split * K_TILE + word % K_TILE
    i = gl.arange(0, 2 * ROOM, layout=gl.BlockedLayout([8], [32], [WARPS], [0]))
    n = i // KT * (S * KT) + split * KT + i % KT
    # elements in an order in which each thread has 16 contiguous bytes of the room
    j = gl.arange(0, 2 * ROOM, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    mine = j // KT * (S * KT) + split * KT + j % KT
    first = (row * S + split) * COUNT
    gamma = gl.load(gamma_ptr + place, mask=place < K // 2, other=0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    residual = gl.load(residual_ptr + (row.to(gl.int64) * K + n), mask=n < K, other=0.0).to(gl.float32)
    own = sums_of(parts_ptr, factors_ptr, None, None, None, row, mine, mine < K, M, K, SPLITS, PAIRWISE)
    at = first * BLOCK + j
    theirs = push(own, at, mine < K, room, first, elements, RANK, SIZE, BLOCK, COUNT)
    total = sum_ranks(own, theirs, at, mine < K, elements, limit, 0, SIZE, RANK)
    total = gl.convert_layout(total, n.type.layout)
    if bias_ptr is not None:
        total += gl.load(bias_ptr + n, mask=n < K, other=0.0).to(gl.float32)
    total = (total + residual).to(DTYPE)
    gl.store(out_ptr + (row.to(gl.int64) * K + n), total, mask=n < K, eviction_policy=STAYS)
    leave_given(
        total, word, place, row, split, gamma, gamma_ptr, given_ptr, squares_ptr, M,
        K, S, KT, ROOM, SHARED, WARPS, DTYPE, RAISE,
    )  # fmt: skip


def words_of_split(k: int, split: tuple[int, int]) -> int:
    """Returns the number of 32-bit words of a row that one split of K multiplies. A word has two elements.

    The number of K tiles is rounded up to a power of two. k: elements of a row. split: (number of splits, values of K
    in a K tile).
    """
    splits, k_tile = split
    tiles: int = triton.next_power_of_2(triton.cdiv(k, splits * k_tile))
    return tiles * k_tile // 2


def elements_in_room(rows: int, k: int, split: tuple[int, int]) -> int:
    """Returns the number of elements that `sum_ranks_permuted` needs in its `Room` for a sum of rows [rows, k].

    A CTA has whole blocks of BLOCK elements. split: (number of splits, values of K in a K tile) of the next product.
    """
    return rows * split[0] * max(2 * words_of_split(k, split), BLOCK)


def sum_ranks_permuted(
    parts: Parts,
    bias: Tensor | None,
    residual: Tensor,
    norm: tuple[Tensor, float],
    split: tuple[int, int],
    dtype: gl.dtype,
    pdl: bool,
    room: Room,
    raise_rows: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the products of all ranks, bias and residual, and prepares the sums for a TMA kernel's product.

    Args:
        parts: partial sums [SPLITS, M, K] of this rank.
        bias, residual: [K] and [M, K], added once. bias None: no bias.
        norm, split, dtype, pdl, raise_rows: see `split_k.permuted_rows`. They are for the next product.
        room: memory that all ranks access, for `elements_in_room` elements.

    Returns:
        The three results of `split_k.permuted_rows`.
    """
    rows, k = residual.shape
    splits, k_tile = split
    held = words_of_split(k, split)
    given, out = torch.empty_like(residual), torch.empty_like(residual)
    squares = residual.new_empty(splits, rows, dtype=torch.float32)
    warps, shared = min(8, max(1, held // 128)), max(held, SPREAD[splits * rows > FEW_PROGRAMS])
    launch(
        ranks_kernel,
        (splits, rows),
        *(parts.sums, parts.factors, bias, residual, out, norm[0].view(torch.int32), given.view(torch.int32), squares),
        (room.buffers, room.turns),
        *(rows, room.elements, LIMIT),
        **{"SPLITS": len(parts.sums), "PAIRWISE": parts.pairwise, "K": k, "S": splits, "KT": k_tile},
        **{"ROOM": held, "SHARED": shared, "RANK": room.rank, "SIZE": room.size, "BLOCK": BLOCK},
        COUNT=max(1, 2 * held // BLOCK),
        **{"WARPS": warps, "PDL": pdl, "DTYPE": dtype, "RAISE": raise_rows},
        num_warps=warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out, given, squares
