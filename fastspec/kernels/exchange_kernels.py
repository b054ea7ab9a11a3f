"""Kernels of the exchange between GPUs; see `exchange` for what they do and how they keep out of each other's way."""

# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.flags import arrived, awaited, signalled, word_of


@triton.jit
def _lying(buffers_ptr, rank, dtype: tl.constexpr):
    """Where a rank's buffers lie: a multiple of 16 bytes, and the compiler then moves as many at once."""
    return tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def push(
    value, at, there, room, first, elements, limit, blocks,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Sends COUNT blocks from `first` on to all other ranks and, unless they go as words, waits for theirs.

    `at` are places in the room, of those blocks. Returns where the others' lie in this rank's room, one rank's after
    another's, and the epoch, of each element where there are several blocks.
    """
    buffers_ptr, flags_ptr, epochs_ptr = room
    epochs = ()
    for i in tl.static_range(COUNT):
        epochs = epochs + (tl.load(epochs_ptr + first + i) + 1,)
    epoch = epochs[0]
    for i in tl.static_range(1, COUNT):
        epoch = tl.where(at >= (first + i) * BLOCK, epochs[i], epoch)
    half = (epoch % 2).to(tl.int64) * SIZE * elements
    given = word_of(value, epoch) if WORDS else value
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = _lying(buffers_ptr, peer, given.dtype)
            tl.store(theirs + (half + RANK * elements.to(tl.int64)) + at, given, mask=there)
    tl.debug_barrier()
    if not WORDS:
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                for i in tl.static_range(COUNT):
                    signalled(flags_ptr, peer, epochs[i], first + i, blocks, RANK)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                for i in tl.static_range(COUNT):
                    awaited(flags_ptr, peer, epochs[i], first + i, blocks, limit, RANK)
        tl.debug_barrier()
    for i in tl.static_range(COUNT):
        tl.store(epochs_ptr + first + i, epochs[i])
    return _lying(buffers_ptr, RANK, given.dtype) + half, epoch


@triton.jit
def _load_pushed(mine, at, there, elements, epoch, limit, rank: tl.constexpr, WORDS: tl.constexpr):
    """The block that a peer has pushed here; words are waited for."""
    theirs = mine + rank * elements.to(tl.int64)
    if WORDS:
        return arrived(theirs + at, there, epoch, limit)
    else:
        return tl.load(theirs + at, mask=there, other=0.0, volatile=True)


@triton.jit
def sum_ranks(
    own, mine, at, there, elements, epoch, limit,
    FIRST: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The sum of COUNT ranks from FIRST on: 1, 2, 4 or 8 of them."""
    if COUNT == 1:
        if FIRST == RANK:
            return own
        else:
            return _load_pushed(mine, at, there, elements, epoch, limit, FIRST, WORDS)
    else:
        left = sum_ranks(own, mine, at, there, elements, epoch, limit, FIRST, COUNT // 2, RANK, WORDS)
        right = sum_ranks(own, mine, at, there, elements, epoch, limit, FIRST + COUNT // 2, COUNT // 2, RANK, WORDS)
        return left + right


@triton.jit
def _sum_parts(x_ptr, at, there, count, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The sum of COUNT split-K parts from FIRST on: 1, 2 or 4 of them."""
    if COUNT == 1:
        return tl.load(x_ptr + (FIRST * count.to(tl.int64) + at), mask=there, other=0.0)
    else:
        left = _sum_parts(x_ptr, at, there, count, FIRST, COUNT // 2)
        right = _sum_parts(x_ptr, at, there, count, FIRST + COUNT // 2, COUNT // 2)
        return left + right


@triton.jit
def _load_own(x_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr):
    """Waits until x is written. Returns a block's places, which of them are in x, and this rank's values."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return at, at < count, _sum_parts(x_ptr, at, at < count, count, 0, PARTS)


@triton.jit
def _load_addends(bias_ptr, residual_ptr, at, there, width):
    """Bias and residual of a block; loaded early, because they do not depend on other ranks."""
    bias, residual = 0.0, 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + at % width, mask=there, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    return bias, residual


@triton.jit
def _one_shot_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, room, count, width, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One block of the sum, one-shot: every rank adds all parts."""
    at, there, own = _load_own(x_ptr, count, BLOCK, PDL, PARTS)
    bias, residual = _load_addends(bias_ptr, residual_ptr, at, there, width)
    mine, epoch = push(
        own, at, there, room, tl.program_id(0), elements, limit, blocks, RANK, SIZE, WORDS, BLOCK, 1
    )  # fmt: skip
    total = sum_ranks(own, mine, at, there, elements, epoch, limit, 0, SIZE, RANK, WORDS)
    if bias_ptr is not None:
        total += bias
    if residual_ptr is not None:
        total += residual
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _narrow(room_ptr, out_ptr, at, BLOCK: tl.constexpr):
    """Where a block's 16-bit results lie: at the start of the place of its own fp32 elements."""
    first = tl.program_id(0) * BLOCK
    return (room_ptr + first).to(out_ptr.dtype) + (at - first)


@triton.jit
def _reduce_block(
    own, at, there, bias_ptr, residual_ptr, out_ptr, room, epoch, half, width, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This rank owns the block: it adds all parts, and sends the others the sum."""
    buffers_ptr, flags_ptr, _epochs_ptr = room
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            awaited(flags_ptr, peer, epoch, tl.program_id(0), blocks, limit, RANK)
    tl.debug_barrier()
    mine = _lying(buffers_ptr, RANK, tl.float32) + half
    total = sum_ranks(own, mine, at, there, elements, epoch, limit, 0, SIZE, RANK, False)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % width, mask=there, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    rounded = total.to(out_ptr.dtype.element_ty)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = _lying(buffers_ptr, peer, tl.float32) + (half + RANK * elements.to(tl.int64))
            tl.store(_narrow(theirs, out_ptr, at, BLOCK), rounded, mask=there)
    tl.store(out_ptr + at, rounded, mask=there)
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            signalled(flags_ptr, peer, epoch, tl.program_id(0), blocks, RANK)


@triton.jit
def _send_block(
    own, at, there, out_ptr, room, owner, epoch, half, elements, blocks, limit,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Another rank owns the block: this one sends it its part, and gets the sum."""
    buffers_ptr, flags_ptr, _epochs_ptr = room
    theirs = _lying(buffers_ptr, owner, tl.float32) + (half + RANK * elements.to(tl.int64))
    tl.store(theirs + at, own, mask=there)
    tl.debug_barrier()
    signalled(flags_ptr, owner, epoch, tl.program_id(0), blocks, RANK)
    awaited(flags_ptr, owner, epoch, tl.program_id(0), blocks, limit, RANK)
    tl.debug_barrier()
    mine = _lying(buffers_ptr, RANK, tl.float32) + (half + owner * elements.to(tl.int64))
    narrow = _narrow(mine, out_ptr, at, BLOCK)
    tl.store(out_ptr + at, tl.load(narrow, mask=there, other=0.0, volatile=True), mask=there)


@triton.jit
def _two_shot_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, room, count, width, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One block of the sum, two-shot: the rank that owns it, by the block's number, adds it and sends it rounded."""
    at, there, own = _load_own(x_ptr, count, BLOCK, PDL, PARTS)
    pid = tl.program_id(0)
    epoch = tl.load(room[2] + pid) + 1
    half = (epoch % 2).to(tl.int64) * SIZE * elements
    owner = pid % SIZE
    if owner == RANK:
        _reduce_block(
            own, at, there, bias_ptr, residual_ptr, out_ptr, room, epoch, half, width, elements, blocks, limit,
            RANK, SIZE, BLOCK,
        )  # fmt: skip
    else:
        _send_block(own, at, there, out_ptr, room, owner, epoch, half, elements, blocks, limit, RANK, BLOCK)
    tl.debug_barrier()
    tl.store(room[2] + pid, epoch)


@triton.jit
def _gather_kernel(
    x_ptr, out_ptr, room, count, width, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One block of every rank's part."""
    at, there, own = _load_own(x_ptr, count, BLOCK, PDL, PARTS)
    mine, epoch = push(
        own, at, there, room, tl.program_id(0), elements, limit, blocks, RANK, SIZE, WORDS, BLOCK, 1
    )  # fmt: skip
    place = (at // width).to(tl.int64) * (SIZE * width) + at % width
    for rank in tl.static_range(SIZE):
        part = own if rank == RANK else _load_pushed(mine, at, there, elements, epoch, limit, rank, WORDS)
        tl.store(out_ptr + place + rank * width, part, mask=there)


@triton.jit
def _low(value):
    """The bits of 4-byte elements as the lower half of 64."""
    return value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _key(low, high, rank: tl.constexpr, width):
    """A rank's key, given as two halves, in the order of all ranks' ids; 0 for none."""
    key = (_low(high) << 32) | _low(low)
    return tl.where(key > 0, key - rank * width, 0)


@triton.jit
def _largest_kernel(
    keys_ptr, out_ptr, room, count, width, stride, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """The largest keys of half a block of rows: a key travels as two elements, low half first."""
    at, entered, own = _load_own(keys_ptr, count, BLOCK, PDL, PARTS)
    mine, epoch = push(
        own, at, entered, room, tl.program_id(0), elements, limit, blocks, RANK, SIZE, WORDS, BLOCK, 1
    )  # fmt: skip
    row = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    there = row < count // 2
    low = tl.load(keys_ptr + 2 * row, mask=there, other=0.0)
    best = _key(low, tl.load(keys_ptr + 2 * row + 1, mask=there, other=0.0), RANK, width)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            low = _load_pushed(mine, 2 * row, there, elements, epoch, limit, rank, WORDS)
            high = _load_pushed(mine, 2 * row + 1, there, elements, epoch, limit, rank, WORDS)
            best = tl.maximum(best, _key(low, high, rank, width))
    tl.store(out_ptr + row.to(tl.int64) * stride, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=there)
