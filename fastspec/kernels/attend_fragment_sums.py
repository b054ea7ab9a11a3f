"""Pieces of the kernels of attend_short.py: what the splits of a tile left is added up once all are there."""

# mypy: disable-error-code="assignment"
# tuples of blocks grow in unrolled loops

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.attend_fragment_layouts import met, room_place
from fastspec.kernels.attend_fragment_parts import EIGHT, FAN, FEW, SOME, averaged, finish, keep, shift_of
from fastspec.kernels.gluon_names import thread_barrier


@gluon.jit
def joined(top, total, out, weight, mean):
    """An average so far, out [R, D] / total [R], with that of another split, as `keep` has it; [R] as log2.

    Of a split that a row sees nothing of, weight = -inf, nothing is joined, to the bit.
    """
    new_top = gl.maximum(top, weight)
    fade, share = gl.exp2(top - shift_of(new_top)), gl.exp2(weight - shift_of(new_top))
    out = out * gl.expand_dims(fade, 1) + mean * gl.expand_dims(share, 1)
    return new_top, total * fade + share, out


@gluon.jit
def _merged(
    mean_ptr, weight_ptr, first, last, rows, row, valid, AT_ONCE: gl.constexpr, D: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Numbers `first` .. `last` of what `keep` stored of rows [M], joined in ascending order; AT_ONCE on their way.

    Read past L1, where an older content of the same memory may lie.
    """
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, layout)), 0)
    top = gl.full([row.shape[0]], -float("inf"), gl.float32, of_rows)
    total = gl.zeros([row.shape[0]], gl.float32, of_rows)
    out = gl.zeros([row.shape[0], D], gl.float32, layout)
    for begin in range(first // AT_ONCE * AT_ONCE, last + 1, AT_ONCE):
        weights, means = (), ()
        for i in gl.static_range(AT_ONCE):
            there = valid & (begin + i >= first) & (begin + i <= last)
            at = (begin + i) * rows + row
            weights += (gl.load(weight_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg"),)
            at, there = gl.expand_dims(at, 1) * D + d, gl.expand_dims(there, 1)
            means += (gl.load(mean_ptr + at, mask=there, other=0.0, cache_modifier=".cg"),)
        for i in gl.static_range(AT_ONCE):
            if (begin + i >= first) & (begin + i <= last):
                top, total, out = joined(top, total, out, weights[i], means[i])
    return averaged(out, top, total)


@gluon.constexpr_function
def _row_layout(D, WARPS):
    """Rows [128 / D for each warp, D]: four values of a head to a lane."""
    return gl.BlockedLayout([1, 4], [128 // D, D // 4], [WARPS, 1], [1, 0])


@gluon.jit
def combine(
    mean_ptr,
    weight_ptr,
    source,
    begin,
    end,
    target,
    final,
    out_ptr,
    batch,
    kv_head,
    row_start,
    row_stop,
    rows,
    num_queries,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Numbers source + begin .. source + end of rows row_start.. together: the output if `final`, else `target`."""
    layout: gl.constexpr = _row_layout(D, WARPS)
    M: gl.constexpr = WARPS * (128 // D)
    source_mean, source_weight = mean_ptr + source * rows * D, weight_ptr + source * rows
    for first_row in range(row_start, row_stop, M):
        row = first_row + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
        mean, weight = _merged(source_mean, source_weight, begin, end, rows, row, row < row_stop, FAN, D, layout)
        if final:
            finish(out_ptr, batch, kv_head, row, row_stop, num_queries, mean, KV_HEADS, GROUP)
        else:
            keep(mean_ptr, weight_ptr, target * rows + row, row < row_stop, mean, weight)


@gluon.jit
def _combine_few(
    mean_ptr,
    weight_ptr,
    first,
    last,
    out_ptr,
    batch,
    kv_head,
    tile,
    rows,
    num_queries,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    G: gl.constexpr,
    WARPS: gl.constexpr,
    MOST: gl.constexpr,
):
    """The output of a tile of G groups of rows, as `combine`, of splits that are among the first MOST of a group."""
    layout: gl.constexpr = _row_layout(D, WARPS)
    means = ()
    for g in gl.static_range(G):  # all that is read is on its way before the first is there
        row = (tile * G + g) * EIGHT + gl.arange(0, EIGHT, layout=gl.SliceLayout(1, layout))
        mean, _w = _merged(mean_ptr, weight_ptr, first, last, rows, row, row < rows, MOST, D, layout)
        means += (mean,)
    for g in gl.static_range(G):
        row = (tile * G + g) * EIGHT + gl.arange(0, EIGHT, layout=gl.SliceLayout(1, layout))
        finish(out_ptr, batch, kv_head, row, rows, num_queries, means[g], KV_HEADS, GROUP)


@gluon.jit
def room_for(R: gl.constexpr, D: gl.constexpr, REGROUP: gl.constexpr):
    """Shared memory for what `joined` returns of rows, with nothing joined yet."""
    layout: gl.constexpr = met(gl.num_warps(), R, D, REGROUP)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    few: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    top = gl.allocate_shared_memory(gl.float32, [R], few, gl.full([R], -float("inf"), gl.float32, row))
    total = gl.allocate_shared_memory(gl.float32, [R], few, gl.zeros([R], gl.float32, row))
    out = gl.zeros([R, D], gl.float32, layout)
    return top, total, gl.allocate_shared_memory(gl.float32, [R, D], room_place(R, D, REGROUP), out)


@gluon.jit
def join(room, weight, mean):
    """Joins another split to what is in a room; returns the average [R, D] of all of them."""
    row: gl.constexpr = gl.SliceLayout(1, mean.type.layout)
    top, total, out = room[0].load(row), room[1].load(row), room[2].load(mean.type.layout)
    top, total, out = joined(top, total, out, weight, mean)
    room[0].store(top)
    room[1].store(total)
    room[2].store(out)
    average, _weight = averaged(out, top, total)
    return average


@gluon.jit
def settle(
    mean_ptr,
    weight_ptr,
    count_ptr,  # of the tile
    first,
    last,
    mine_first,
    mine_last,
    splits,
    out_ptr,
    batch,
    kv_head,
    tile,
    rows,
    num_queries,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    G: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Adds up splits first .. last of a tile once all are kept: the program that keeps the last of them does.

    This one has kept mine_first .. mine_last, of one group.
    """
    group = mine_first // FAN
    begin, end = gl.maximum(first, group * FAN), gl.minimum(last, group * FAN + FAN - 1)
    thread_barrier()  # what other threads kept is read below; and the counter is raised by one thread, for all
    mine = mine_last - mine_first + 1
    if mine <= end - begin:  # else there is nothing to wait for
        if gl.atomic_add(count_ptr + 1 + group, mine, sem="acq_rel") + mine <= end - begin:
            return
        gl.store(count_ptr + 1 + group, 0)
        thread_barrier()
    only = first // FAN == last // FAN
    FITTING: gl.constexpr = SOME if G <= 2 else FEW  # of more rows, so many do not fit into registers
    if only & (end - group * FAN < FITTING):
        if end - group * FAN < FEW:  # apart: what few leave would wait for more instructions
            _combine_few(
                mean_ptr, weight_ptr, begin, end, out_ptr, batch, kv_head, tile, rows, num_queries, KV_HEADS, GROUP, D,
                G, WARPS, FEW,
            )  # fmt: skip
        elif G <= 2:
            _combine_few(
                mean_ptr, weight_ptr, begin, end, out_ptr, batch, kv_head, tile, rows, num_queries, KV_HEADS, GROUP, D,
                G, WARPS, SOME,
            )  # fmt: skip
        return
    TILE: gl.constexpr = G * EIGHT
    row_start, row_stop = tile * TILE, gl.minimum(rows, tile * TILE + TILE)
    combine(
        mean_ptr, weight_ptr, 0, begin, end, splits + group, only, out_ptr, batch, kv_head,
        row_start, row_stop, rows, num_queries, KV_HEADS, GROUP, D, WARPS,
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
        row_start, row_stop, rows, num_queries, KV_HEADS, GROUP, D, WARPS,
    )  # fmt: skip
