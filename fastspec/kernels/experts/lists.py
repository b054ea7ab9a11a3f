"""Sorts pairs (row of x, chosen expert) by expert, and divides them into tiles of pairs with one expert, on the device.

| result | shape, dtype       | meaning                                                                             |
|--------|--------------------|-------------------------------------------------------------------------------------|
| order  | [R * chosen] int32 | indices of pairs, row * chosen + i for a row's i-th expert, stably sorted by expert |
| tiles  | [T, 3] int32       | expert, index in `order` of the tile's first pair, number of pairs; 0 pairs: unused |

Example with R = 2, chosen = 2, ids [[5, 1], [5, 0]] and up to 2 pairs a tile:

    pair     0  1  2  3        order    3  1  0  2
    expert   5  1  5  0        tiles    (0, 0, 1)  (1, 1, 1)  (5, 2, 2)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch, new_ids

FEW_ROWS = 64  # for at most this many rows one CTA computes both results
PART = 64  # number of pairs compared at a time


@triton.jit(do_not_specialize=["rows"])
def list_kernel(
    ids_ptr,  # int32 [R * CHOSEN]
    order_ptr,  # int32 [R * CHOSEN]
    tiles_ptr,  # int32 [T, 3]
    rows,
    count,  # T
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    EACH: tl.constexpr,  # number of pairs in a tile
    PAIRS: tl.constexpr,  # largest number of pairs, a multiple of PART
    PART: tl.constexpr,
    EXPERTS: tl.constexpr,  # E, rounded up to a power of two
    TILES: tl.constexpr,  # T, rounded up to a power of two
    PDL: tl.constexpr,
):
    """Computes `order` and `tiles` of `lists_of` for all rows, in one CTA."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pairs = rows * CHOSEN
    if PAIRS == PART:
        _few(ids_ptr, order_ptr, tiles_ptr, pairs, count, E, EACH, PART, TILES)
    else:
        _many(ids_ptr, order_ptr, tiles_ptr, pairs, count, E, EACH, PAIRS, PART, EXPERTS, TILES)


@triton.jit
def _few(
    ids_ptr,
    order_ptr,
    tiles_ptr,
    pairs,
    count,
    E: tl.constexpr,
    EACH: tl.constexpr,
    PART: tl.constexpr,
    TILES: tl.constexpr,
):
    """Computes `order` and `tiles` of `lists_of` by comparing each pair with each other pair. For up to PART pairs."""
    p = tl.arange(0, PART)
    there = p < pairs
    ids = tl.load(ids_ptr + p, mask=there, other=E)
    same, earlier = ids[None, :] == ids[:, None], p[None, :] < p[:, None]
    ahead = (ids[None, :] < ids[:, None]) | (same & earlier)
    # one sum computes three counts of up to PART: pairs sorted before this one, earlier pairs of its expert, all pairs
    # of its expert
    packed = ahead.to(tl.int32) + ((same & earlier).to(tl.int32) << 8) + (same.to(tl.int32) << 16)
    sums = tl.sum(packed, axis=1)
    rank, within = sums & 0xFF, (sums >> 8) & 0xFF
    left = (sums >> 16) - within
    tl.store(order_ptr + rank, p, mask=there)
    # a tile begins at every EACH-th pair of an expert; its number is the count of tiles that begin before it
    begins = there & (within % EACH == 0)
    number = tl.sum((ahead & begins[None, :]).to(tl.int32), axis=1)
    at = tiles_ptr + number * 3
    tl.store(at, ids, mask=begins)
    tl.store(at + 1, rank, mask=begins)
    tl.store(at + 2, tl.minimum(EACH, left), mask=begins)
    t = tl.arange(0, TILES)
    used = tl.sum(begins.to(tl.int32), axis=0)
    tl.store(tiles_ptr + t * 3 + 2, tl.zeros((TILES,), tl.int32), mask=(t >= used) & (t < count))


@triton.jit
def _many(
    ids_ptr,
    order_ptr,
    tiles_ptr,
    pairs,
    count,
    E: tl.constexpr,
    EACH: tl.constexpr,
    PAIRS: tl.constexpr,
    PART: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Computes `order` and `tiles` of `lists_of` for more than PART pairs.

    Compares PART pairs at a time, and counts the pairs of each expert.
    """
    e = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, PAIRS, PART):
        p = first + tl.arange(0, PART)
        ids = tl.load(ids_ptr + p, mask=p < pairs, other=E)
        rank = tl.zeros((PART,), tl.int32)
        for second in range(0, PAIRS, PART):
            q = second + tl.arange(0, PART)
            others = tl.load(ids_ptr + q, mask=q < pairs, other=E)[None, :]
            before = (others < ids[:, None]) | ((others == ids[:, None]) & (q[None, :] < p[:, None]))
            rank += tl.sum(before.to(tl.int32), axis=1)
        tl.store(order_ptr + rank, p, mask=p < pairs)
        counts += tl.sum((ids[:, None] == e[None, :]).to(tl.int32), axis=0)
    counts = tl.where(e < E, counts, 0)
    starts = tl.cumsum(counts, axis=0) - counts
    each = (counts + EACH - 1) // EACH
    ends = tl.cumsum(each, axis=0)
    # counts pairs, not rows: a row of NaN has the same expert in all its pairs
    for i in range(0, tl.cdiv(pairs, EACH)):
        at = tiles_ptr + (ends - each + i) * 3
        here = i < each
        tl.store(at, e, mask=here)
        tl.store(at + 1, starts + i * EACH, mask=here)
        tl.store(at + 2, tl.minimum(EACH, counts - i * EACH), mask=here)
    t = tl.arange(0, TILES)
    tl.store(tiles_ptr + t * 3 + 2, tl.zeros((TILES,), tl.int32), mask=(t >= tl.sum(each, axis=0)) & (t < count))


def tiles_of(pairs: int, experts: int, each: int) -> int:
    """Returns an upper limit of the number of tiles, for `pairs` pairs (row, chosen expert) and `experts` experts.

    A tile has `each` pairs of one expert. Only the last tile of an expert may have fewer.
    """
    return min(pairs, pairs // each + experts)


def lists_of(ids: Tensor, experts: int, each: int) -> tuple[Tensor, Tensor]:
    """Sorts pairs (row, chosen expert) by expert and divides them into tiles of pairs with one expert.

    Returns (`order`, `tiles`); see the table at the top of this file.

    Args:
        ids: int32 [R, chosen], the expert of each pair.
        experts: E; all ids are below it.
        each: largest number of pairs in a tile.
    """
    rows, chosen = ids.shape
    pairs = ids.numel()
    count = tiles_of(pairs, experts, each)
    if rows > FEW_ROWS:
        return _by_sorting(ids.flatten(), experts, each, count)
    order = new_ids(pairs, ids.device, torch.int32)
    tiles = new_ids(count * 3, ids.device, torch.int32).view(count, 3)
    launch(
        list_kernel, (1,), ids, order, tiles, rows, count,
        E=experts, CHOSEN=chosen, EACH=each, PAIRS=triton.cdiv(pairs, PART) * PART, PART=PART,
        EXPERTS=triton.next_power_of_2(experts), TILES=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip
    return order, tiles


def _by_sorting(pairs: Tensor, experts: int, each: int, count: int) -> tuple[Tensor, Tensor]:
    """Computes the results of `lists_of` with torch.sort, for many rows.

    pairs: int32 [R * chosen], the expert of each pair. count: number of rows of `tiles`; those not needed have 0 pairs.
    """
    order = pairs.sort(stable=True).indices.int()
    counts = torch.zeros(experts, dtype=torch.int32, device=pairs.device)
    counts = counts.scatter_add(0, pairs.long(), torch.ones_like(pairs))
    starts, tiles = counts.cumsum(0) - counts, (counts + each - 1) // each
    ends = tiles.cumsum(0)
    number = torch.arange(count, device=pairs.device)
    expert = torch.searchsorted(ends, number, right=True)
    there = expert < experts
    expert = expert.clamp(max=experts - 1)
    within = (number - (ends - tiles)[expert]) * each
    left = torch.where(there, (counts[expert] - within).clamp(max=each), 0)
    return order, torch.stack((expert, starts[expert] + within, left), dim=1).int()
