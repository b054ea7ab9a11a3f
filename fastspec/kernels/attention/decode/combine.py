"""Combines the partial results of splits: in the CTA that finishes last, or in a launch of its own.

A split is a range of a row's keys (plan.py). A tile is a block of query rows. A query row is a pair of token and query
head of one KV head.

| function         | called by                                              | combines partial results of            |
|------------------|--------------------------------------------------------|----------------------------------------|
| `join`           | a CTA of mma_batch.py that has all splits of a tile    | splits of a tile, in shared memory     |
| `combine_splits` | the CTA of mma.py or mma_batch.py that finishes last   | splits of a tile, in global memory     |
| `gather_kernel`  | the host, after `shares_kernel` of tma_sm90.py         | splits of a query row, in global memory |

The partial result of a split is (mean, weight). mean is the attention output over the split's keys: the weighted
average of their values. weight is their log-sum-exp in base 2: log2 of the sum of 2^score.

    weight = log2(2^weight_1 + 2^weight_2 + ...),   mean = (2^weight_1 mean_1 + 2^weight_2 mean_2 + ...) / 2^weight
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)
# tuples of blocks grow in unrolled loops, and blocks change their layout under one name

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attention.decode.kv_loads import split_of, start_of
from fastspec.kernels.attention.decode.mma_tiles import (
    EIGHT,
    _along,
    averaged,
    merged_layout,
    share_of_keys,
    shift_of,
    softmax_memory_layout,
    store_output,
)
from fastspec.kernels.attention.decode.query_rows import kv_range, new_positions
from fastspec.kernels.common.gluon_compat import thread_barrier

# --- within mma.py and mma_batch.py ---


# number of partial results that are loaded together: for rows with few splits, and for others
MIN_SUMS_IN_FLIGHT = gl.constexpr(4)
MAX_SUMS_IN_FLIGHT = gl.constexpr(8)


@gluon.jit
def joined(top, total, out, weight, mean):
    """Adds the partial result (mean [R, D], weight [R]) of one more split to the state of an online softmax.

    The state is (top [R], total [R], out [R, D]): the largest weight, the sum of 2^(weight - top), and the sum of
    mean * 2^(weight - top). A split without keys for a row has weight = -inf and does not change the row's bits.
    """
    new_top = gl.maximum(top, weight)
    fade, share = gl.exp2(top - shift_of(new_top)), gl.exp2(weight - shift_of(new_top))
    out = out * gl.expand_dims(fade, 1) + mean * gl.expand_dims(share, 1)
    return new_top, total * fade + share, out


@gluon.constexpr_function
def _row_layout(D, WARPS):
    """Returns the register layout of query rows [R, D]: 128 / D rows in a warp, 4 neighbouring values in a lane."""
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
    """Combines the stored partial results of splits first .. last of a query tile, and writes the attention output.

    The order of the splits is ascending. A tile has G groups of 8 query rows. AT_ONCE partial results of each row are
    loaded before the first is used. Loads bypass L1, because it may hold old contents of this memory.
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
    """Allocates the state (top, total, out) of `joined` for R query rows in shared memory.

    The state is that of no splits; `join` adds splits. For REGROUP see `merge_parts`.
    """
    layout: gl.constexpr = merged_layout(gl.num_warps(), R, D, REGROUP)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    top = gl.allocate_shared_memory(gl.float32, [R], flat, gl.full([R], -float("inf"), gl.float32, row))
    total = gl.allocate_shared_memory(gl.float32, [R], flat, gl.zeros([R], gl.float32, row))
    out = gl.zeros([R, D], gl.float32, layout)
    return top, total, gl.allocate_shared_memory(gl.float32, [R, D], softmax_memory_layout(R, D, REGROUP), out)


@gluon.jit
def join(memory, splits):
    """Adds the partial results of splits to the state of an online softmax in shared memory.

    `memory` is the result of `softmax_memory`, `splits` the result of `merge_parts`. Returns (mean [R, D], weight [R])
    of all splits added until now.
    """
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
    count_ptr,  # counter of the tile
    first,
    last,
    mine,  # number of splits that this CTA has stored
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
    """Combines the stored partial results of splits first .. last of a query tile, and writes the attention output.

    All CTAs of the tile call it after they have stored their partial results. Only the CTA that finishes last combines.
    The counter at `count_ptr` tells which CTA this is.
    """
    thread_barrier()  # threads read the stores of other threads below, and one thread increments the counter for all
    if gl.atomic_add(count_ptr, mine, sem="acq_rel") + mine <= last - first:
        return
    gl.store(count_ptr, 0)
    thread_barrier()
    sums = (mean_ptr, weight_ptr, first, last, out_ptr, batch, kv_head, tile, rows, num_queries, scoring)
    # more rows with so many sums do not fit into registers; with few splits the longer code costs more than it saves
    if G <= 2 and last - first >= MIN_SUMS_IN_FLIGHT:
        _combine(*sums, KV_HEADS, GROUP, D, G, WARPS, MAX_SUMS_IN_FLIGHT)
    else:
        _combine(*sums, KV_HEADS, GROUP, D, G, WARPS, MIN_SUMS_IN_FLIGHT)


# --- after tma_sm90.py ---


GATHER_WARPS = gl.constexpr(4)
# number of neighbouring splits that a warp loads at a time; the bits of a row depend on this and on GATHER_WARPS
SPLITS_PER_WARP = gl.constexpr(8)


@gluon.jit
def _left(
    mean_ptr, weight_ptr, begin, first, last, row, rows, D: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Loads the partial results of a query row for WARPS * SPLITS_PER_WARP splits, starting at split `begin`.

    Splits outside first .. last get weight -inf and mean 0.

    Returns:
        mean [WARPS, SPLITS_PER_WARP, D] and weight [WARPS, SPLITS_PER_WARP, 1].
    """
    number = begin + _along(WARPS, 0, layout) * SPLITS_PER_WARP + _along(SPLITS_PER_WARP, 1, layout)
    there = (number >= first) & (number <= last)
    at = number * rows + row
    # bypasses L1, because it may hold old contents of this memory
    weights = gl.load(weight_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg")
    places = mean_ptr + (at * D + _along(D, 2, layout))
    return gl.load(places, mask=there, other=0.0, cache_modifier=".cg"), weights


@gluon.jit
def _taken(top, total, out, means, weights):
    """Adds partial results of splits to the online softmax of each warp, and returns its new state.

    `means` and `weights` are results of `_left`. For the state (top, total, out) see `joined`.
    """
    new_top = gl.maximum(top, gl.max(weights, axis=1))
    shift = shift_of(new_top)
    weights = gl.exp2(weights - gl.expand_dims(shift, 1))
    fade = gl.exp2(top - shift)
    return new_top, total * fade + gl.sum(weights, axis=1), out * fade + gl.sum(means * weights, axis=1)


@gluon.jit
def _average(top, total, out):
    """Combines the online softmaxes of all warps in order. Returns mean [D] and weight [1] of all their splits.

    For the state (top, total, out) of a softmax see `joined`.
    """
    WARPS: gl.constexpr = out.shape[0]
    all_top = gl.max(top, axis=0)
    fade = gl.exp2(top - gl.expand_dims(shift_of(all_top), 0))
    # in this layout a thread has the sums of all warps for a column
    columns: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    out = gl.sum(gl.convert_layout(out * fade, columns), axis=0)
    total = gl.sum(gl.convert_layout(total * fade, columns), axis=0)
    return out / gl.where(total == 0.0, 1.0, total), gl.convert_layout(all_top, total.type.layout) + gl.log2(total)


@gluon.jit(do_not_specialize=["num_queries", "num_pairs", "splits"])
def gather_kernel(
    position_ptr,
    out_ptr,
    partial_ptr,
    num_queries,
    num_pairs,  # B * Hkv
    splits,
    scoring,  # Scoring
    SPLIT_SIZES: gl.constexpr,
    LATE_FROM: gl.constexpr,  # rows at positions below this are skipped
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,  # query rows of a tile of shares_kernel
    PDL: gl.constexpr,
):
    """Combines the partial results of a query row at a position >= LATE_FROM, and writes its attention output.

    CTA i has query row i of B * Hkv * Q * GROUP. Its warps take turns:

        split    0 .. 7   8 .. 15   16 .. 23   24 .. 31   32 .. 39   ...     with WARPS = 4, SPLITS_PER_WARP = 8
        warp     0        1         2          3          0          ...

    Split 0 begins at position 0. A split without keys for a row does not change the row's bits. The kernel mostly waits
    for memory. So a warp loads its next partial results before it adds the previous ones. Only one warp loads each
    partial result. For partial_ptr see `WorkArea.partials`.
    """
    WARPS: gl.constexpr = GATHER_WARPS
    AT_ONCE: gl.constexpr = WARPS * SPLITS_PER_WARP
    layout: gl.constexpr = gl.BlockedLayout([1, SPLITS_PER_WARP, D // 32], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    rows = num_queries * GROUP  # of one kv head
    row, pair = gl.program_id(0) % rows, gl.program_id(0) // rows
    batch, kv_head = (pair // KV_HEADS).to(gl.int64), pair % KV_HEADS
    if PDL:
        gdc_launch_dependents()
    new = new_positions(position_ptr + batch * num_queries, num_queries, WARPS)
    limit = start_of(splits, SPLIT_SIZES)
    _f, oldest, newest = kv_range(new, row // TILE, LATE_FROM, limit, TILE, WINDOW, GROUP, WARPS)
    first, last = split_of(oldest, SPLIT_SIZES), split_of(newest, SPLIT_SIZES)
    # a row with one split already has its output, and rows below LATE_FROM belong to another kernel. The first CTA
    # waits in any case: the next kernel waits only for this one, so this one must not end before shares_kernel
    at = gl.load(position_ptr + batch * num_queries + row // GROUP, cache_modifier=".cg")
    nothing = (at < LATE_FROM) | (newest < 0) | (first == last)
    if nothing & (gl.program_id(0) > 0):
        return
    if PDL:
        gdc_wait()
    if nothing:
        return
    nodes, base = num_pairs * splits * rows, pair * splits * rows
    mean_ptr, weight_ptr = partial_ptr + base.to(gl.int64) * D, partial_ptr + (nodes.to(gl.int64) * D + base)
    sums: gl.constexpr = gl.SliceLayout(1, layout)
    top = gl.full([WARPS, 1], -float("inf"), gl.float32, sums)
    total = gl.zeros([WARPS, 1], gl.float32, sums)
    out = gl.zeros([WARPS, D], gl.float32, sums)
    begin = first // AT_ONCE * AT_ONCE
    means, weights = _left(mean_ptr, weight_ptr, begin, first, last, row, rows, D, WARPS, layout)
    for following in range(begin + AT_ONCE, last + 1, AT_ONCE):
        more, more_weights = _left(mean_ptr, weight_ptr, following, first, last, row, rows, D, WARPS, layout)
        top, total, out = _taken(top, total, out, means, weights)
        means, weights = more, more_weights
    mean, weight = _average(*_taken(top, total, out, means, weights))
    if scoring.sinks is not None:
        mean = mean * share_of_keys(weight, kv_head * GROUP + row % GROUP, scoring)
    if scoring.value_scale is not None:
        mean = mean * scoring.value_scale
    head = (batch * num_queries + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    place = gl.arange(0, D, layout=mean.type.layout)
    gl.store(out_ptr + head * D + place, mean.to(out_ptr.dtype.element_ty))
