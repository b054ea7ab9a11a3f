"""Decode attention for positions below plan.LATE_FROM: the computation of mma.py, with several splits per CTA.

A split is a range of S * KEYS keys. `plan.early_plan` chooses this kernel for passes with many splits. It also chooses
it for every cache with 8 bits, which mma.py cannot read.

With many splits, one CTA per split would spend most instructions on queries, positions and addresses. So a CTA takes a
range of consecutive splits of one tile of query rows. It reads one block of AT_ONCE splits at a time, and S warps read
each split:

    splits of a tile   | block 0 | block 1 | block 2 | block 3 | ...
    CTAs               | CTA 0             | CTA 1             | ...      about as many blocks each

A captured CUDA graph knows only the largest number of splits. So the kernel computes the number of blocks from the
positions. Keys and values are held in registers. The next block's keys are loaded as soon as this block's scores are
computed. Its values are loaded as soon as the last product has read this block's values. A CTA that has all splits of a
tile combines them in shared memory, and stores no partial results. The output has the same bits as that of mma.py.
"""

# mypy: disable-error-code="assignment, misc"
# tuples of blocks grow in unrolled loops

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention.decode.combine import combine_splits, join, softmax_memory
from fastspec.kernels.attention.decode.kv_loads import (
    key_pages,
    load_keys,
    load_values,
    value_pages,
    values_of,
    words_of,
)
from fastspec.kernels.attention.decode.mma_tiles import (
    EIGHT,
    KEYS,
    ROWS,
    begun,
    merge_parts,
    positions_of,
    rows_of,
    scores_of,
    stage_q,
    staged_rows,
    store_output,
    store_partial,
)
from fastspec.kernels.attention.decode.query_rows import (
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
from fastspec.kernels.common.gluon_compat import thread_barrier


@gluon.jit(do_not_specialize=["num_queries", "num_pairs", "splits"])
def batch_kernel(
    tokens,  # NewTokens
    cache,  # PagedCache
    out_ptr,
    work,  # WorkArea
    num_queries,
    num_pairs,  # B * Hkv
    splits,  # number of splits of the longest row
    scoring,  # Scoring
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    G: gl.constexpr,  # groups of 8 query rows in a tile
    S: gl.constexpr,  # parts of a split; each part has its own softmax and warp
    AT_ONCE: gl.constexpr,  # number of splits in a block
    REGROUP: gl.constexpr,  # True: out is in the order in which the next product's TMA pipeline reads it
    PDL: gl.constexpr,
):
    """Computes the attention of one tile of query rows over a range of splits, in CTA (tile, index of the range).

    It also stores K and V of the new tokens whose positions are in its splits. For the arguments see `_decode_kernel`
    of portable.py.
    """
    HALF: gl.constexpr = D // 2
    SPLIT: gl.constexpr = S * KEYS
    ALL: gl.constexpr = S * AT_ONCE
    BLOCK: gl.constexpr = SPLIT * AT_ONCE
    TILE: gl.constexpr = G * EIGHT
    STAGED: gl.constexpr = staged_rows(G)
    DTYPE: gl.constexpr = tokens.qkv.dtype.element_ty
    CACHED: gl.constexpr = cache.k.dtype.element_ty
    WORDS: gl.constexpr = D * CACHED.primitive_bitwidth // 32
    WARPS: gl.constexpr = gl.num_warps()
    rows = num_queries * GROUP  # rows of one KV head
    tiles = (rows + TILE - 1) // TILE
    tile, pair = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    batch, kv_head = (pair // KV_HEADS).to(gl.int64), pair % KV_HEADS
    row_cache = cache_of_row(cache, batch)
    at_batch = batch * num_queries
    if PDL:
        gdc_launch_dependents()

    # before its wait the kernel reads nothing that the preceding product writes: see `attend` of dispatch.py
    new = new_positions(tokens.positions + at_batch, num_queries, WARPS)
    first_new, oldest, newest = kv_range(new, tile, 0, splits * SPLIT, TILE, WINDOW, GROUP, WARPS)
    first, last = oldest // SPLIT, (newest + SPLIT) // SPLIT - 1
    first_block, last_block = oldest // BLOCK, (newest + BLOCK) // BLOCK - 1
    length = (last_block - first_block + gl.num_programs(1)) // gl.num_programs(1)
    mine_first = first_block + gl.program_id(1) * length
    mine_last = gl.minimum(mine_first + length - 1, last_block)
    if mine_first > mine_last:
        idle(newest, PDL)
        return
    begin, stop = mine_first * BLOCK, gl.minimum(mine_last * BLOCK + BLOCK, newest + 1)
    # K and V of earlier passes are loaded now; those of this pass after they are stored
    key_words_ptr, value_words_ptr = words_of(cache.k), words_of(cache.v)
    k_page = key_pages(row_cache, begin, WORDS, PAGE_SIZE, ALL, D)
    v_page = value_pages(row_cache, begin, WORDS, PAGE_SIZE, ALL, D)
    old = gl.minimum(first_new, stop)
    keys = load_keys(key_words_ptr, k_page, begin, kv_head, 0, old, None, WORDS, KV_HEADS, PAGE_SIZE, ALL, D)
    values = load_values(value_words_ptr, v_page, begin, kv_head, 0, old, None, WORDS, KV_HEADS, PAGE_SIZE, ALL, D)
    head_of: gl.constexpr = head_layout(HALF, WARPS)
    staged = gl.arange(0, STAGED, layout=gl.SliceLayout(1, head_of))
    row = tile * TILE + staged
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, head_of))
    valid = (row < rows) & (staged < TILE)
    at = batch * num_queries + row // GROUP
    q_position = gl.load(tokens.positions + at, mask=valid, other=0, cache_modifier=".cg")
    cos_sin = angles(q_position, valid, tokens, HALF, head_of)
    slots = slots_of(
        tokens, row_cache, batch, kv_head, 0, begin, stop, num_queries, KV_HEADS, D, PAGE_SIZE, head_of
    )  # fmt: skip
    positions = positions_of(tokens.positions + at_batch, tile * TILE, rows, STAGED, GROUP, ALL)
    if PDL:
        gdc_wait()

    head = (at * ((GROUP + 2) * KV_HEADS) + kv_head * GROUP + row % GROUP) * D
    source = tokens.qkv + gl.expand_dims(head, 1) + gl.expand_dims(column, 0)
    q1 = gl.load(source, mask=gl.expand_dims(valid, 1), other=0.0)
    q2 = gl.load(source + HALF, mask=gl.expand_dims(valid, 1), other=0.0)
    append(tokens, row_cache, slots, kv_head, KV_HEADS, GROUP, D, head_of)
    q1, q2 = apply_rope(q1, q2, cos_sin, tokens.q_norm, tokens.eps, HALF)
    queries = stage_q(q1, q2)
    for first_row in range(NEW_ROWS, num_queries, NEW_ROWS):  # the first rows are handled above, without branches
        slots = slots_of(
            tokens, row_cache, batch, kv_head, first_row, begin, stop, num_queries, KV_HEADS, D, PAGE_SIZE, head_of
        )  # fmt: skip
        append(tokens, row_cache, slots, kv_head, KV_HEADS, GROUP, D, head_of)
    thread_barrier()  # the code below reads stores of other threads
    if (G > 2) | (begin + BLOCK > first_new):  # G > 2: no branch, because it needs registers
        keys = load_keys(
            key_words_ptr, k_page, begin, kv_head, first_new, stop, keys, WORDS, KV_HEADS, PAGE_SIZE, ALL, D
        )
        values = load_values(
            value_words_ptr, v_page, begin, kv_head, first_new, stop, values, WORDS, KV_HEADS, PAGE_SIZE, ALL, D
        )
    k_page = key_pages(row_cache, begin + BLOCK, WORDS, PAGE_SIZE, ALL, D)
    v_page = value_pages(row_cache, begin + BLOCK, WORDS, PAGE_SIZE, ALL, D)

    nodes, base = num_pairs * splits * rows, pair * splits * rows
    mean_ptr, weight_ptr = work.partials + base.to(gl.int64) * D, work.partials + (nodes.to(gl.int64) * D + base)
    owns_tile = (mine_first == first_block) & (mine_last == last_block)  # True: this CTA has all splits of the tile
    softmaxes = ()
    for p in gl.static_range(STAGED // ROWS):
        softmaxes += (softmax_memory(rows_of(G, p), D, REGROUP),)
    for block in range(mine_first, mine_last + 1):
        here = block * BLOCK
        following = here + BLOCK
        k = (values_of(keys[0], HALF, DTYPE, CACHED), values_of(keys[1], HALF, DTYPE, CACHED))
        scores = scores_of(queries, k, here, positions, scoring, WINDOW, ALL, HALF)
        keys = load_keys(key_words_ptr, k_page, following, kv_head, 0, stop, None, WORDS, KV_HEADS, PAGE_SIZE, ALL, D)
        k_page = key_pages(row_cache, following + BLOCK, WORDS, PAGE_SIZE, ALL, D)
        v = values_of(values, D, DTYPE, CACHED)
        for p in gl.static_range(STAGED // ROWS):
            top, totals, out = begun(scores[p], v, ALL)
            # not earlier: the registers hold either one block, or a product's sums and values
            if p == STAGED // ROWS - 1:
                values = load_values(
                    value_words_ptr, v_page, following, kv_head, 0, stop, None, WORDS, KV_HEADS, PAGE_SIZE, ALL, D
                )
                v_page = value_pages(row_cache, following + BLOCK, WORDS, PAGE_SIZE, ALL, D)
            # products run one after the other, so that the registers of a product's sums are free before the next
            # begins
            left = merge_parts(top, totals, out, S, rows_of(G, p), REGROUP)
            mean, weight = left[0]
            done = gl.arange(0, mean.shape[0], layout=gl.SliceLayout(1, mean.type.layout)) + tile * TILE + p * ROWS
            if first == last:
                for i in gl.static_range(1, AT_ONCE):
                    mean = gl.where(first % AT_ONCE == i, left[i][0], mean)
                    weight = gl.where(first % AT_ONCE == i, left[i][1], weight)
                store_output(out_ptr, batch, kv_head, done, rows, num_queries, mean, weight, scoring, KV_HEADS, GROUP)
            elif owns_tile:
                mean, weight = join(softmaxes[p], left)
                if block == last_block:
                    store_output(
                        out_ptr, batch, kv_head, done, rows, num_queries, mean, weight, scoring, KV_HEADS, GROUP
                    )
            else:
                for i in gl.static_range(AT_ONCE):
                    split = block * AT_ONCE + i
                    there = (done < rows) & (split >= first) & (split <= last)
                    store_partial(mean_ptr, weight_ptr, split * rows + done, there, left[i][0], left[i][1])
    if (first < last) & (owns_tile == 0):
        kept = gl.minimum(mine_last * AT_ONCE + AT_ONCE - 1, last) - gl.maximum(mine_first * AT_ONCE, first) + 1
        combine_splits(
            mean_ptr, weight_ptr, work.counters + gl.program_id(0), first, last, kept, out_ptr, batch, kv_head, tile,
            rows, num_queries, scoring, KV_HEADS, GROUP, D, G, WARPS,
        )  # fmt: skip
