"""Pieces of the kernels of attend_short.py: what the splits of a tile left is added up once all are there."""

# mypy: disable-error-code="assignment"
# tuples of blocks grow in unrolled loops

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.attend_fragment_parts import EIGHT, FAN, FEW, _along, _averaged, finish, keep, shift_of
from fastspec.kernels.gluon_names import thread_barrier


@gluon.jit
def _merged(mean_ptr, weight_ptr, first, last, rows, row, valid, layout: gl.constexpr, D: gl.constexpr):
    """Numbers `first` .. `last` of what `keep` stored of rows [M], together in ascending order.

    Read past L1, where an older content of the same memory may lie. A lane has all FAN of a sum.
    """
    M: gl.constexpr = row.shape[0]
    of_parts: gl.constexpr = gl.SliceLayout(2, layout)
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, layout))
    part = gl.arange(0, FAN, layout=gl.SliceLayout(0, of_parts))
    d = _along(D, 2, layout)
    top = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, of_parts))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, of_parts))
    out = gl.zeros([M, D], gl.float32, gl.SliceLayout(1, layout))
    for begin in range(first // FAN * FAN, last + 1, FAN):
        number = gl.expand_dims(begin + part, 0)
        there = gl.expand_dims(valid, 1) & (number >= first) & (number <= last)
        at = number * rows + gl.expand_dims(row, 1)
        weights = gl.load(weight_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        mask = gl.expand_dims(there, 2)
        means = gl.load(mean_ptr + (gl.expand_dims(at, 2) * D + d), mask=mask, other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, gl.max(weights, axis=1))
        shift = shift_of(new_top)
        weights = gl.exp2(weights - gl.expand_dims(shift, 1))
        fade = gl.exp2(top - shift)
        total = total * fade + gl.sum(weights, axis=1)
        fade = gl.expand_dims(gl.convert_layout(fade, of_rows), 1)
        out = out * fade + gl.sum(means * gl.expand_dims(weights, 2), axis=1)
        top = new_top
    return _averaged(out, gl.convert_layout(top, of_rows), gl.convert_layout(total, of_rows))


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
    lanes: gl.constexpr = [1, 1, 32] if D == 128 else [2, 1, 16]
    layout: gl.constexpr = gl.BlockedLayout([1, FAN, 4], lanes, [WARPS, 1, 1], [2, 1, 0])
    M: gl.constexpr = WARPS * lanes[0]
    source_mean, source_weight = mean_ptr + source * rows * D, weight_ptr + source * rows
    for first_row in range(row_start, row_stop, M):
        row = first_row + gl.arange(0, M, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        mean, weight = _merged(source_mean, source_weight, begin, end, rows, row, row < row_stop, layout, D)
        row = first_row + gl.arange(0, M, layout=gl.SliceLayout(1, gl.SliceLayout(1, layout)))
        if final:
            finish(out_ptr, batch, kv_head, row, row_stop, num_queries, mean, KV_HEADS, GROUP)
        else:
            keep(mean_ptr, weight_ptr, target * rows + row, row < row_stop, mean, weight)


@gluon.jit
def _merged_few(mean_ptr, weight_ptr, group_start, first, last, rows, row, layout: gl.constexpr, D: gl.constexpr):
    """What `_merged` returns where all there is lies among the first FEW of a group: the same sums, but for zeros."""
    of_parts: gl.constexpr = gl.SliceLayout(2, layout)
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, layout))
    part = gl.arange(0, FEW, layout=gl.SliceLayout(0, of_parts))
    number = gl.expand_dims(group_start + part, 0)
    there = gl.expand_dims(row < rows, 1) & (number >= first) & (number <= last)
    at = number * rows + gl.expand_dims(row, 1)
    weights = gl.load(weight_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg")
    at = gl.expand_dims(at, 2) * D + _along(D, 2, layout)
    means = gl.load(mean_ptr + at, mask=gl.expand_dims(there, 2), other=0.0, cache_modifier=".cg")
    top = gl.max(weights, axis=1)
    shift = shift_of(top)
    weights = gl.exp2(weights - gl.expand_dims(shift, 1))
    total = gl.sum(weights, axis=1)
    out = gl.sum(means * gl.expand_dims(weights, 2), axis=1)
    return _averaged(out, gl.convert_layout(top, of_rows), gl.convert_layout(total, of_rows))


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
):
    """The output of a tile of G groups of rows, as `combine`, out of splits first .. last that `_merged_few` takes."""
    lanes: gl.constexpr = [1, 1, 32] if D == 128 else [2, 1, 16]
    layout: gl.constexpr = gl.BlockedLayout([1, FEW, 4], lanes, [WARPS, 1, 1], [2, 1, 0])
    means = ()
    for g in gl.static_range(G):  # all that is read is on its way before the first is there
        row = (tile * G + g) * EIGHT + gl.arange(0, EIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        mean, _w = _merged_few(mean_ptr, weight_ptr, first // FAN * FAN, first, last, rows, row, layout, D)
        means += (mean,)
    for g in gl.static_range(G):
        row = (tile * G + g) * EIGHT + gl.arange(0, EIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(1, layout)))
        finish(out_ptr, batch, kv_head, row, rows, num_queries, means[g], KV_HEADS, GROUP)


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
    if only & (end - group * FAN < FEW):
        _combine_few(
            mean_ptr, weight_ptr, begin, end, out_ptr, batch, kv_head, tile, rows, num_queries, KV_HEADS, GROUP, D, G,
            WARPS,
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
