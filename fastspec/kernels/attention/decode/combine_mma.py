"""Pieces of mma.py and mma_batch.py: combining the partial sums of a tile's splits."""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)
# tuples of blocks grow in unrolled loops

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.attention.decode.mma_layouts import merged_layout, softmax_memory_layout
from fastspec.kernels.attention.decode.mma_tiles import EIGHT, averaged, shift_of, store_output
from fastspec.kernels.common.gluon_compat import thread_barrier

# partial sums that are loaded at a time: of rows with few splits, and of others
MIN_SUMS_IN_FLIGHT = gl.constexpr(4)
MAX_SUMS_IN_FLIGHT = gl.constexpr(8)


@gluon.jit
def joined(top, total, out, weight, mean):
    """An average so far, out [R, D] / total [R], with that of another split, as `store_partial` has it; [R] as log2.

    Of a split that a row sees nothing of, weight = -inf, nothing is joined, to the bit.
    """
    new_top = gl.maximum(top, weight)
    fade, share = gl.exp2(top - shift_of(new_top)), gl.exp2(weight - shift_of(new_top))
    out = out * gl.expand_dims(fade, 1) + mean * gl.expand_dims(share, 1)
    return new_top, total * fade + share, out


@gluon.constexpr_function
def _row_layout(D, WARPS):
    """Rows [128 / D for each warp, D]: four values of a head to a lane."""
    return gl.BlockedLayout([1, 4], [128 // D, D // 4], [WARPS, 1], [1, 0])


@gluon.jit
def _combine(
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
    scoring,  # Scoring
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    G: gl.constexpr,
    WARPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """The output of a tile of G groups of rows: splits first .. last, joined in ascending order.

    AT_ONCE sums of each row are loaded before the first is used. Loads bypass L1, which may hold older contents of
    the same memory.
    """
    layout: gl.constexpr = _row_layout(D, WARPS)
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, layout)), 0)
    row = tile * (G * EIGHT) + gl.arange(0, EIGHT, layout=of_rows)
    tops, totals, outs = (), (), ()
    for _g in gl.static_range(G):
        tops += (gl.full([EIGHT], -float("inf"), gl.float32, of_rows),)
        totals += (gl.zeros([EIGHT], gl.float32, of_rows),)
        outs += (gl.zeros([EIGHT, D], gl.float32, layout),)
    for begin in range(first, last + 1, AT_ONCE):
        weights, means = (), ()
        for g in gl.static_range(G):
            for i in gl.static_range(AT_ONCE):
                there = (row + g * EIGHT < rows) & (begin + i <= last)
                at = (begin + i) * rows + row + g * EIGHT
                weights += (gl.load(weight_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg"),)
                at, there = gl.expand_dims(at, 1) * D + d, gl.expand_dims(there, 1)
                means += (gl.load(mean_ptr + at, mask=there, other=0.0, cache_modifier=".cg"),)
        for i in gl.static_range(AT_ONCE):
            if begin + i <= last:
                new_tops, new_totals, new_outs = (), (), ()
                for g in gl.static_range(G):
                    mean, weight = means[g * AT_ONCE + i], weights[g * AT_ONCE + i]
                    top, total, out = joined(tops[g], totals[g], outs[g], weight, mean)
                    new_tops, new_totals, new_outs = new_tops + (top,), new_totals + (total,), new_outs + (out,)
                tops, totals, outs = new_tops, new_totals, new_outs
    for g in gl.static_range(G):
        mean, weight = averaged(outs[g], tops[g], totals[g])
        store_output(
            out_ptr, batch, kv_head, row + g * EIGHT, rows, num_queries, mean, weight, scoring, KV_HEADS, GROUP
        )


@gluon.jit
def softmax_memory(R: gl.constexpr, D: gl.constexpr, REGROUP: gl.constexpr):
    """Shared memory for the state of an online softmax of R rows, as `joined` returns it; of no split yet."""
    layout: gl.constexpr = merged_layout(gl.num_warps(), R, D, REGROUP)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    top = gl.allocate_shared_memory(gl.float32, [R], flat, gl.full([R], -float("inf"), gl.float32, row))
    total = gl.allocate_shared_memory(gl.float32, [R], flat, gl.zeros([R], gl.float32, row))
    out = gl.zeros([R, D], gl.float32, layout)
    return top, total, gl.allocate_shared_memory(gl.float32, [R, D], softmax_memory_layout(R, D, REGROUP), out)


@gluon.jit
def join(memory, splits):
    """Joins splits, as `merge_parts` returns them, to a `softmax_memory`; (average [R, D], weight [R]) of all."""
    layout: gl.constexpr = splits[0][0].type.layout
    row: gl.constexpr = gl.SliceLayout(1, layout)
    top, total, out = memory[0].load(row), memory[1].load(row), memory[2].load(layout)
    for i in gl.static_range(len(splits)):
        top, total, out = joined(top, total, out, splits[i][1], splits[i][0])
    memory[0].store(top)
    memory[1].store(total)
    memory[2].store(out)
    return averaged(out, top, total)


@gluon.jit
def combine_splits(
    mean_ptr,
    weight_ptr,
    count_ptr,  # of the tile
    first,
    last,
    mine,  # how many of them this CTA has stored
    out_ptr,
    batch,
    kv_head,
    tile,
    rows,
    num_queries,
    scoring,  # Scoring
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    G: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Combines splits first .. last of a tile: the CTA that stores the last of them does, found by a counter."""
    thread_barrier()  # other threads' stores are read below; and one thread raises the counter for all
    if gl.atomic_add(count_ptr, mine, sem="acq_rel") + mine <= last - first:
        return
    gl.store(count_ptr, 0)
    thread_barrier()
    sums = (mean_ptr, weight_ptr, first, last, out_ptr, batch, kv_head, tile, rows, num_queries, scoring)
    # for more rows, so many sums do not fit into registers; with few splits, the longer code costs more than it saves
    if G <= 2 and last - first >= MIN_SUMS_IN_FLIGHT:
        _combine(*sums, KV_HEADS, GROUP, D, G, WARPS, MAX_SUMS_IN_FLIGHT)
    else:
        _combine(*sums, KV_HEADS, GROUP, D, G, WARPS, MIN_SUMS_IN_FLIGHT)
