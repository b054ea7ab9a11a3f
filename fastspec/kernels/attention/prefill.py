"""Causal grouped-query attention of prefill chunks over a paged KV cache on CUDA, with sliding windows.

    out[b, i, h] = sum_j softmax_j(s[j]) v[j],  s[j] = scale q[b, i, h] . k[j],  j <= positions[b, i]
                                                       and with a window W also j > positions[b, i] - W

| argument     | shape, dtype                          | notes                                               |
|--------------|---------------------------------------|-----------------------------------------------------|
| query        | [B, Q, H, D] bf16, fp16 or fp32       | contiguous                                          |
| keys, values | [num_pages, page_size, Hkv, D]        | query's dtype or e4m3; contiguous; may exceed 2^31  |
|              |                                       | elements                                            |
| block_table  | [B, P] int64                          | rows may be views of longer rows                    |
| positions    | [B, Q] int64                          | >= 0                                                |
| sinks        | [H] fp32 or query's dtype             | contiguous; None: none                              |

Decode passes have other kernels (dispatch.py). A CTA takes a tile of query tokens of one head, and all keys that they
see. The algorithm is FlashAttention-2 (Dao 2023, arXiv 2307.08691): online softmax over blocks of keys. Blocks that
every token of the tile sees are computed without a mask:

    keys        0 ........... oldest token's position ....... newest token's position
    blocks      [ no mask ][ no mask ][ mask ][ mask ]      (with a window: all with a mask)

Products accumulate in fp32; fp32 inputs use IEEE precision. Cache slots after a tile's newest position are not read,
because they may hold NaN. A block that is completely masked for a token does not change the token's result. A block of
which the token sees all keys gives the same bits with the mask and without.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention import prefill_sm90
from fastspec.kernels.attention.arguments import LOG2E, paged_cache, scoring_of
from fastspec.kernels.attention.plan import MAX_REGISTERS, Tiles, chunk_tile, padded_dim, uses_chunks
from fastspec.kernels.attention.rope import cache_of_row
from fastspec.kernels.common.checks import check, check_cache, check_sinks, rows_dtype
from fastspec.kernels.common.kv_scales import KVScales, scales_of
from fastspec.kernels.common.launch import launch as start
from fastspec.kernels.gpu import gpu_of, multiprocessors, shared_memory
from fastspec.shapes import KEY_BLOCK, UNTILED, AttentionRule, Tiling

_LOG2E = tl.constexpr(LOG2E)

# by (element size, head_dim padded to a power of two): tiles that need at most 99 KiB of shared memory, which every GPU
# has
LAUNCH = {
    (2, 16): Tiles(64, 64, 4, 3),
    (2, 32): Tiles(64, 64, 4, 3),
    (2, 64): Tiles(64, 64, 4, 3),
    (2, 128): Tiles(64, 32, 4, 3),
    (2, 256): Tiles(32, 32, 4, 2),
    (2, 512): Tiles(32, 32, 8, 2),
    (4, 16): Tiles(32, 16, 4, 1),
    (4, 32): Tiles(32, 16, 4, 1),
    (4, 64): Tiles(32, 16, 4, 1),
    (4, 128): Tiles(32, 16, 8, 1),
    (4, 256): Tiles(16, 16, 8, 1),
    (4, 512): Tiles(16, 16, 8, 1),
}
# larger tiles for wgmma, for GPUs with LARGE_SHARED bytes of shared memory for one CTA
LARGE = {
    (2, 64): Tiles(128, 128, 8, 3),
    (2, 128): Tiles(128, 128, 8, 3),
    (2, 256): Tiles(128, 32, 8, 2),
}
LARGE_SHARED = 225 * 1024
# used instead if tiles of LARGE would leave SMs idle, or if half of their rows were padding. They have half the rows
# and half the warps, so that a row keeps its bits
HALVES = {
    (2, 64): Tiles(64, 128, 4, 3),
    (2, 128): Tiles(64, 128, 4, 3),
}


@triton.jit
def pages_of(cache, first, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Loads the numbers of the cache pages of the keys at positions first .. first + BLOCK_N - 1.

    Returns int64 [BLOCK_N], or one number if PAGE_SIZE is a multiple of BLOCK_N. `cache` is a result of `cache_of_row`.
    The lower 32 bits are loaded as two 16-bit halves, because Triton's pipelined loops do not stage such narrow loads
    through shared memory.
    """
    at = first
    if PAGE_SIZE % BLOCK_N != 0:
        at = first + tl.arange(0, BLOCK_N)
    # in range for every valid table and position; clamped because kernels cannot check these values
    entry = cache.block_table + tl.minimum(at // PAGE_SIZE, cache.table_width - 1)
    half = entry.to(tl.pointer_type(tl.int16), bitcast=True)
    page = (tl.load(half).to(tl.int32) & 0xFFFF) | (tl.load(half + 1).to(tl.int32) << 16)
    return tl.minimum(tl.maximum(page, 0), cache.num_pages - 1).to(tl.int64)


@triton.jit
def slots_of(
    page,
    first,
    kv_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns two offsets. Their sum is the offset in the cache of each key at positions first .. first + BLOCK_N - 1.

    `page` is the result of `pages_of`, `kv_head` the index of the KV head.

    Returns:
        The offset of the block of keys, or 0 if the keys may be on several pages; and the offset of each key from it,
        [BLOCK_N, 1].
    """
    key = tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:
        place = ((page * PAGE_SIZE + first % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM  # int64, because page is
        return place, (key * (KV_HEADS * HEAD_DIM))[:, None]
    else:
        slot = ((page * PAGE_SIZE + (first + key) % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
        return 0, slot[:, None]


@triton.jit
def tanh(x):
    """Computes tanh(x) with a relative error of at most 3 * 2^-23.

    It uses an odd polynomial near zero, and exp2 elsewhere.
    """
    squared = x * x
    series = -0.006276390049606562 * squared + 0.021116215735673904
    series = (series * squared - 0.053875137120485306) * squared + 0.13332924246788025
    series = (series * squared - 0.3333333134651184) * squared
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))  # 2 log2(e)
    return tl.where(squared < 0.36, x + x * series, far)


@triton.jit
def sink_of(scoring, head):
    """Loads the attention sinks of the query heads `head`, times log2(e) like all scores. `scoring` is `Scoring`."""
    return tl.load(scoring.sinks + head).to(tl.float32) * _LOG2E


@triton.jit
def _attend_blocks(
    q,
    top,
    total,
    out,
    cache,  # PagedCache with one row
    position,
    kv_head,
    begin,
    stop,
    scoring,  # Scoring
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Continues the online softmax of a tile of query tokens with the keys at positions begin .. stop - 1.

    Args:
        q: queries [ROWS, BLOCK_D].
        top, total, out: state of the softmax: largest score [ROWS], sum of 2^(score - top) [ROWS], and sum of values
            with these weights [ROWS, BLOCK_D].
        position: position of each query token [ROWS].
        kv_head: index of the KV head.
        MASKED: True to mask keys that a token does not see. False if all tokens see all keys, and stop - begin is a
            multiple of BLOCK_N.

    Returns:
        The new state (top, total, out).
    """
    for first in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK_N)
        page = pages_of(cache, first, PAGE_SIZE, BLOCK_N)
        place, slot = slots_of(page, first, kv_head, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N)
        dim = tl.arange(0, BLOCK_D)
        slot = slot + dim[None, :]
        if MASKED or HEAD_DIM != BLOCK_D:
            mask = (at < stop)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(cache.k + place + slot, mask=mask, other=0.0)
            v = tl.load(cache.v + place + slot, mask=mask, other=0.0)
        else:
            k = tl.load(cache.k + place + slot)
            v = tl.load(cache.v + place + slot)
        k, v = k.to(q.dtype), v.to(q.dtype)  # [BLOCK_N, BLOCK_D]; converts values of an 8-bit cache
        scores, scale = tl.dot(q, tl.trans(k), input_precision="ieee"), scoring.factor  # [ROWS, BLOCK_N]
        if scoring.cap is not None:
            scores, scale = scoring.cap * tanh(scores * scale), 1.0
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        shift = new_top
        if MASKED:
            # a row without a key so far has top = -inf; with shift 0 its weights are exp2(-inf) = 0, not NaN
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores * scale - shift[:, None])
        keep = tl.exp2(top - shift)
        total = total * keep + tl.sum(weights, axis=1)
        out = tl.dot(weights.to(v.dtype), v, out * keep[:, None], input_precision="ieee")  # [ROWS, BLOCK_D]
        top = new_top
    return top, total, out


@triton.jit(do_not_specialize=["num_queries", "limit"])
def _flash_kernel(
    query_ptr,
    cache,  # PagedCache
    position_ptr,
    out_ptr,  # [B, Q, H, D]; may be query itself
    num_queries,
    limit,  # keys from this position on are not read
    scoring,  # Scoring
    WINDOW: tl.constexpr,  # 0: no window
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # tiles with most keys start first, so that the last CTAs are short; in shared passes those of late rows
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head, batch = tl.program_id(0), (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    valid = row < num_queries
    dim = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    position = tl.load(position_ptr + batch * num_queries + row, mask=valid, other=-1)  # padding rows see no key
    at = ((batch * num_queries + row) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    q = tl.load(query_ptr + at[:, None] + dim[None, :], mask=mask, other=0.0)  # [ROWS, BLOCK_D]
    newest = tl.minimum(tl.max(position, axis=0), limit - 1).to(tl.int32)
    oldest = tl.minimum(tl.min(tl.where(valid, position, newest), axis=0), newest).to(tl.int32)
    begin, whole = 0, (oldest + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        begin = tl.maximum(oldest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = begin  # with a window no block is visible to every row, unless the window is wide: all are masked
    position = position.to(tl.int32)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_cache, kv_head = cache_of_row(cache, batch), head // GROUP
    if WINDOW == 0:
        top, total, out = _attend_blocks(
            q, top, total, out, row_cache, position, kv_head, begin, whole, scoring,
            False, WINDOW, KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES,
        )  # fmt: skip
    top, total, out = _attend_blocks(
        q, top, total, out, row_cache, position, kv_head, whole, newest + 1, scoring,
        True, WINDOW, KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, STAGES,
    )  # fmt: skip
    if scoring.sinks is not None:
        total = total + tl.exp2(sink_of(scoring, head) - top)
    out = out / total[:, None]
    if scoring.value_scale is not None:
        out = out * scoring.value_scale
    tl.store(out_ptr + at[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def launch_of(
    device: torch.device, itemsize: int, block_d: int, converted: bool = False, heads: int = 0, rows: int = 0
) -> Tiles:
    """Selects the tile sizes of a prefill pass on a device, from the tables LARGE, HALVES and LAUNCH.

    Heads of size 256 with an 8-bit cache use small tiles, because the conversion needs registers.

    Args:
        device: device of the model.
        itemsize: bytes of an element of queries.
        block_d: head_dim padded to a power of two.
        converted: True for an 8-bit cache.
        heads: number of batch rows times number of query heads.
        rows: number of query tokens of one batch row. 0: many.
    """
    small = LAUNCH[itemsize, block_d]
    if (converted and block_d > 128) or shared_memory(device) < LARGE_SHARED:
        return small
    large = LARGE.get((itemsize, block_d), small)
    halves = HALVES.get((itemsize, block_d), large)
    few = rows and (rows <= halves.rows or heads * triton.cdiv(rows, large.rows) < multiprocessors(device))
    return halves if few else large


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    num_blocks: int,
    rule: AttentionRule,
    sinks: Tensor | None = None,
    tiling: Tiling = UNTILED,
    out: Tensor | None = None,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Computes causal attention over a paged KV cache, as `reference.paged_attention`, in one launch.

    Args:
        query, keys, values, block_table, positions, num_blocks, rule, sinks, kv_scales: see
            `reference.paged_attention`.
        tiling: not read, because a row's bits never depend on other rows here.
        out: the output, contiguous and shaped like query; may be query itself. None: a new tensor.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit each other, or a head_dim without tiles.
    """
    batch, num_queries, num_heads, dim = query.shape
    page_size, kv_heads = keys.shape[1:3]
    query, positions = query.contiguous(), positions.contiguous()
    check_cache(query, keys, values, block_table, positions, num_heads)
    check("query", query, (batch, num_queries, num_heads, keys.shape[3]), rows_dtype(query, keys))
    check_sinks(sinks, num_heads, query.dtype)
    scales = scales_of(keys, kv_scales)
    out = torch.empty_like(query) if out is None else out
    check("out", out, query.shape, query.dtype, step="leave it out, and copy the result")
    cache, scoring = paged_cache(keys, values, block_table), scoring_of(rule, sinks, dim, scales)
    gpu, sizes = gpu_of(query.device), (batch * num_heads, num_queries)
    if uses_chunks(gpu, query.dtype.itemsize, dim, page_size, scales is not None):
        tile, given = chunk_tile(gpu, dim, *sizes), (query, keys, values, cache, positions, out)
        prefill_sm90.attend_chunk(*given, num_blocks, rule.window, scoring, tile)
        return out
    block_d = padded_dim(dim)
    launch = launch_of(query.device, query.dtype.itemsize, block_d, scales is not None, *sizes)
    start(
        _flash_kernel,
        (num_heads, triton.cdiv(num_queries, launch.rows), batch),
        query,
        cache,
        positions,
        out,
        num_queries,
        num_blocks * KEY_BLOCK,
        scoring,
        WINDOW=rule.window or 0,
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        PAGE_SIZE=page_size,
        ROWS=launch.rows,
        BLOCK_N=launch.block_n,
        STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        maxnreg=MAX_REGISTERS,
    )
    return out
