"""Pieces of the decoding kernel of attend.py: the peek, the loop over keys, and the partial sums."""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.paged_attention import pages_of, slots_of
from fastspec.kernels.rope import columns

FAN = tl.constexpr(16)  # partial sums that one program adds up
PEEK_KEYS = tl.constexpr(256)  # keys prefetched into L2 before the wait


@triton.jit
def _prefetch(pointers, wanted):
    """Asks for the 128-byte lines at `pointers` to be brought into L2 where `wanted`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def peek(
    key_ptr,
    value_ptr,
    table_ptr,
    position_ptr,
    batch,
    kv_head,
    start,
    num_queries,
    split_keys,
    table_stride,
    table_width,
    num_pages,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Prefetches the first PEEK_KEYS keys and values of this program, by what positions and table say now."""
    newest = tl.load(position_ptr + (batch + 1) * num_queries - 1, cache_modifier=".cg")
    at = start + tl.arange(0, PEEK_KEYS)
    wanted = (at <= newest) & (at < start + split_keys)
    if WINDOW > 0:
        wanted = wanted & (at > newest - num_queries - WINDOW)
    entry = tl.minimum(at // PAGE_SIZE, table_width - 1)
    page = tl.load(table_ptr + batch * table_stride + entry, mask=wanted, other=0, cache_modifier=".cg")
    page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
    slot = ((page * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    LINE: tl.constexpr = 1024 // key_ptr.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    for column in tl.static_range(0, HEAD_DIM, LINE):
        _prefetch(key_ptr + slot + column, wanted)
        _prefetch(value_ptr + slot + column, wanted)


@triton.jit
def merged(
    sum_ptr,
    top_ptr,
    total_ptr,
    node,
    first,
    last,
    row,
    valid,
    rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Partial sums `first` .. `last`, of which number 0 is at `node`, of some of the `rows`, [R]: added up in order.

    Read past L1, where an older content of the same memory may lie.
    """
    R: tl.constexpr = row.shape[0]
    dim, inside = columns(HEAD_DIM, BLOCK_D)
    top = tl.full([R], -float("inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    out = tl.zeros([R, BLOCK_D], tl.float32)
    part = tl.arange(0, FAN)
    at = row[:, None] + part[None, :] * rows  # the sums lie along axis 1: there threads keep all of them to themselves
    for begin in tl.range(first // FAN * FAN, last + 1, FAN, disable_licm=True):
        there = valid[:, None] & ((begin + part >= first) & (begin + part <= last))[None, :]
        place = (node + begin) * rows  # int64 from node
        mask = there[:, :, None] & inside[None, None, :]
        where = sum_ptr + place * HEAD_DIM + (at[:, :, None] * HEAD_DIM + dim[None, None, :])
        sums = tl.load(where, mask=mask, other=0.0, cache_modifier=".cg")
        tops = tl.load(top_ptr + place + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(total_ptr + place + at, mask=there, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, axis=1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(tops - shift[:, None])
        keep = tl.exp2(top - shift)
        total = total * keep + tl.sum(totals * weights, axis=1)
        out = out * keep[:, None] + tl.sum(sums * weights[:, :, None], axis=1)
        top = new_top
    return top, total, out


@triton.jit
def keep(
    sum_ptr,
    top_ptr,
    total_ptr,
    node,
    row,
    valid,
    rows,
    top,
    total,
    out,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Stores the partial sums of the `valid` ones of `row` as those of `node`, which has `rows`."""
    dim, inside = columns(HEAD_DIM, BLOCK_D)
    at = node * rows + row
    tl.store(top_ptr + at, top, mask=valid)
    tl.store(total_ptr + at, total, mask=valid)
    tl.store(sum_ptr + at[:, None] * HEAD_DIM + dim[None, :], out, mask=valid[:, None] & inside[None, :])


@triton.jit
def finish(
    out_ptr,
    batch,
    kv_head,
    row,
    num_queries,
    total,
    out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Stores out / total as the output of rows."""
    dim, inside = columns(HEAD_DIM, BLOCK_D)
    head = (batch * num_queries + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    mask = (row < num_queries * GROUP)[:, None] & inside[None, :]
    value = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head[:, None] * HEAD_DIM + dim[None, :], value, mask=mask)


@triton.jit
def attended(
    q,
    key_ptr,
    value_ptr,
    table_ptr,
    position,
    kv_head,
    begin,
    stop,
    table_width,
    num_pages,
    scale,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Largest score, sum of weights and weighted values of rows q over the keys begin .. stop-1 (online softmax)."""
    dim, inside = columns(HEAD_DIM, BLOCK_D)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    totals = tl.zeros([ROWS, BLOCK_N], tl.float32)  # added up at the end: a sum over threads less in the loop
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        page = pages_of(table_ptr, first, table_width, num_pages, PAGE_SIZE, BLOCK_N)
        place, slot = slots_of(page, first, kv_head, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N)
        slot = slot + dim[None, :]
        at = first + tl.arange(0, BLOCK_N)
        # the slots of later positions hold anything, NaN included: they must not come into a product
        mask = (at < stop)[:, None] & inside[None, :]
        k = tl.load(key_ptr + place + slot, mask=mask, other=0.0)
        v = tl.load(value_ptr + place + slot, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # a row that has seen nothing keeps top = -inf; shifting by 0 makes its weights exp2(-inf) = 0, not NaN
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(top - shift)[:, None]
        totals = totals * keep + weights
        out = tl.dot(weights.to(q.dtype), v, out * keep, input_precision="ieee")
        top = new_top
    return top, tl.sum(totals, axis=1), out
