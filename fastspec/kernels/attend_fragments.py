"""The decoding kernel of attend.py for 16-bit caches with heads of 64 or 128, out of registers.

K and V go from the cache straight into the operands of the tensor core: 16 contiguous bytes of a lane are its part of
a product, and nothing of them passes through shared memory. S warps share a block of S * KEYS keys, each with an
online softmax of its own; what they end with is added up in order. Rows of queries come in eights, the columns of
every product: their number changes no bit of a row.

    scores^T [KEYS, R] = K [KEYS, D] q^T [D, R];   out^T [D, R] += V^T [D, KEYS] weights^T [KEYS, R]

A product may take its inner index in any order, as long as both sides agree: K and q are read in runs of 8 values of
a head. And the rows of V^T in any order, undone at the end: a lane's 8 neighbouring values of V belong to 8 products.
"""

# mypy: disable-error-code="assignment, misc"
# tuples of blocks grow and shrink in unrolled loops

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attend_fragment_parts import (
    FAN,
    KEYS,
    advanced,
    combine,
    finish,
    keep,
    keys_at,
    operands,
    places_of,
    scored,
    together,
    values_at,
)
from fastspec.kernels.attend_fragment_rows import (
    NEVER,
    NEW_ROWS,
    angles,
    append,
    fed_positions,
    head_layout,
    peek,
    reach,
    slots_of,
    turned,
)
from fastspec.kernels.gluon_names import thread_barrier


@gluon.constexpr_function
def _power_of_two(count):
    """The smallest one that is not less than count."""
    return 1 << (count - 1).bit_length()


@gluon.jit(
    do_not_specialize=["num_queries", "num_pairs", "table_stride", "table_width", "num_pages", "num_angles"],
)
def fragment_kernel(
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
    partial_ptr,
    count_ptr,
    num_queries,
    num_pairs,  # B * Hkv
    table_stride,
    table_width,
    num_pages,
    num_angles,
    scale,
    eps,
    SPLIT: gl.constexpr,
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    R: gl.constexpr,  # query rows of a program: 8, 16 or 32
    S: gl.constexpr,
    AHEAD: gl.constexpr,  # blocks of keys in flight
    PDL: gl.constexpr,
):
    """As `_decode_kernel` of attend.py, whose arguments these are."""
    HALF: gl.constexpr = D // 2
    BLOCK: gl.constexpr = S * KEYS
    STEPS: gl.constexpr = SPLIT // BLOCK
    FIRST: gl.constexpr = min(AHEAD, STEPS)
    mma: gl.constexpr = operands(S)
    split, splits = gl.program_id(1), gl.num_programs(1)
    rows = num_queries * GROUP  # of one kv head
    tiles = (rows + R - 1) // R
    tile, pair = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    batch, kv_head = (pair // KV_HEADS).to(gl.int64), pair % KV_HEADS
    start = split * SPLIT
    table_ptr += batch * table_stride
    at_batch = position_ptr + batch * num_queries
    if PDL:
        gdc_launch_dependents()

    # up to the wait nothing is read that the product before this kernel writes: see `attend` of attend.py.
    given = fed_positions(at_batch, num_queries, S)
    head_of: gl.constexpr = head_layout(HALF, S)
    row = tile * R + gl.arange(0, R, layout=gl.SliceLayout(1, head_of))
    valid = row < rows
    at = batch * num_queries + row // GROUP
    q_position = gl.load(position_ptr + at, mask=valid, other=0, cache_modifier=".cg")
    tile_row = tile * R + gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))
    # a padding row sees nothing
    position = gl.load(at_batch + tile_row // GROUP, mask=tile_row < rows, other=-1, cache_modifier=".cg")
    position = gl.expand_dims(gl.expand_dims(gl.minimum(position, NEVER).to(gl.int32), 0), 1)
    fresh, oldest, newest = reach(given, tile, num_queries, splits * SPLIT, R, WINDOW, GROUP, S)
    first, last = oldest // SPLIT, newest // SPLIT
    if (split < first) | (split > last):
        return
    stop = gl.minimum(start + SPLIT, newest + 1)

    # what earlier passes stored is on its way now, the rest once this pass has stored it
    places, keys, values = (), (), ()
    for i in gl.static_range(FIRST):
        where = places_of(
            key_ptr, value_ptr, table_ptr, start + i * BLOCK, kv_head, table_width, num_pages,
            KV_HEADS, D, PAGE_SIZE, S,
        )  # fmt: skip
        places += (where,)
        keys += (keys_at(where, 0, gl.minimum(fresh, stop), None, HALF),)
        values += (values_at(where, 0, gl.minimum(fresh, stop), None),)
    if PDL and FIRST < STEPS:
        peek(
            key_ptr, value_ptr, table_ptr, start + FIRST * BLOCK, stop, kv_head, oldest, table_width, num_pages,
            _power_of_two(SPLIT - FIRST * BLOCK), KV_HEADS, D, PAGE_SIZE, S,
        )  # fmt: skip
    turn = angles(q_position, valid, cos_ptr, sin_ptr, num_angles, HALF, head_of)
    new: gl.constexpr = head_of
    slots = slots_of(
        table_ptr, position_ptr, write_ptr, cos_ptr, sin_ptr, batch, kv_head, 0, start, stop, num_queries,
        num_angles, table_width, num_pages, KV_HEADS, D, PAGE_SIZE, new,
    )  # fmt: skip
    if PDL:
        gdc_wait()

    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, head_of))
    head = (at * ((GROUP + 2) * KV_HEADS) + kv_head * GROUP + row % GROUP) * D
    source = qkv_ptr + gl.expand_dims(head, 1) + gl.expand_dims(column, 0)
    q1 = gl.load(source, mask=gl.expand_dims(valid, 1), other=0.0)
    q2 = gl.load(source + HALF, mask=gl.expand_dims(valid, 1), other=0.0)
    append(qkv_ptr, k_norm_ptr, key_ptr, value_ptr, slots, kv_head, eps, KV_HEADS, GROUP, D, new)
    q1, q2 = turned(q1, q2, turn, q_norm_ptr, eps, HALF)
    for first_row in range(NEW_ROWS, num_queries, NEW_ROWS):  # apart: what precedes is free of branches
        slots = slots_of(
            table_ptr, position_ptr, write_ptr, cos_ptr, sin_ptr, batch, kv_head, first_row, start, stop, num_queries,
            num_angles, table_width, num_pages, KV_HEADS, D, PAGE_SIZE, new,
        )  # fmt: skip
        append(qkv_ptr, k_norm_ptr, key_ptr, value_ptr, slots, kv_head, eps, KV_HEADS, GROUP, D, new)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    everywhere = gl.zeros([S, HALF, R], q1.dtype, right)
    flat: gl.constexpr = gl.SliceLayout(0, right)
    q1, _a = gl.broadcast(gl.expand_dims(gl.convert_layout(gl.permute(q1, (1, 0)), flat), 0), everywhere)
    q2, _b = gl.broadcast(gl.expand_dims(gl.convert_layout(gl.permute(q2, (1, 0)), flat), 0), everywhere)
    thread_barrier()  # what other threads stored is read below
    old_keys, old_values, keys, values = keys, values, (), ()
    for i in gl.static_range(FIRST):
        keys += (keys_at(places[i], fresh, stop, old_keys[i], HALF),)
        values += (values_at(places[i], fresh, stop, old_values[i]),)

    top = gl.full([S, R], -float("inf"), gl.float32, gl.SliceLayout(1, mma))
    totals = gl.zeros([S, KEYS, R], gl.float32, mma)
    out = gl.zeros([S, D, R], gl.float32, mma)
    for i in gl.static_range(STEPS):
        if i + AHEAD < STEPS:
            where = places_of(
                key_ptr, value_ptr, table_ptr, start + (i + AHEAD) * BLOCK, kv_head, table_width, num_pages,
                KV_HEADS, D, PAGE_SIZE, S,
            )  # fmt: skip
            keys += (keys_at(where, 0, stop, None, HALF),)
        scores = scored(keys[0], q1, q2, start + i * BLOCK, position, scale, WINDOW, S)
        keys = keys[1:]
        if i + AHEAD < STEPS:  # not sooner: the keys of this block have left their registers
            values += (values_at(where, 0, stop, None),)
        top, totals, out = advanced(top, totals, out, scores, values[0], S)
        values = values[1:]
    mean, weight = together(top, gl.sum(totals, axis=1), out)

    row = tile * R + gl.arange(0, R, layout=gl.SliceLayout(1, mean.type.layout))
    if first == last:
        finish(out_ptr, batch, kv_head, row, num_queries, mean, KV_HEADS, GROUP)
        return
    groups = (splits + FAN - 1) // FAN
    nodes, base = num_pairs * (splits + groups) * rows, pair * (splits + groups) * rows
    mean_ptr, weight_ptr = partial_ptr + base.to(gl.int64) * D, partial_ptr + (nodes.to(gl.int64) * D + base)
    count_ptr += gl.program_id(0) * (1 + groups)
    keep(mean_ptr, weight_ptr, split * rows + row, row < rows, mean, weight)
    group = split // FAN
    begin, end = gl.maximum(first, group * FAN), gl.minimum(last, group * FAN + FAN - 1)
    thread_barrier()  # the counter is raised by one thread, for all
    if gl.atomic_add(count_ptr + 1 + group, 1, sem="acq_rel") != end - begin:
        return
    gl.store(count_ptr + 1 + group, 0)
    thread_barrier()
    only = first // FAN == last // FAN
    row_start, row_stop = tile * R, gl.minimum(rows, tile * R + R)
    combine(
        mean_ptr, weight_ptr, 0, begin, end, splits + group, only, out_ptr, batch, kv_head,
        row_start, row_stop, rows, num_queries, KV_HEADS, GROUP, D, S,
    )  # fmt: skip
    if only:
        return
    thread_barrier()
    if gl.atomic_add(count_ptr, 1, sem="acq_rel") != last // FAN - first // FAN:
        return
    gl.store(count_ptr, 0)
    thread_barrier()
    combine(
        mean_ptr, weight_ptr, splits, first // FAN, last // FAN, 0, True, out_ptr, batch, kv_head,
        row_start, row_stop, rows, num_queries, KV_HEADS, GROUP, D, S,
    )  # fmt: skip
