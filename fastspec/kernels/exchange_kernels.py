"""Kernels of the exchange between GPUs; see `exchange` for what they do and how they keep out of each other's way."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.flags import arrived, awaited, signalled, word_of


@triton.jit
def _pushed(
    value, at, there, room, elements, limit, blocks, RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Gives a block to all other ranks, and waits for theirs where they are no words.

    Returns where this rank's room has them, a rank's behind the other's, and the epoch.
    """
    buffers_ptr, flags_ptr, epochs_ptr = room
    pid = tl.program_id(0)
    epoch = tl.load(epochs_ptr + pid) + 1
    half = (epoch % 2).to(tl.int64) * SIZE * elements
    given = word_of(value, epoch) if WORDS else value
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(buffers_ptr + peer).to(tl.pointer_type(given.dtype))
            tl.store(theirs + (half + RANK * elements.to(tl.int64)) + at, given, mask=there)
    tl.debug_barrier()
    if not WORDS:
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                signalled(flags_ptr, peer, epoch, blocks, RANK)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                awaited(flags_ptr, peer, epoch, blocks, limit, RANK)
        tl.debug_barrier()
    tl.store(epochs_ptr + pid, epoch)
    return tl.load(buffers_ptr + RANK).to(tl.pointer_type(given.dtype)) + half, epoch


@triton.jit
def _from(mine, at, there, elements, epoch, limit, rank: tl.constexpr, WORDS: tl.constexpr):
    """What a peer has pushed of a block."""
    theirs = mine + rank * elements.to(tl.int64)
    if WORDS:
        return arrived(theirs + at, there, epoch, limit)
    else:
        return tl.load(theirs + at, mask=there, other=0.0, volatile=True)


@triton.jit
def _tree(
    own, mine, at, there, elements, epoch, limit,
    FIRST: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The sum of COUNT ranks from FIRST on: 1, 2, 4 or 8 of them."""
    if COUNT == 1:
        if FIRST == RANK:
            return own
        else:
            return _from(mine, at, there, elements, epoch, limit, FIRST, WORDS)
    else:
        left = _tree(own, mine, at, there, elements, epoch, limit, FIRST, COUNT // 2, RANK, WORDS)
        right = _tree(own, mine, at, there, elements, epoch, limit, FIRST + COUNT // 2, COUNT // 2, RANK, WORDS)
        return left + right


@triton.jit
def _way(x_ptr, at, there, count, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The sum of COUNT ways from FIRST on: 1, 2 or 4 of them."""
    if COUNT == 1:
        return tl.load(x_ptr + (FIRST * count.to(tl.int64) + at), mask=there, other=0.0)
    else:
        left = _way(x_ptr, at, there, count, FIRST, COUNT // 2)
        right = _way(x_ptr, at, there, count, FIRST + COUNT // 2, COUNT // 2)
        return left + right


@triton.jit
def _begun(x_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr, WAYS: tl.constexpr):
    """Once x is there: a block's places, whether there is something, and what this rank has."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return at, at < count, _way(x_ptr, at, at < count, count, 0, WAYS)


@triton.jit
def _beside(bias_ptr, residual_ptr, at, there, width):
    """What is added to the sum of ranks; loaded early, for it does not depend on them."""
    bias, residual = 0.0, 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + at % width, mask=there, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    return bias, residual


@triton.jit
def _added_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, room, count, width, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, WAYS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One block of the sum."""
    at, there, own = _begun(x_ptr, count, BLOCK, PDL, WAYS)
    bias, residual = _beside(bias_ptr, residual_ptr, at, there, width)
    mine, epoch = _pushed(own, at, there, room, elements, limit, blocks, RANK, SIZE, WORDS)
    total = _tree(own, mine, at, there, elements, epoch, limit, 0, SIZE, RANK, WORDS)
    if bias_ptr is not None:
        total += bias
    if residual_ptr is not None:
        total += residual
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _narrow(room_ptr, out_ptr, at, BLOCK: tl.constexpr):
    """Where a block's 16-bit results lie: within the place of its own fp32 elements, for others lie beside it."""
    first = tl.program_id(0) * BLOCK
    return (room_ptr + first).to(out_ptr.dtype) + (at - first)


@triton.jit
def _handed_out(
    own, at, there, bias_ptr, residual_ptr, out_ptr, room, epoch, half, width, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This rank adds the block, and gives the others what it comes to."""
    buffers_ptr, flags_ptr, _epochs_ptr = room
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            awaited(flags_ptr, peer, epoch, blocks, limit, RANK)
    tl.debug_barrier()
    mine = tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.float32)) + half
    total = _tree(own, mine, at, there, elements, epoch, limit, 0, SIZE, RANK, False)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % width, mask=there, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    rounded = total.to(out_ptr.dtype.element_ty)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.float32)) + (half + RANK * elements.to(tl.int64))
            tl.store(_narrow(theirs, out_ptr, at, BLOCK), rounded, mask=there)
    tl.store(out_ptr + at, rounded, mask=there)
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            signalled(flags_ptr, peer, epoch, blocks, RANK)


@triton.jit
def _handed_in(
    own, at, there, out_ptr, room, owner, epoch, half, elements, blocks, limit,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Another rank adds the block; this one gives it its part, and gets what it comes to."""
    buffers_ptr, flags_ptr, _epochs_ptr = room
    theirs = tl.load(buffers_ptr + owner).to(tl.pointer_type(tl.float32)) + (half + RANK * elements.to(tl.int64))
    tl.store(theirs + at, own, mask=there)
    tl.debug_barrier()
    signalled(flags_ptr, owner, epoch, blocks, RANK)
    awaited(flags_ptr, owner, epoch, blocks, limit, RANK)
    tl.debug_barrier()
    mine = tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.float32)) + (half + owner * elements.to(tl.int64))
    narrow = _narrow(mine, out_ptr, at, BLOCK)
    tl.store(out_ptr + at, tl.load(narrow, mask=there, other=0.0, volatile=True), mask=there)


@triton.jit
def _handed_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, room, count, width, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, WAYS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One block of the sum, in two turns: one rank adds it, by the block's number, and hands it out rounded."""
    at, there, own = _begun(x_ptr, count, BLOCK, PDL, WAYS)
    pid = tl.program_id(0)
    epoch = tl.load(room[2] + pid) + 1
    half = (epoch % 2).to(tl.int64) * SIZE * elements
    owner = pid % SIZE
    if owner == RANK:
        _handed_out(
            own, at, there, bias_ptr, residual_ptr, out_ptr, room, epoch, half, width, elements, blocks, limit,
            RANK, SIZE, BLOCK,
        )  # fmt: skip
    else:
        _handed_in(own, at, there, out_ptr, room, owner, epoch, half, elements, blocks, limit, RANK, BLOCK)
    tl.debug_barrier()
    tl.store(room[2] + pid, epoch)


@triton.jit
def _gather_kernel(
    x_ptr, out_ptr, room, count, width, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, WAYS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One block of every rank's part."""
    at, there, own = _begun(x_ptr, count, BLOCK, PDL, WAYS)
    mine, epoch = _pushed(own, at, there, room, elements, limit, blocks, RANK, SIZE, WORDS)
    place = (at // width).to(tl.int64) * (SIZE * width) + at % width
    for rank in tl.static_range(SIZE):
        part = own if rank == RANK else _from(mine, at, there, elements, epoch, limit, rank, WORDS)
        tl.store(out_ptr + place + rank * width, part, mask=there)


@triton.jit
def _low(value):
    """The bits of 4-byte elements as the lower half of 64."""
    return value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _key(low, high, rank: tl.constexpr, width):
    """A rank's key in the order of all ids, of its halves; 0 for none."""
    key = (_low(high) << 32) | _low(low)
    return tl.where(key > 0, key - rank * width, 0)


@triton.jit
def _largest_kernel(
    keys_ptr, out_ptr, room, count, width, stride, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, WAYS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """The best of half a block of keys, which travel as two elements each, low half first."""
    at, entered, own = _begun(keys_ptr, count, BLOCK, PDL, WAYS)
    mine, epoch = _pushed(own, at, entered, room, elements, limit, blocks, RANK, SIZE, WORDS)
    row = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    there = row < count // 2
    low = tl.load(keys_ptr + 2 * row, mask=there, other=0.0)
    best = _key(low, tl.load(keys_ptr + 2 * row + 1, mask=there, other=0.0), RANK, width)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            low = _from(mine, 2 * row, there, elements, epoch, limit, rank, WORDS)
            high = _from(mine, 2 * row + 1, there, elements, epoch, limit, rank, WORDS)
            best = tl.maximum(best, _key(low, high, rank, width))
    tl.store(out_ptr + row.to(tl.int64) * stride, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=there)
