"""Triton kernels of the exchange between GPUs; exchange.py describes their protocol.

Arguments that most functions have:

- `at`: offsets of elements in the tensor. The same offsets are used in the part of a receive buffer for one sender.
- `there`: True for valid offsets in `at`.
- `own`: this rank's values of these elements, fp32.
- `room`: (`Room.buffers`, `Room.turns`). `elements`: `Room.elements`. `limit`: `LIMIT`, in nanoseconds.
- `mine`: address in this rank's receive buffer where the elements of rank 0 arrive in this exchange.
- RANK: index of this rank. SIZE: number of ranks. BLOCK: elements per CTA. PARTS: number of split-K partial sums of x.
"""

# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.room import EMPTY

_EMPTY = tl.constexpr(EMPTY)
_EMPTY_16 = tl.constexpr(EMPTY >> 16)
_OTHER_NAN, _OTHER_NAN_16 = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7FFF)


@triton.jit
def _lying(buffers_ptr, rank, dtype: tl.constexpr):
    """Returns the address of a rank's receive buffer, as a pointer to `dtype`. buffers_ptr: see `Room.buffers`.

    The address is a multiple of 16 bytes, so the compiler moves 16 bytes at once.
    """
    return tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _now(zero):
    """Reads the device's clock, in nanoseconds. `zero` is not read: inline assembly needs an operand."""
    return tl.inline_asm_elementwise("{ mov.u64 $0, %globaltimer; }", "=l,r", [zero], tl.int64, False, 1)


@triton.jit
def _stop_after(start, limit):
    """Stops the device with an error if `limit` nanoseconds have passed since `start`."""
    return tl.inline_asm_elementwise(
        "{ .reg .u64 t; .reg .pred late; mov.u64 t, %globaltimer; sub.u64 t, t, $1; setp.gt.u64 late, t, $2;"
        " @late trap; mov.u32 $0, 0; }",
        "=r,l,l",
        [start, limit],
        tl.int32,
        False,
        1,
    )


@triton.jit
def _to_push(value):
    """Returns the bits of 4- or 2-byte floats as integers, which are sent. The bits of EMPTY become another NaN."""
    if value.dtype.primitive_bitwidth == 32:
        bits = value.to(tl.int32, bitcast=True)
        return tl.where(bits == _EMPTY, _OTHER_NAN, bits)
    else:
        bits = value.to(tl.int16, bitcast=True)
        return tl.where(bits == _EMPTY_16, _OTHER_NAN_16, bits).to(tl.int16)


@triton.jit
def _empty(place):
    """Returns the bits of EMPTY for elements of 4 or 2 bytes, the size of the elements to which `place` points."""
    return _EMPTY if place.dtype.element_ty.primitive_bitwidth == 32 else _EMPTY_16


@triton.jit
def arrived(place, there, limit):
    """Waits until no element at the addresses `place` is EMPTY. Returns the bits of these elements.

    Then sets the elements to EMPTY, for the exchange after the next one. `there` masks valid addresses. After `limit`
    nanoseconds of waiting, the device stops with an error.
    """
    start = _now(tl.program_id(0))
    bits = tl.load(place, mask=there, other=0, volatile=True)
    while tl.sum(tl.where(bits == _empty(place), 1, 0), 0) > 0:
        _stop_after(start, limit)
        bits = tl.load(place, mask=there, other=0, volatile=True)
    tl.store(place, _empty(place), mask=there)
    return bits


@triton.jit
def push(
    value, at, there, room, first, elements,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Sends the elements `value` at offsets `at` to all other ranks. They lie in COUNT blocks, from block `first` on.

    For the other arguments see the top of this file.

    Returns:
        `mine`, the address in this rank's receive buffer where elements of rank 0 arrive. Elements of rank r arrive
        r * elements further. With COUNT > 1 it is a tensor of addresses like `at`, because the blocks may use
        different halves of the receive buffer.
    """
    buffers_ptr, turns_ptr = room
    turns = ()
    for i in tl.static_range(COUNT):
        turns = turns + (tl.load(turns_ptr + first + i),)
    turn = turns[0]
    for i in tl.static_range(1, COUNT):
        turn = tl.where(at >= (first + i) * BLOCK, turns[i], turn)
    half = turn.to(tl.int64) * SIZE * elements
    bits = _to_push(value)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = _lying(buffers_ptr, peer, tl.int32)
            tl.store(theirs + (half + RANK * elements.to(tl.int64)) + at, bits, mask=there)
    tl.debug_barrier()  # every thread has read the exchange counters
    for i in tl.static_range(COUNT):
        tl.store(turns_ptr + first + i, 1 - turns[i])
    return _lying(buffers_ptr, RANK, tl.int32) + half


@triton.jit
def _pushed(mine, at, there, elements, limit, rank: tl.constexpr):
    """Waits for the fp32 elements that rank `rank` sends to this rank. Returns them. Arguments: see the file's top."""
    return arrived(mine + rank * elements.to(tl.int64) + at, there, limit).to(tl.float32, bitcast=True)


@triton.jit
def sum_ranks(own, mine, at, there, elements, limit, FIRST: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr):
    """Returns the sum of the elements of ranks FIRST .. FIRST + COUNT - 1, added as a binary tree.

    Waits for the elements of other ranks. COUNT is 1, 2, 4 or 8. For the other arguments see the top of this file.
    """
    if COUNT == 1:
        if FIRST == RANK:
            return own
        else:
            return _pushed(mine, at, there, elements, limit, FIRST)
    else:
        left = sum_ranks(own, mine, at, there, elements, limit, FIRST, COUNT // 2, RANK)
        right = sum_ranks(own, mine, at, there, elements, limit, FIRST + COUNT // 2, COUNT // 2, RANK)
        return left + right


@triton.jit
def _sum_parts(x_ptr, at, there, count, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Returns the sum of x[FIRST] .. x[FIRST + COUNT - 1] at offsets `at`, added as a tree. COUNT is 1, 2 or 4.

    x is [parts, count] with split-K partial sums. `there` masks valid offsets.
    """
    if COUNT == 1:
        return tl.load(x_ptr + (FIRST * count.to(tl.int64) + at), mask=there, other=0.0)
    else:
        left = _sum_parts(x_ptr, at, there, count, FIRST, COUNT // 2)
        right = _sum_parts(x_ptr, at, there, count, FIRST + COUNT // 2, COUNT // 2)
        return left + right


@triton.jit
def _load_own(x_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr):
    """Waits for the kernel that writes x, then loads this CTA's block of x.

    Returns (offsets of the block's elements, mask of valid offsets, the elements). x is fp32 [PARTS, count]; the
    elements are its sum over PARTS.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return at, at < count, _sum_parts(x_ptr, at, at < count, count, 0, PARTS)


@triton.jit
def _load_addends(bias_ptr, residual_ptr, at, there, width):
    """Returns (bias, residual) of the elements at offsets `at`, in fp32. A pointer that is None gives 0.0.

    `there` masks valid offsets. `width` is the length of the bias. Callers load these values before they wait for
    other ranks, because the values do not depend on other ranks.
    """
    bias, residual = 0.0, 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + at % width, mask=there, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    return bias, residual


@triton.jit
def _one_shot_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, room, count, width, elements, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """All-reduces one block of x one-shot: every rank receives and adds the elements of all ranks.

    Then adds bias and residual, if given. For the arguments see the top of this file.
    """
    at, there, own = _load_own(x_ptr, count, BLOCK, PDL, PARTS)
    bias, residual = _load_addends(bias_ptr, residual_ptr, at, there, width)
    mine = push(own, at, there, room, tl.program_id(0), elements, RANK, SIZE, BLOCK, 1)
    total = sum_ranks(own, mine, at, there, elements, limit, 0, SIZE, RANK)
    if bias_ptr is not None:
        total += bias
    if residual_ptr is not None:
        total += residual
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _narrow(room_ptr, at, BLOCK: tl.constexpr):
    """Returns the addresses of this CTA's block as 16-bit elements in a receive buffer.

    The block begins at the same byte as its fp32 elements would. `room_ptr` is the address of one sender's fp32
    elements, `at` their offsets in the tensor.
    """
    first = tl.program_id(0) * BLOCK
    return (room_ptr + first).to(tl.pointer_type(tl.int16)) + (at - first)


@triton.jit
def _reduce_block(
    own, at, there, bias_ptr, residual_ptr, out_ptr, buffers_ptr, half, width, elements, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the elements of all ranks for one block, with bias and residual. Sends the 16-bit sum to all other ranks.

    `half` is the offset, in elements, of the half of the receive buffers that this exchange uses. For the other
    arguments see the top of this file.
    """
    bias, residual = _load_addends(bias_ptr, residual_ptr, at, there, width)
    mine = _lying(buffers_ptr, RANK, tl.int32) + half
    total = sum_ranks(own, mine, at, there, elements, limit, 0, SIZE, RANK)
    if bias_ptr is not None:
        total += bias
    rounded = (total + residual).to(out_ptr.dtype.element_ty)
    bits = _to_push(rounded)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = _lying(buffers_ptr, peer, tl.int32) + (half + RANK * elements.to(tl.int64))
            tl.store(_narrow(theirs, at, BLOCK), bits, mask=there)
    tl.store(out_ptr + at, rounded, mask=there)


@triton.jit
def _send_block(
    own, at, there, out_ptr, buffers_ptr, owner, half, elements, limit,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sends this rank's elements of a block to `owner`, the rank that adds the block. Then receives and stores the sum.

    For `half` see `_reduce_block`, for the other arguments the top of this file.
    """
    theirs = _lying(buffers_ptr, owner, tl.int32) + (half + RANK * elements.to(tl.int64))
    tl.store(theirs + at, _to_push(own), mask=there)
    mine = _lying(buffers_ptr, RANK, tl.int32) + (half + owner * elements.to(tl.int64))
    bits = arrived(_narrow(mine, at, BLOCK), there, limit)
    tl.store(out_ptr + at, bits.to(out_ptr.dtype.element_ty, bitcast=True), mask=there)


@triton.jit
def _two_shot_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, room, count, width, elements, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """All-reduces one block of x two-shot: rank (block % SIZE) adds the block, and sends the 16-bit sum to all others.

    For the arguments see the top of this file.
    """
    at, there, own = _load_own(x_ptr, count, BLOCK, PDL, PARTS)
    buffers_ptr, turns_ptr = room
    pid = tl.program_id(0)
    turn = tl.load(turns_ptr + pid)
    half = turn.to(tl.int64) * SIZE * elements
    owner = pid % SIZE
    if owner == RANK:
        _reduce_block(
            own, at, there, bias_ptr, residual_ptr, out_ptr, buffers_ptr, half, width, elements, limit,
            RANK, SIZE, BLOCK,
        )  # fmt: skip
    else:
        _send_block(own, at, there, out_ptr, buffers_ptr, owner, half, elements, limit, RANK, BLOCK)
    tl.debug_barrier()  # every thread has read the exchange counter
    tl.store(turns_ptr + pid, 1 - turn)


@triton.jit
def _gather_kernel(
    x_ptr, out_ptr, room, count, width, elements, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """All-gathers one block of x [rows, width]: element [r, c] of rank n becomes [r, n * width + c] of the output.

    For the arguments see the top of this file.
    """
    at, there, own = _load_own(x_ptr, count, BLOCK, PDL, PARTS)
    mine = push(own, at, there, room, tl.program_id(0), elements, RANK, SIZE, BLOCK, 1)
    place = (at // width).to(tl.int64) * (SIZE * width) + at % width
    for rank in tl.static_range(SIZE):
        part = own if rank == RANK else _pushed(mine, at, there, elements, limit, rank)
        tl.store(out_ptr + place + rank * width, part, mask=there)


@triton.jit
def _low(value):
    """Returns the bits of 4-byte elements as int64, with zeros in the upper 32 bits."""
    return value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _key(low, high, rank: tl.constexpr, width):
    """Joins the two 4-byte halves of a rank's key. Converts its id from the rank's part to the whole vocabulary.

    A key holds 2^31 - 1 - id in its lower 31 bits (`reference.keys_of`). Key 0 means that the rank has no id. `width`
    is the number of ids of each rank.
    """
    key = (_low(high) << 32) | _low(low)
    return tl.where(key > 0, key - rank * width, 0)


@triton.jit
def _largest_kernel(
    keys_ptr, out_ptr, room, count, width, stride, elements, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the vocabulary id of the largest key of all ranks, for each of BLOCK / 2 logits rows.

    A key is sent as two 4-byte elements, low half first. `count` is the number of these elements. Each rank has `width`
    ids. `stride` is the stride of the output. For the other arguments see the top of this file.
    """
    at, entered, own = _load_own(keys_ptr, count, BLOCK, PDL, PARTS)
    mine = push(own, at, entered, room, tl.program_id(0), elements, RANK, SIZE, BLOCK, 1)
    row = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    there = row < count // 2
    low = tl.load(keys_ptr + 2 * row, mask=there, other=0.0)
    best = _key(low, tl.load(keys_ptr + 2 * row + 1, mask=there, other=0.0), RANK, width)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            low = _pushed(mine, 2 * row, there, elements, limit, rank)
            high = _pushed(mine, 2 * row + 1, there, elements, limit, rank)
            best = tl.maximum(best, _key(low, high, rank, width))
    tl.store(out_ptr + row.to(tl.int64) * stride, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=there)
