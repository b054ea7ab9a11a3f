"""The decoding kernel of dispatch.py for long caches where decode_tma_sm90.py does not run.

What decode_mma.py computes, in a loop: as soon as a product has taken a block of keys or values out of its
registers, the next block's loads begin. 16 query rows, those of one product, cost the bytes of 8. The arithmetic of a
row is its own alone: how many groups of 8 rows there are changes no bit of it.

Splits grow with their position: short rows need many programs to be read at once, long ones few partial sums. The
largest, which lie last, start first, and small ones fill what they leave. All end at about the same time:
`gather_kernel`, launched next, adds up what they leave with a program for every row (the last program to arrive would
do that alone, behind everything else).
"""

# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)
# tuples of blocks grow and shrink in unrolled loops

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention.kv_loads import (
    key_pages,
    load_keys,
    load_values,
    split_of,
    start_of,
    value_pages,
    values_of,
    words_of,
)
from fastspec.kernels.attention.mma_layouts import operands
from fastspec.kernels.attention.mma_tiles import (
    EIGHT,
    KEYS,
    ROWS,
    advanced,
    finish,
    held_rows,
    hold,
    keep,
    positions_of,
    rows_of,
    scores_of,
    together,
)
from fastspec.kernels.attention.query_rows import (
    NEW_ROWS,
    angles,
    append,
    fed_positions,
    head_layout,
    idle,
    reach,
    slots_of,
    turned,
)
from fastspec.kernels.common.gluon_compat import thread_barrier


@gluon.jit(
    do_not_specialize=["num_queries", "num_pairs", "table_stride", "table_width", "num_pages", "num_angles"],
)
def stream_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,  # None: no norms
    k_norm_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    position_ptr,
    write_ptr,
    out_ptr,
    partial_ptr,  # as in gather_kernel
    num_queries,
    num_pairs,  # B * Hkv
    table_stride,
    table_width,
    num_pages,
    num_angles,
    scale,
    eps,
    RUNGS: gl.constexpr,  # (first position, keys, number of the first) of splits of one size
    FROM: gl.constexpr,  # position: rows at earlier ones are left alone
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    G: gl.constexpr,  # groups of query rows of a program
    S: gl.constexpr,  # warps, along the keys
    PDL: gl.constexpr,
):
    """As `_decode_kernel` of dispatch.py, whose arguments these are: program (t, i) has the i-th split from the
    last.
    """
    HALF: gl.constexpr = D // 2
    BLOCK: gl.constexpr = S * KEYS
    TILE: gl.constexpr = G * EIGHT
    HELD: gl.constexpr = held_rows(G)
    DTYPE: gl.constexpr = key_ptr.dtype.element_ty
    WORDS: gl.constexpr = D * DTYPE.primitive_bitwidth // 32
    mma: gl.constexpr = operands(gl.num_warps(), S)
    splits = gl.num_programs(1)
    rows = num_queries * GROUP  # of one kv head
    tiles = (rows + TILE - 1) // TILE
    tile, pair = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    batch, kv_head = (pair // KV_HEADS).to(gl.int64), pair % KV_HEADS
    table_ptr += batch * table_stride
    at_batch = batch * num_queries
    if PDL:
        gdc_launch_dependents()

    # up to the wait nothing is read that the product before this kernel writes: see `attend` of dispatch.py
    limit = start_of(splits, RUNGS)
    given = fed_positions(position_ptr + at_batch, num_queries, S)
    fresh, oldest, newest = reach(given, tile, FROM, limit, TILE, WINDOW, GROUP, S)
    first, last = split_of(oldest, RUNGS), split_of(newest, RUNGS)
    split = last - gl.program_id(1)
    if (split < first) | (newest < 0):
        idle(newest, PDL)
        return
    start, stop = start_of(split, RUNGS), gl.minimum(start_of(split + 1, RUNGS), newest + 1)
    begin = gl.maximum(start, oldest // BLOCK * BLOCK)
    # what earlier passes stored is on its way now, the rest once this pass has stored it
    key_words_ptr, value_words_ptr = words_of(key_ptr), words_of(value_ptr)
    k_page = key_pages(table_ptr, begin, table_width, num_pages, PAGE_SIZE, S, D)
    v_page = value_pages(table_ptr, begin, table_width, num_pages, PAGE_SIZE, S, D)
    old = gl.minimum(fresh, stop)
    keys = load_keys(key_words_ptr, k_page, begin, kv_head, 0, old, None, WORDS, KV_HEADS, PAGE_SIZE, S, D)
    values = load_values(value_words_ptr, v_page, begin, kv_head, 0, old, None, WORDS, KV_HEADS, PAGE_SIZE, S, D)
    k_next = key_pages(table_ptr, begin + BLOCK, table_width, num_pages, PAGE_SIZE, S, D)
    head_of: gl.constexpr = head_layout(HALF, S)
    held = gl.arange(0, HELD, layout=gl.SliceLayout(1, head_of))
    row = tile * TILE + held
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, head_of))
    valid = (row < rows) & (held < TILE)
    at = batch * num_queries + row // GROUP
    q_position = gl.load(position_ptr + at, mask=valid, other=0, cache_modifier=".cg")
    turn = angles(q_position, valid, cos_ptr, sin_ptr, num_angles, HALF, head_of)
    slots = slots_of(
        table_ptr, position_ptr, write_ptr, cos_ptr, sin_ptr, batch, kv_head, 0, start, stop, num_queries,
        num_angles, table_width, num_pages, KV_HEADS, D, PAGE_SIZE, head_of,
    )  # fmt: skip
    positions = positions_of(position_ptr + at_batch, tile * TILE, rows, HELD, GROUP, S)
    top, totals, out = (), (), ()
    for _p in gl.static_range(HELD // ROWS):
        top += (gl.full([S, ROWS], -float("inf"), gl.float32, gl.SliceLayout(2, mma)),)
        totals += (gl.zeros([S, ROWS, KEYS], gl.float32, mma),)
        out += (gl.zeros([S, ROWS, D], gl.float32, mma),)
    if PDL:
        gdc_wait()

    head = (at * ((GROUP + 2) * KV_HEADS) + kv_head * GROUP + row % GROUP) * D
    source = qkv_ptr + gl.expand_dims(head, 1) + gl.expand_dims(column, 0)
    q1 = gl.load(source, mask=gl.expand_dims(valid, 1), other=0.0)
    q2 = gl.load(source + HALF, mask=gl.expand_dims(valid, 1), other=0.0)
    append(qkv_ptr, k_norm_ptr, key_ptr, value_ptr, slots, kv_head, eps, KV_HEADS, GROUP, D, head_of)
    q1, q2 = turned(q1, q2, turn, q_norm_ptr, eps, HALF)
    queries = hold(q1, q2)
    for first_row in range(NEW_ROWS, num_queries, NEW_ROWS):  # apart: what precedes is free of branches
        slots = slots_of(
            table_ptr, position_ptr, write_ptr, cos_ptr, sin_ptr, batch, kv_head, first_row, start, stop, num_queries,
            num_angles, table_width, num_pages, KV_HEADS, D, PAGE_SIZE, head_of,
        )  # fmt: skip
        append(qkv_ptr, k_norm_ptr, key_ptr, value_ptr, slots, kv_head, eps, KV_HEADS, GROUP, D, head_of)
    thread_barrier()  # what other threads stored is read below
    keys = load_keys(key_words_ptr, k_page, begin, kv_head, fresh, stop, keys, WORDS, KV_HEADS, PAGE_SIZE, S, D)
    values = load_values(value_words_ptr, v_page, begin, kv_head, fresh, stop, values, WORDS, KV_HEADS, PAGE_SIZE, S, D)
    k_page = k_next
    v_page = value_pages(table_ptr, begin + BLOCK, table_width, num_pages, PAGE_SIZE, S, D)
    for here in range(begin, stop, BLOCK):
        following = here + BLOCK
        k = (values_of(keys[0], HALF, DTYPE), values_of(keys[1], HALF, DTYPE))
        scores = scores_of(queries, k, here, positions, scale, WINDOW, S, HALF)
        # not sooner: the keys of this block have left their registers
        keys = load_keys(key_words_ptr, k_page, following, kv_head, 0, stop, None, WORDS, KV_HEADS, PAGE_SIZE, S, D)
        k_page = key_pages(table_ptr, following + BLOCK, table_width, num_pages, PAGE_SIZE, S, D)
        v = values_of(values, D, DTYPE)
        new_top, new_totals, new_out = (), (), ()
        for p in gl.static_range(HELD // ROWS):
            t, w, o = advanced(top[p], totals[p], out[p], scores[p], v, S)
            new_top, new_totals, new_out = new_top + (t,), new_totals + (w,), new_out + (o,)
        top, totals, out = new_top, new_totals, new_out
        values = load_values(
            value_words_ptr, v_page, following, kv_head, 0, stop, None, WORDS, KV_HEADS, PAGE_SIZE, S, D
        )
        v_page = value_pages(table_ptr, following + BLOCK, table_width, num_pages, PAGE_SIZE, S, D)

    nodes, base = num_pairs * splits * rows, pair * splits * rows
    mean_ptr, weight_ptr = partial_ptr + base.to(gl.int64) * D, partial_ptr + (nodes.to(gl.int64) * D + base)
    for p in gl.static_range(HELD // ROWS):
        mean, weight = together(top[p], totals[p], out[p], S, rows_of(G, p))[0]
        done = gl.arange(0, mean.shape[0], layout=gl.SliceLayout(1, mean.type.layout))
        done += tile * TILE + p * ROWS
        if first == last:
            late = gl.load(position_ptr + at_batch + done // GROUP, mask=done < rows, other=-1) >= FROM
            finish(out_ptr, batch, kv_head, gl.where(late, done, rows), rows, num_queries, mean, KV_HEADS, GROUP)
        else:
            keep(mean_ptr, weight_ptr, split * rows + done, done < rows, mean, weight)
