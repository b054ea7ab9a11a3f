"""Causal attention of prefill chunks on sm_90: TMA loads K and V, wgmma multiplies.

For meaning, shapes and dtypes of the arguments see prefill.py, which calls `attend_chunk` for a cache with 16 bits and
heads of size 64, 128 or 256. A CTA takes a tile of query tokens of one head:

    loading warp      TMA copies of K0, V0, K1, V1, ... -> ring of STAGES tiles [KEYS, D] in shared memory
    groups of 4 warps scores [ROWS, KEYS] = q [ROWS, D] K^T;   out [ROWS, D] += weights [ROWS, KEYS] V    (wgmma)

The warps are specialised as in FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608). The tensor cores compute the
scores of the next keys while the softmax weights of these keys are computed. A CTA has one or two groups, which wait
for each other nowhere: one multiplies while the other computes weights.

A group has the same ROWS and KEYS in every launch. So a token's bits do not depend on the number of groups.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention.arguments import PagedCache, Scoring
from fastspec.kernels.attention.decode.mma_tiles import sink_of, tanh
from fastspec.kernels.attention.decode.query_rows import cache_of_row
from fastspec.kernels.attention.decode.tma_parts import (
    ROWS,
    WARPS,
    WIDTH,
    Pipeline,
    clear_tail,
    empty_softmax,
    in_pieces,
    load_tile,
    masked,
    new_ring,
    piece_of,
    power,
    products,
    slots_at,
    sums_layout,
    weighed,
)
from fastspec.kernels.attention.plan import CHUNK_ROWS, ChunkTile
from fastspec.kernels.common.gluon_compat import thread_barrier
from fastspec.kernels.common.launch import described, launch
from fastspec.shapes import KEY_BLOCK


class ChunkTokens(NamedTuple):
    """The query tokens of a CTA: one head of one batch row.

    Attributes:
        queries, out: element 0 of this head of the batch row's first token.
        positions: position of each token of the batch row.
        count: number of the batch row's tokens.
        head: index of the query head.
    """

    queries: Any
    out: Any
    positions: Any
    count: Any
    head: Any


class Keys(NamedTuple):
    """The keys that a CTA reads: begin .. whole - 1 need no mask; whole .. stop - 1 do."""

    begin: Any
    whole: Any
    stop: Any


@gluon.jit
def _load_all(
    key_desc, value_desc, pipeline, cache, column, keys, PAGE_SIZE: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Runs the loading warp: it loads the tiles of K and V, in turn, of all keys that the CTA reads.

    `column` is the first column of the KV head in the cache [slots, Hkv * D].
    """
    STAGES: gl.constexpr = pipeline.tiles.shape[0]
    KEYS: gl.constexpr = pipeline.tiles.shape[1]
    D: gl.constexpr = pipeline.tiles.shape[2]
    PARTS: gl.constexpr = D // WIDTH
    BYTES: gl.constexpr = KEYS * D * 2
    PIECE: gl.constexpr = piece_of(PAGE_SIZE, KEYS)
    PIECES: gl.constexpr = KEYS // PIECE
    pieces = in_pieces(pipeline.tiles, PIECE)
    step = 0
    slots = slots_at(cache, keys.begin, PIECES, PIECE, PAGE_SIZE)
    if PDL:
        gdc_wait()
    for here in range(keys.begin, keys.stop, KEYS):
        # the pages of the next tile are loaded before the copies of this one are issued
        following = slots_at(cache, here + KEYS, PIECES, PIECE, PAGE_SIZE)
        load_tile(key_desc, pieces, pipeline, step, slots, column, PARTS, STAGES, BYTES)
        load_tile(value_desc, pieces, pipeline, step + 1, slots, column, PARTS, STAGES, BYTES)
        slots = following
        step += 2


@gluon.jit
def _attend_tile(
    q, pipeline, state, step, here, stop, position, scoring, MASKED: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Continues the online softmax of a tile of query tokens with one tile of keys.

    Args:
        q: queries in shared memory [ROWS, D].
        state: (scores, top, total, out): products of q with this tile of keys [ROWS, KEYS], largest score [ROWS], sum
            of weights [ROWS], and sum of values with these weights [ROWS, D].
        step: number of tiles of K and V that the pipeline held before this tile of keys.
        here: position of the first key.
        stop: position after the last key of all.
        position: position of each query token [ROWS, 1].
        MASKED: True to mask keys that a token does not see.

    Returns:
        The new state. Its scores are of the next tile of keys; after the last tile of this tile.
    """
    STAGES: gl.constexpr = pipeline.tiles.shape[0]
    KEYS: gl.constexpr = pipeline.tiles.shape[1]
    scores, top, total, out = state
    following = gl.where(here + KEYS < stop, step + 2, step)
    k_place, v_place = following % STAGES, (step + 1) % STAGES
    values = pipeline.tiles.index(v_place)
    if MASKED:  # noqa: SIM102  (a constant: without a mask the branch is not compiled)
        if here + KEYS > stop:  # here, and not before the product with it, where registers are short
            mbarrier.wait(pipeline.full.index(v_place), (step + 1) // STAGES & 1)
            clear_tail(values, stop - here)
            fence_async_shared()
            thread_barrier()
    mbarrier.wait(pipeline.full.index(k_place), following // STAGES & 1)
    ahead = products(q, pipeline.tiles.index(k_place))
    scale = scoring.factor
    if scoring.cap is not None:
        scores, scale = scoring.cap * tanh(scores * scale), 1.0
    if MASKED:
        scores = masked(scores, here, position, WINDOW)
    left, top, total, out = weighed(scores, scale, top, total, out, pipeline.tiles.dtype)
    mbarrier.wait(pipeline.full.index(v_place), (step + 1) // STAGES & 1)
    out = warpgroup_mma(left, values, out, is_async=True)
    scores, out, left = warpgroup_mma_wait(0, deps=(ahead, out, left))
    thread_barrier()
    mbarrier.arrive(pipeline.free.index(k_place), count=1)
    mbarrier.arrive(pipeline.free.index(v_place), count=1)
    return scores, top, total, out


@gluon.jit
def _multiply(q, pipeline, tokens, first, keys, scoring, STRIDE: gl.constexpr, WINDOW: gl.constexpr):
    """Runs a group of warps: the attention of ROWS query tokens.

    Args:
        q: shared memory for the queries [ROWS, D].
        pipeline: `Pipeline` of tiles of K and V.
        tokens, keys: `ChunkTokens` and `Keys` of the CTA.
        first: number of the group's first token.
        STRIDE: elements from one token to the next.
    """
    D: gl.constexpr = q.shape[1]
    KEYS: gl.constexpr = pipeline.tiles.shape[1]
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, lanes))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, lanes))
    at = gl.expand_dims(row.to(gl.int64) * STRIDE, 1) + gl.expand_dims(column, 0)
    inside = gl.expand_dims(row < tokens.count, 1)
    q.store(gl.load(tokens.queries + at, mask=inside, other=0.0))
    of_scores: gl.constexpr = gl.SliceLayout(1, sums_layout(KEYS))
    own = first + gl.arange(0, ROWS, layout=of_scores)
    position = gl.load(tokens.positions + own, mask=own < tokens.count, other=-1).to(gl.int32)  # padding sees no key
    position = gl.expand_dims(position, 1)
    fence_async_shared()
    thread_barrier()

    top, total, out = empty_softmax(KEYS, D)
    mbarrier.wait(pipeline.full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=(products(q, pipeline.tiles.index(0)),))
    thread_barrier()
    mbarrier.arrive(pipeline.free.index(0), count=1)
    step = 0
    for here in range(keys.begin, keys.whole, KEYS):
        state = scores, top, total, out
        scores, top, total, out = _attend_tile(
            q, pipeline, state, step, here, keys.stop, position, scoring, False, WINDOW
        )  # fmt: skip
        step += 2
    for here in range(keys.whole, keys.stop, KEYS):
        state = scores, top, total, out
        scores, top, total, out = _attend_tile(
            q, pipeline, state, step, here, keys.stop, position, scoring, True, WINDOW
        )  # fmt: skip
        step += 2
    if scoring.sinks is not None:
        total = total + power(sink_of(scoring, tokens.head) - top)
    total = gl.convert_layout(total, gl.SliceLayout(1, sums_layout(D)))
    out = out / gl.expand_dims(total, 1)
    q.store(out.to(tokens.out.dtype.element_ty))  # through shared memory, so that a warp stores whole rows
    thread_barrier()
    gl.store(tokens.out + at, q.load(lanes), mask=inside)


@gluon.jit(do_not_specialize=["num_queries", "limit"])
def chunk_kernel(
    query_ptr,
    key_desc,  # [num_pages * page_size, Hkv * D] in blocks of [piece_of(page_size, KEYS), WIDTH]
    value_desc,  # the same for V
    cache,  # PagedCache
    position_ptr,
    out_ptr,  # [B, Q, H, D]; may be query itself
    num_queries,
    limit,  # keys from this position on are not read
    scoring,  # Scoring
    WINDOW: gl.constexpr,  # 0: no window
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    GROUPS: gl.constexpr,  # groups of warps that multiply, 1 or 2
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Computes the attention of query head h over tile t of the tokens of batch row b, in CTA (h, -t, -b)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # tiles with most keys start first, so that the last CTAs are short; in shared passes those of late rows
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    head, batch = gl.program_id(0), (gl.num_programs(2) - 1 - gl.program_id(2)).to(gl.int64)
    first = tile * (GROUPS * ROWS)
    row = first + gl.arange(0, GROUPS * ROWS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    valid = row < num_queries
    position = gl.load(position_ptr + batch * num_queries + row, mask=valid, other=-1).to(gl.int32)
    newest = gl.minimum(gl.max(position, axis=0), limit - 1)
    oldest = gl.minimum(gl.min(gl.where(valid, position, newest), axis=0), newest)
    begin, whole = 0, (oldest + 1) // KEYS * KEYS
    if WINDOW > 0:
        begin = gl.maximum(oldest - WINDOW + 1, 0) // KEYS * KEYS
        whole = begin
    DTYPE: gl.constexpr = query_ptr.dtype.element_ty
    lay: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    qs = gl.allocate_shared_memory(DTYPE, [GROUPS, ROWS, D], lay)
    tiles, full, free = new_ring(DTYPE, STAGES, KEYS, D, lay, GROUPS)
    fence_async_shared()
    pipeline = Pipeline(tiles, full, free, None)
    STRIDE: gl.constexpr = KV_HEADS * GROUP * D
    place = batch * num_queries * STRIDE + head * D
    tokens = ChunkTokens(
        query_ptr + place, out_ptr + place, position_ptr + batch * num_queries, num_queries, head
    )  # fmt: skip
    keys = Keys(begin, whole, newest + 1)
    row_cache, column = cache_of_row(cache, batch), head // GROUP * D
    # the two lists after the functions: warps of each function but the first, and registers of their threads
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (qs.index(0), pipeline, tokens, first, keys, scoring, STRIDE, WINDOW)),
                (_multiply, (qs.index(1), pipeline, tokens, first + ROWS, keys, scoring, STRIDE, WINDOW)),
                (_load_all, (key_desc, value_desc, pipeline, row_cache, column, keys, PAGE_SIZE, PDL)),
            ],
            [WARPS, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (qs.index(0), pipeline, tokens, first, keys, scoring, STRIDE, WINDOW)),
                (_load_all, (key_desc, value_desc, pipeline, row_cache, column, keys, PAGE_SIZE, PDL)),
            ],
            [1],
            [24],
        )


def attend_chunk(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cache: PagedCache,
    positions: Tensor,
    out: Tensor,
    num_blocks: int,
    window: int | None,
    scoring: Scoring,
    tile: ChunkTile,
) -> None:
    """Launches `chunk_kernel`. `tile` is a result of `chunk_tile`; other arguments are as in prefill.py, checked."""
    batch, num_queries, num_heads, dim = query.shape
    page_size, kv_heads = keys.shape[1:3]
    block = [piece_of(page_size, tile.keys), WIDTH.value]
    slots = [described(each.view(-1, kv_heads * dim), block) for each in (keys, values)]
    launch(
        chunk_kernel,
        (num_heads, triton.cdiv(num_queries, tile.groups * CHUNK_ROWS), batch),
        query,
        *slots,
        cache,
        positions,
        out,
        num_queries,
        num_blocks * KEY_BLOCK,
        scoring,
        WINDOW=window or 0,
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        D=dim,
        PAGE_SIZE=page_size,
        GROUPS=tile.groups,
        KEYS=tile.keys,
        STAGES=tile.stages,
        num_warps=4,
        maxnreg=tile.registers,
    )
