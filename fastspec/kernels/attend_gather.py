"""The second launch of a decoding pass over a long cache: adds up what splits left."""

# mypy: disable-error-code="assignment, misc"
# blocks change their layout under one name

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.attend_fragment_parts import FAN
from fastspec.kernels.attend_fragment_rows import fed_positions, reach
from fastspec.kernels.attend_stream_parts import split_of, start_of

GATHER_WARPS = gl.constexpr(1)  # so that nothing is handed over between them


@gluon.jit
def _left(mean_ptr, weight_ptr, begin, first, last, row, rows, D: gl.constexpr, layout: gl.constexpr):
    """(averages [FAN, D], their weights as log2 [FAN, 1]) that the FAN splits from `begin` on left of a row."""
    number = begin + gl.expand_dims(gl.arange(0, FAN, layout=gl.SliceLayout(1, layout)), 1)
    there = (number >= first) & (number <= last)
    at = number * rows + row
    d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, layout)), 0)
    # past L1, where an older content of the same memory may lie
    weights = gl.load(weight_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg")
    return gl.load(mean_ptr + (at * D + d), mask=there, other=0.0, cache_modifier=".cg"), weights


@gluon.jit(do_not_specialize=["num_queries", "num_pairs", "splits"])
def gather_kernel(
    position_ptr,
    out_ptr,
    partial_ptr,
    num_queries,
    num_pairs,  # B * Hkv
    splits,
    RUNGS: gl.constexpr,
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,  # query rows of a program that left partial sums
    PDL: gl.constexpr,
):
    """Program i of B * Hkv * Q * GROUP adds up the splits that the tile of row i looked into, in ascending order.

    FAN at a time, which begin at multiples of FAN: a split that a row did not look into changes no bit of it.

    partial_ptr: fp32 [B * Hkv, splits, Q * GROUP, D], averages of values; then [B * Hkv, splits, Q * GROUP], log2 of
    the sums of their weights.
    """
    layout: gl.constexpr = gl.BlockedLayout([FAN, D // 32], [1, 32], [1, GATHER_WARPS], [1, 0])
    rows = num_queries * GROUP  # of one kv head
    row, pair = gl.program_id(0) % rows, gl.program_id(0) // rows
    batch, kv_head = (pair // KV_HEADS).to(gl.int64), pair % KV_HEADS
    if PDL:
        gdc_launch_dependents()
    given = fed_positions(position_ptr + batch * num_queries, num_queries, GATHER_WARPS)
    limit = start_of(splits, RUNGS)
    _f, oldest, newest = reach(given, row // TILE, num_queries, limit, TILE, WINDOW, GROUP, GATHER_WARPS)
    first, last = split_of(oldest, RUNGS), split_of(newest, RUNGS)
    # of one split the output is there already. The first program waits all the same: what is launched next waits for
    # this kernel alone, which must not end before the other one
    if (first == last) & (gl.program_id(0) > 0):
        return
    if PDL:
        gdc_wait()
    if first == last:
        return
    nodes, base = num_pairs * splits * rows, pair * splits * rows
    mean_ptr, weight_ptr = partial_ptr + base.to(gl.int64) * D, partial_ptr + (nodes.to(gl.int64) * D + base)
    top = -float("inf")
    total = 0.0
    out = gl.zeros([D], gl.float32, gl.SliceLayout(0, layout))
    begin = first // FAN * FAN
    means, weights = _left(mean_ptr, weight_ptr, begin, first, last, row, rows, D, layout)
    for following in range(begin + FAN, last + 1 + FAN, FAN):
        next_means, next_weights = _left(mean_ptr, weight_ptr, following, first, last, row, rows, D, layout)
        new_top = gl.maximum(top, gl.max(weights, axis=None))
        shift = gl.where(new_top == -float("inf"), 0.0, new_top)
        weights = gl.exp2(weights - shift)
        fade = gl.exp2(top - shift)
        total = total * fade + gl.sum(weights, axis=None)
        out = out * fade + gl.sum(means * weights, axis=0)
        top, means, weights = new_top, next_means, next_weights
    mean = out / gl.where(total == 0.0, 1.0, total)
    head = (batch * num_queries + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    place = gl.arange(0, D, layout=mean.type.layout)
    gl.store(out_ptr + head * D + place, mean.to(out_ptr.dtype.element_ty))
