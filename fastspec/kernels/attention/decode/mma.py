"""Decode attention for positions below plan.LATE_FROM, 16-bit caches and head sizes 64 and 128; operands in registers.

    scores [ROWS, KEYS] = q [ROWS, D] K^T [D, KEYS];   out [ROWS, D] += weights [ROWS, KEYS] V [KEYS, D]

K and V are loaded from the cache directly into the registers of tensor-core operands, without shared memory. A lane
loads 16 contiguous bytes, which are its operand elements of two products. mma_tiles.py describes this order. A split
has S parts of KEYS keys. One or two warps compute each part, with an online softmax of its own. The results of the
parts are combined in order. Each product has ROWS query rows. Rows after the tile's last query row are padding. They do
not change the bits of other rows.
"""

# mypy: disable-error-code="assignment, misc"
# tuples of blocks grow in unrolled loops

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention.decode.combine import combine_splits
from fastspec.kernels.attention.decode.mma_tiles import (
    EIGHT,
    KEYS,
    ROWS,
    begun,
    keys_at,
    merge_parts,
    places_of,
    positions_of,
    rows_of,
    scores_of,
    stage_q,
    staged_rows,
    store_output,
    store_partial,
    values_at,
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
def fragment_kernel(
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
    S: gl.constexpr,  # parts of a block of keys; each part has its own softmax, and one or two warps
    REGROUP: gl.constexpr,  # True: out is in the order in which the next product's TMA pipeline reads it
    PDL: gl.constexpr,
):
    """Computes the attention of one tile of query rows over one split of the keys, in CTA (tile, split).

    It also stores K and V of the new tokens whose positions are in its split. For the arguments see `_decode_kernel` of
    portable.py.
    """
    HALF: gl.constexpr = D // 2
    SPLIT: gl.constexpr = S * KEYS
    TILE: gl.constexpr = G * EIGHT
    STAGED: gl.constexpr = staged_rows(G)
    WARPS: gl.constexpr = gl.num_warps()
    split = gl.program_id(1)
    rows = num_queries * GROUP  # rows of one KV head
    tiles = (rows + TILE - 1) // TILE
    tile, pair = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    batch, kv_head = (pair // KV_HEADS).to(gl.int64), pair % KV_HEADS
    start = split * SPLIT
    row_cache = cache_of_row(cache, batch)
    at_batch = tokens.positions + batch * num_queries
    if PDL:
        gdc_launch_dependents()

    # before its wait the kernel reads nothing that the preceding product writes: see `attend` of dispatch.py
    new = new_positions(at_batch, num_queries, WARPS)
    head_of: gl.constexpr = head_layout(HALF, WARPS)
    staged = gl.arange(0, STAGED, layout=gl.SliceLayout(1, head_of))
    row = tile * TILE + staged
    valid = (row < rows) & (staged < TILE)
    at = batch * num_queries + row // GROUP
    q_position = gl.load(tokens.positions + at, mask=valid, other=0, cache_modifier=".cg")
    first_new, oldest, newest = kv_range(new, tile, 0, splits * SPLIT, TILE, WINDOW, GROUP, WARPS)
    first, last = oldest // SPLIT, (newest + SPLIT) // SPLIT - 1
    if (split < first) | (split > last):
        idle(newest, PDL)
        return
    stop = gl.minimum(start + SPLIT, newest + 1)

    # K and V of earlier passes are loaded now; those of this pass after they are stored
    where = places_of(row_cache, start, kv_head, KV_HEADS, D, PAGE_SIZE, S)
    keys = keys_at(where, 0, gl.minimum(first_new, stop), None, HALF)
    values = values_at(where, 0, gl.minimum(first_new, stop), None)
    cos_sin = angles(q_position, valid, tokens, HALF, head_of)
    slots = slots_of(
        tokens, row_cache, batch, kv_head, 0, start, stop, num_queries, KV_HEADS, D, PAGE_SIZE, head_of
    )  # fmt: skip
    positions = positions_of(at_batch, tile * TILE, rows, STAGED, GROUP, S)
    if PDL:
        gdc_wait()

    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, head_of))
    head = (at * ((GROUP + 2) * KV_HEADS) + kv_head * GROUP + row % GROUP) * D
    source = tokens.qkv + gl.expand_dims(head, 1) + gl.expand_dims(column, 0)
    q1 = gl.load(source, mask=gl.expand_dims(valid, 1), other=0.0)
    q2 = gl.load(source + HALF, mask=gl.expand_dims(valid, 1), other=0.0)
    append(tokens, row_cache, slots, kv_head, KV_HEADS, GROUP, D, head_of)
    q1, q2 = apply_rope(q1, q2, cos_sin, tokens.q_norm, tokens.eps, HALF)
    queries = stage_q(q1, q2)
    for first_row in range(NEW_ROWS, num_queries, NEW_ROWS):  # the first rows are handled above, without branches
        slots = slots_of(
            tokens, row_cache, batch, kv_head, first_row, start, stop, num_queries, KV_HEADS, D, PAGE_SIZE, head_of
        )  # fmt: skip
        append(tokens, row_cache, slots, kv_head, KV_HEADS, GROUP, D, head_of)
    thread_barrier()  # what other threads stored is read below
    keys = keys_at(where, first_new, stop, keys, HALF)
    values = values_at(where, first_new, stop, values)

    nodes, base = num_pairs * splits * rows, pair * splits * rows
    mean_ptr, weight_ptr = work.partials + base.to(gl.int64) * D, work.partials + (nodes.to(gl.int64) * D + base)
    scores = scores_of(queries, keys, start, positions, scoring, WINDOW, S, HALF)
    # the code below reads stores of other threads
    for p in gl.static_range(STAGED // ROWS):
        top, totals, out = begun(scores[p], values, S)
        mean, weight = merge_parts(top, totals, out, S, rows_of(G, p), REGROUP)[0]
        done = gl.arange(0, mean.shape[0], layout=gl.SliceLayout(1, mean.type.layout)) + tile * TILE + p * ROWS
        if first == last:
            store_output(out_ptr, batch, kv_head, done, rows, num_queries, mean, weight, scoring, KV_HEADS, GROUP)
        else:
            store_partial(mean_ptr, weight_ptr, split * rows + done, done < rows, mean, weight)
    if first < last:
        combine_splits(
            mean_ptr, weight_ptr, work.counters + gl.program_id(0), first, last, 1, out_ptr, batch, kv_head, tile, rows,
            num_queries, scoring, KV_HEADS, GROUP, D, G, WARPS,
        )  # fmt: skip
