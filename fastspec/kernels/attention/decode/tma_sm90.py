"""Decode attention for positions from plan.LATE_FROM on (long contexts) on sm_90. TMA loads each K and V tile once.

    loading warp         TMA copies of K0, V0, K1, V1, ... -> ring of STAGES tiles [KEYS, D] in shared memory
    4 multiplying warps  scores [ROWS, KEYS] = q [ROWS, D] K^T;   out [ROWS, D] += weights [ROWS, KEYS] V    (wgmma)

The warps are specialised as in FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608). While the softmax weights of a
tile are computed, the tensor cores compute the scores of the next tile. A product has ROWS query rows: with 4 query
heads per KV head, 16 tokens take as long as one.

A split is a range of a row's keys. Splits are larger at higher positions. Short rows need many CTAs that read at the
same time; long rows need few partial results. `gather_kernel`, launched next, combines the partial results. Splits are
dealt to as many CTAs as run at a time. The pipeline keeps loading from one split to the next. It takes half to three
quarters of an SM's shared memory, which is enough for full bandwidth. The rest stays L1, for loads of the layer's
matrix products (carveout.py).

Rows of a product do not affect each other, and the partial result of a split does not depend on its CTA. So a row's
bits do not depend on other rows.

K and V of a new token are stored by the CTA whose splits contain its position. The CTA's loading warp waits for that
store before it loads a tile with new tokens.

With an 8-bit cache, TMA loads tiles of e4m3 numbers. Four warps issue these loads and convert the tiles to 16 bits,
exactly, into a second ring. The multiplying warps read this second ring. So a row has the bits of a 16-bit cache with
the same numbers. Two such CTAs share an SM: each of its four schedulers has one converting warp of each CTA.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention.decode.kv_loads import split_of, start_of
from fastspec.kernels.attention.decode.mma_tiles import store_output, store_partial, tanh
from fastspec.kernels.attention.decode.query_rows import (
    NEVER,
    NEW_ROWS,
    angles,
    append,
    apply_rope,
    cache_of_row,
    head_layout,
    idle,
    kv_range,
    new_positions,
    slots_of,
)
from fastspec.kernels.attention.decode.tma_parts import (
    ROWS,
    WARPS,
    WIDENING_WARPS,
    WIDTH,
    Pipeline,
    Share,
    clear_tail,
    empty_softmax,
    in_pieces,
    keys_of,
    load_and_widen,
    load_tiles,
    masked,
    new_ring,
    products,
    split_number,
    splits_of,
    sums_layout,
    tile_layout,
    weighed,
)
from fastspec.kernels.common.gluon_compat import thread_barrier


@gluon.jit
def _fence_stored():
    """Makes this thread's stores visible to TMA copies that start after a barrier (proxy fence)."""
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _stage_queries(qs, q1, q2):
    """Stores queries in shared memory `qs` [1, ROWS, D] for wgmma. q1, q2 [ROWS, D / 2] are halves of the heads."""
    D: gl.constexpr = qs.shape[2]
    pieces = in_pieces(qs, ROWS)
    if D == 2 * WIDTH:
        pieces.index(0).store(q1)
        pieces.index(1).store(q2)
    else:
        pieces.index(0).store(gl.reshape(gl.permute(gl.join(q1, q2), (0, 2, 1)), [ROWS, D]))


@gluon.jit
def _attend_splits(
    qs, pipeline, share, out_ptr, partial_ptr, position, num_queries, num_pairs, splits, scoring,
    SPLIT_SIZES: gl.constexpr, LATE_FROM: gl.constexpr, WINDOW: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Computes the attention of a CTA's query tile over each of the CTA's splits, and stores the partial results.

    If the query tile has only one split, it stores the attention output instead.

    Args:
        qs: queries in shared memory.
        pipeline: `Pipeline` of 16-bit tiles.
        share: `Share`, the work of the CTA.
        position: position of each query row [ROWS, 1].
    """
    tile, batch, kv_head = share.tile, share.batch, share.kv_head
    tiles, full, free = pipeline.tiles, pipeline.full, pipeline.free
    STAGES: gl.constexpr = tiles.shape[0]
    KEYS: gl.constexpr = tiles.shape[1]
    D: gl.constexpr = tiles.shape[2]
    sums: gl.constexpr = gl.SliceLayout(1, sums_layout(D))
    rows = num_queries * GROUP
    row = tile * ROWS + gl.arange(0, ROWS, layout=sums)
    nodes, base = num_pairs * splits * rows, (batch * KV_HEADS + kv_head) * splits * rows
    mean_ptr, weight_ptr = partial_ptr + base * D, partial_ptr + (nodes.to(gl.int64) * D + base)
    q = qs.index(0)
    step = 0
    mbarrier.wait(full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=(products(q, tiles.index(0)),))
    thread_barrier()
    mbarrier.arrive(free.index(0), count=1)
    for i in range(share.mine):
        split = split_number(i, share)
        first, end = keys_of(split, share.begin, share.stop, SPLIT_SIZES)
        top, total, out = empty_softmax(KEYS, D)
        for here in range(first, end, KEYS):
            # multiply the next keys while this tile's weights are computed; after the last tile its own keys again
            following = gl.where((here + KEYS < end) | (i + 1 < share.mine), step + 2, step)
            k_place, v_place = following % STAGES, (step + 1) % STAGES
            mbarrier.wait(full.index(k_place), following // STAGES & 1)
            ahead = products(q, tiles.index(k_place))
            scale = scoring.factor
            if scoring.cap is not None:
                scores, scale = scoring.cap * tanh(scores * scale), 1.0
            if (here + KEYS > share.first_new + 1) | ((WINDOW > 0) & (here + WINDOW <= share.stop - 1)):
                scores = masked(scores, here, position, WINDOW)
            left, top, total, out = weighed(scores, scale, top, total, out, tiles.dtype)
            values = tiles.index(v_place)
            mbarrier.wait(full.index(v_place), (step + 1) // STAGES & 1)
            if here + KEYS > share.stop:
                clear_tail(values, share.stop - here)
                fence_async_shared()
                thread_barrier()
            out = warpgroup_mma(left, values, out, is_async=True)
            scores, out, left = warpgroup_mma_wait(0, deps=(ahead, out, left))
            thread_barrier()
            mbarrier.arrive(free.index(k_place), count=1)
            mbarrier.arrive(free.index(v_place), count=1)
            step += 2
        top, total = gl.convert_layout(top, sums), gl.convert_layout(total, sums)
        mean = out * gl.expand_dims(1.0 / gl.where(total == 0.0, 1.0, total), 1)
        if share.only:
            late = gl.convert_layout(gl.max(position, axis=1), sums) >= LATE_FROM
            store_output(
                out_ptr, batch, kv_head, gl.where(late, row, rows), rows, num_queries, mean, top + gl.log2(total),
                scoring, KV_HEADS, GROUP,
            )  # fmt: skip
        else:
            # K and V stream through L2 and exceed it, but these partial results should stay there for gather_kernel
            store_partial(
                mean_ptr, weight_ptr, split * rows + row, row < rows, mean, top + gl.log2(total), LASTING=True
            )


@gluon.jit
def _append_more(
    tokens, cache, share, num_queries,
    SPLIT_SIZES: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Stores K and V of new tokens whose positions are in the CTA's splits.

    It skips the first NEW_ROWS new tokens in the CTA's first split, which the caller has stored.
    """
    for i in range(share.mine):
        low, high = keys_of(split_number(i, share), 0, share.stop, SPLIT_SIZES)
        if high > share.first_new:
            for first_row in range(gl.where(i == 0, NEW_ROWS, 0), num_queries, NEW_ROWS):
                slots = slots_of(
                    tokens, cache, share.batch, share.kv_head, first_row, low, high, num_queries,
                    KV_HEADS, D, PAGE_SIZE, layout,
                )  # fmt: skip
                append(tokens, cache, slots, share.kv_head, KV_HEADS, GROUP, D, layout)


@gluon.jit
def _consumer(
    qs, pipeline, share, tokens, cache, out_ptr, partial_ptr, num_queries, num_pairs, splits, scoring,
    SPLIT_SIZES: gl.constexpr, LATE_FROM: gl.constexpr, WINDOW: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Runs the multiplying warps of a CTA.

    They store K and V of the new tokens in the CTA's splits, and the queries in shared memory. Then they compute the
    attention.
    """
    KEYS: gl.constexpr = pipeline.tiles.shape[1]
    D: gl.constexpr = pipeline.tiles.shape[2]
    HALF: gl.constexpr = D // 2
    tile, batch, kv_head = share.tile, share.batch, share.kv_head
    rows = num_queries * GROUP
    head_of: gl.constexpr = head_layout(HALF, WARPS)
    row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, head_of))
    column = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, head_of)), 0)
    valid = row < rows
    at = batch * num_queries + row // GROUP
    q_position = gl.load(tokens.positions + at, mask=valid, other=0, cache_modifier=".cg")
    cos_sin = angles(q_position, valid, tokens, HALF, head_of)
    own = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(KEYS)))
    at_own = batch * num_queries + own // GROUP
    # -1: a padding row sees no key
    position = gl.load(tokens.positions + at_own, mask=own < rows, other=-1, cache_modifier=".cg")
    position = gl.expand_dims(gl.minimum(position, NEVER).to(gl.int32), 1)
    low, high = keys_of(split_number(0, share), 0, share.stop, SPLIT_SIZES)
    slots = slots_of(tokens, cache, batch, kv_head, 0, low, high, num_queries, KV_HEADS, D, PAGE_SIZE, head_of)
    if PDL:
        gdc_wait()

    first = (at * ((GROUP + 2) * KV_HEADS) + kv_head * GROUP + row % GROUP) * D
    source = tokens.qkv + gl.expand_dims(first, 1) + column
    q1 = gl.load(source, mask=gl.expand_dims(valid, 1), other=0.0)
    q2 = gl.load(source + HALF, mask=gl.expand_dims(valid, 1), other=0.0)
    if high > share.first_new:
        append(tokens, cache, slots, kv_head, KV_HEADS, GROUP, D, head_of)
        _append_more(tokens, cache, share, num_queries, SPLIT_SIZES, KV_HEADS, GROUP, D, PAGE_SIZE, head_of)
        _fence_stored()
        thread_barrier()
    mbarrier.arrive(pipeline.stored.index(0), count=1)
    q1, q2 = apply_rope(q1, q2, cos_sin, tokens.q_norm, tokens.eps, HALF)
    _stage_queries(qs, q1, q2)
    fence_async_shared()
    thread_barrier()
    _attend_splits(
        qs, pipeline, share, out_ptr, partial_ptr, position, num_queries, num_pairs, splits, scoring,
        SPLIT_SIZES, LATE_FROM, WINDOW, KV_HEADS, GROUP,
    )  # fmt: skip


@gluon.jit
def _loader(key_desc, value_desc, loaded, pipeline, cache, column, share, SPLIT_SIZES: gl.constexpr,
            PAGE_SIZE: gl.constexpr, NARROW: gl.constexpr):  # fmt: skip
    """Runs the loading warps. With NARROW, they also convert the tiles of an 8-bit cache. See `load_and_widen`."""
    if NARROW:
        load_and_widen(key_desc, value_desc, loaded, pipeline, cache, column, share, SPLIT_SIZES, PAGE_SIZE)
    else:
        load_tiles(key_desc, value_desc, loaded, cache, column, share, SPLIT_SIZES, PAGE_SIZE)


@gluon.jit
def _pipeline(
    dtype: gl.constexpr, stored, STAGES: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Allocates an empty `Pipeline`, see `new_ring`. One group of warps reads it."""
    tiles, full, free = new_ring(dtype, STAGES, KEYS, D, layout, 1)
    return Pipeline(tiles, full, free, stored)


@gluon.jit(do_not_specialize=["num_queries", "num_pairs", "splits"])
def shares_kernel(
    key_desc,  # [num_pages * page_size, Hkv * D] in blocks of [piece_of(page_size, KEYS), WIDTH]
    value_desc,  # the same for V
    tokens,  # NewTokens
    cache,  # PagedCache
    out_ptr,
    partial_ptr,  # see `WorkArea.partials`
    num_queries,
    num_pairs,  # B * Hkv
    splits,  # largest number of splits of a row
    scoring,  # Scoring
    SPLIT_SIZES: gl.constexpr,  # (first position, keys, number of the first) for each size of splits
    LATE_FROM: gl.constexpr,  # rows at positions below this are skipped
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    KEYS: gl.constexpr,  # keys in a tile; the bits of a row depend on it
    STAGES: gl.constexpr,  # tiles of K or V in the pipeline
    CONVERTED: gl.constexpr,  # for an 8-bit cache the number of converted 16-bit tiles, else 0
    PDL: gl.constexpr,
):
    """Computes the attention of query tile t over some of its splits, in CTA (t, i).

    `split_number` returns the indices of the splits of the i-th CTA. For the arguments see `_decode_kernel` of
    portable.py.
    """
    DTYPE: gl.constexpr = tokens.qkv.dtype.element_ty
    NARROW: gl.constexpr = CONVERTED > 0
    tiles = (num_queries * GROUP + ROWS - 1) // ROWS
    tile, pair = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    batch, kv_head = (pair // KV_HEADS).to(gl.int64), pair % KV_HEADS
    row_cache = cache_of_row(cache, batch)
    if PDL:
        gdc_launch_dependents()
    # before its wait the kernel reads nothing that the preceding product writes: see `attend` of dispatch.py
    new = new_positions(tokens.positions + batch * num_queries, num_queries, WARPS)
    limit = start_of(splits, SPLIT_SIZES)
    first_new, oldest, newest = kv_range(new, tile, LATE_FROM, limit, ROWS, WINDOW, GROUP, WARPS)
    first, last = split_of(oldest, SPLIT_SIZES), split_of(newest, SPLIT_SIZES)
    cta, ctas = gl.program_id(1), gl.num_programs(1)
    begin, stop = oldest // KEYS * KEYS, newest + 1
    mine = gl.where(newest < 0, 0, splits_of(cta, ctas, last - first + 1))
    if mine == 0:
        idle(newest, PDL)
        return

    lay: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    qs = gl.allocate_shared_memory(DTYPE, [1, ROWS, D], lay)
    stored = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(stored.index(0), count=1)
    loaded = _pipeline(gl.uint8 if NARROW else DTYPE, stored, STAGES, KEYS, D, tile_layout(D, NARROW))
    pipeline = _pipeline(DTYPE, stored, CONVERTED, KEYS, D, lay) if NARROW else loaded
    fence_async_shared()

    share = Share(batch, kv_head, tile, mine, cta, ctas, last, first == last, begin, stop, first_new)
    LOADERS: gl.constexpr = WIDENING_WARPS if NARROW else 1
    REGISTERS: gl.constexpr = 56 if NARROW else 40
    # the two lists after the functions: warps of the second function, and registers of each of its threads
    gl.warp_specialize(
        [
            (_consumer, (
                qs, pipeline, share, tokens, row_cache, out_ptr, partial_ptr, num_queries, num_pairs, splits, scoring,
                SPLIT_SIZES, LATE_FROM, WINDOW, KV_HEADS, GROUP, PAGE_SIZE, PDL,
            )),
            (_loader, (
                key_desc, value_desc, loaded, pipeline, row_cache, kv_head * D, share, SPLIT_SIZES, PAGE_SIZE, NARROW,
            )),
        ],
        [LOADERS],
        [REGISTERS],
    )  # fmt: skip
