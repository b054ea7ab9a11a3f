"""Paged attention for CUDA: grouped heads, sliding window, split keys; bits of a row depend on that row alone.

    out[b, i, h] = sum_j softmax_j(q[b, i, h] . k[j] / sqrt(D)) v[j],  j <= positions[b, i]
                                                       and with a window W also j > positions[b, i] - W

| argument    | shape, dtype                          | notes                                          |
|-------------|---------------------------------------|------------------------------------------------|
| query       | [B, Q, H, D] bf16, fp16 or fp32       | contiguous                                     |
| keys        | [num_pages, page_size, Hkv, D]        | query's dtype, contiguous; may exceed 2^31 elements |
| values      | as keys                               |                                                |
| block_table | [B, P] int64                          | rows may be views of a longer table            |
| positions   | [B, Q] int64                          | >= 0                                           |

Products accumulate in fp32, fp32 inputs in IEEE precision; the online softmax (arXiv 2205.14135) is fp32.

Row invariance: the query rows of one kv head come in tiles of fixed size (a lone row is padded to it), keys in
blocks of BLOCK_N at absolute positions, split every KEY_BLOCK keys, and split results are added in ascending order.
A block that is masked for a row leaves its state as it was, to the bit, so how many are visited does not matter.
Slots above a row's newest position are never read into a sum: they may hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.reference import KEY_BLOCK, UNTILED, Tiling

MAX_SPLIT_QUERIES = 17  # more query tokens are a prompt chunk, which fills the device without splitting keys


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile sizes of one launch: query rows and keys per product, warps, pipeline stages."""

    rows: int
    block_n: int
    num_warps: int
    num_stages: int


# by (element size, head_dim padded to a power of two); never by the number of rows
LAUNCH = {
    (2, 16): Launch(32, 32, 4, 2),
    (2, 32): Launch(32, 32, 4, 2),
    (2, 64): Launch(32, 64, 4, 2),
    (2, 128): Launch(32, 64, 4, 2),
    (2, 256): Launch(32, 32, 4, 2),
    (4, 16): Launch(32, 16, 4, 1),
    (4, 32): Launch(32, 16, 4, 1),
    (4, 64): Launch(32, 16, 2, 1),
    (4, 128): Launch(32, 16, 8, 1),
    (4, 256): Launch(32, 16, 8, 1),
}


@triton.jit
def _split_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    position_ptr,
    sum_ptr,  # fp32 [B, tiles, Hkv, splits, ROWS, D]: weighted values of a split, relative to its top
    top_ptr,  # fp32 [B, tiles, Hkv, splits, ROWS]: largest score
    total_ptr,  # fp32, as top: sum of weights
    num_queries,  # runtime: differs between drafting, scoring and prompt chunks
    table_stride,
    table_width,
    num_pages,
    split_keys,
    scale,
    WINDOW: tl.constexpr,  # 0: none
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles_per_row = tl.cdiv(num_queries, ROWS // GROUP)
    kv_head = tile % KV_HEADS
    query_tile = (tile // KV_HEADS) % tiles_per_row
    batch = (tile // KV_HEADS // tiles_per_row).to(tl.int64)

    row = tl.arange(0, ROWS)
    query = query_tile * (ROWS // GROUP) + row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (row < (ROWS // GROUP) * GROUP) & (query < num_queries)
    dim = tl.arange(0, BLOCK_D)
    in_dim = dim < HEAD_DIM
    # a padding row sees nothing
    position = tl.load(position_ptr + batch * num_queries + query, mask=valid, other=-1)
    query_at = ((batch * num_queries + query) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    q = tl.load(query_ptr + query_at[:, None] + dim[None, :], mask=valid[:, None] & in_dim[None, :], other=0.0)

    newest = tl.max(position, axis=0)
    start = split * split_keys
    if start > newest:
        return  # a launch covers the longest rows there can be; what it leaves out is never combined
    stop = tl.minimum(start + split_keys, newest + 1)
    if WINDOW > 0:
        oldest = tl.min(tl.where(valid, position, newest), axis=0) - WINDOW + 1
        start = tl.maximum(start, oldest // BLOCK_N * BLOCK_N)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(start, stop, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        written = at <= newest
        # in range for every table and position there is; clamped all the same, for both are data
        entry = tl.minimum(at // PAGE_SIZE, table_width - 1)
        page = tl.load(table_ptr + batch * table_stride + entry, mask=written, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        slot = ((page * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM  # int64 from page
        k = tl.load(key_ptr + slot[None, :] + dim[:, None], mask=written[None, :] & in_dim[:, None], other=0.0)
        v = tl.load(value_ptr + slot[:, None] + dim[None, :], mask=written[:, None] & in_dim[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        seen = at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # a row that has seen nothing keeps top = -inf; shifting by 0 makes its weights exp(-inf) = 0, not NaN
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp(scores - shift[:, None])
        keep = tl.exp(top - shift)
        total = total * keep + tl.sum(weights, axis=1)
        out = out * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top

    part = ((tile * tl.num_programs(1) + split).to(tl.int64)) * ROWS + row
    tl.store(top_ptr + part, top)
    tl.store(total_ptr + part, total)
    tl.store(sum_ptr + part[:, None] * HEAD_DIM + dim[None, :], out, mask=in_dim[None, :])


@triton.jit
def _combine_kernel(
    sum_ptr,
    top_ptr,
    total_ptr,
    position_ptr,
    out_ptr,  # [B, Q, H, D]
    num_queries,
    num_splits,
    split_keys,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    batch_query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, query = batch_query // num_queries, batch_query % num_queries
    per_tile: tl.constexpr = ROWS // GROUP
    tile = (batch * tl.cdiv(num_queries, per_tile) + query // per_tile) * KV_HEADS + head // GROUP
    row = (query % per_tile) * GROUP + head % GROUP
    dim = tl.arange(0, BLOCK_D)
    in_dim = dim < HEAD_DIM

    top = -float("inf")
    total = 0.0
    out = tl.zeros([BLOCK_D], tl.float32)
    last = tl.load(position_ptr + batch_query) // split_keys
    for split in range(0, tl.minimum(num_splits, (last + 1).to(tl.int32))):
        part = (tile * num_splits + split) * ROWS + row
        part_top = tl.load(top_ptr + part)
        new_top = tl.maximum(top, part_top)
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        keep, add = tl.exp(top - shift), tl.exp(part_top - shift)
        total = total * keep + tl.load(total_ptr + part) * add
        out = out * keep + tl.load(sum_ptr + part * HEAD_DIM + dim, mask=in_dim, other=0.0) * add
        top = new_top
    at = (batch_query * (KV_HEADS * GROUP) + head) * HEAD_DIM + dim
    tl.store(out_ptr + at, (out / total).to(out_ptr.dtype.element_ty), mask=in_dim)


def launch_of(dtype: torch.dtype, head_dim: int, group: int) -> tuple[Launch, int]:
    """The launch entry of a model, its rows raised to hold one group of heads, and head_dim padded."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    entry = LAUNCH[dtype.itemsize, block_d]
    rows = max(entry.rows, triton.next_power_of_2(group))
    return Launch(rows, entry.block_n, entry.num_warps, entry.num_stages), block_d


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    num_blocks: int,
    window: int | None,
    tiling: Tiling = UNTILED,
) -> Tensor:
    """As `reference.paged_attention`, which defines it; `tiling` has no say here, rows are invariant anyway.

    Raises:
        ValueError: a tensor is not contiguous where it must be.
    """
    batch, num_queries, num_heads, dim = query.shape
    kv_heads, page_size = keys.shape[2], keys.shape[1]
    query = query.contiguous()
    positions = positions.contiguous()
    if not keys.is_contiguous() or not values.is_contiguous() or block_table.stride(1) != 1:
        raise ValueError("keys, values and the rows of block_table must be contiguous; pass whole layers of the cache")
    group = num_heads // kv_heads
    launch, block_d = launch_of(query.dtype, dim, group)
    tiles = batch * kv_heads * triton.cdiv(num_queries, launch.rows // group)
    splits = num_blocks if num_queries <= MAX_SPLIT_QUERIES else 1
    split_keys = KEY_BLOCK if num_queries <= MAX_SPLIT_QUERIES else num_blocks * KEY_BLOCK
    sums = torch.empty(tiles, splits, launch.rows, dim, dtype=torch.float32, device=query.device)
    tops = torch.empty(tiles, splits, launch.rows, dtype=torch.float32, device=query.device)
    totals = torch.empty_like(tops)
    out = torch.empty_like(query)
    shape = {"KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": dim, "BLOCK_D": block_d, "ROWS": launch.rows}
    _split_kernel[(tiles, splits)](
        query,
        keys,
        values,
        block_table,
        positions,
        sums,
        tops,
        totals,
        num_queries,
        block_table.stride(0),
        block_table.shape[1],
        keys.shape[0],
        split_keys,
        dim**-0.5,
        WINDOW=window or 0,
        PAGE_SIZE=page_size,
        BLOCK_N=launch.block_n,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **shape,
    )
    _combine_kernel[(batch * num_queries, num_heads)](
        sums, tops, totals, positions, out, num_queries, splits, split_keys, **shape, num_warps=1
    )
    return out
