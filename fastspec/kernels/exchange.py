"""Exchange between the GPUs of one host, inside a captured step: each rank pushes what it has into the others' memory.

    added:   out = round(residual + (x_0 + x_1 + ..  [+ bias]))     x_r: fp32 partial sums of rank r
    gather:  out = x_0 | x_1 | ..                                   side by side in every row
    largest: out = the id of the largest logit, by the keys of each rank's ids (`reference.keys_of`)

| argument | shape, dtype                             | notes                                                    |
|----------|------------------------------------------|----------------------------------------------------------|
| x        | [M, N] of 4 bytes an element             | contiguous, at most `Room.elements` in all               |
|          | [WAYS, M, N] fp32, of added alone        | ways are added first, as a tree; 1, 2 or 4 of them       |
| residual | [M, N] bf16, fp16 or fp32                | None: the sum itself, in fp32                            |
| bias     | [N], any float dtype                     | or None                                                  |

Ranks are added as one binary tree, neighbours first, by every rank for itself: all get the same bits. A block of BLOCK
elements has a flag for each rank and a number that counts its exchanges, its epoch. It pushes its elements, then its
epoch, and waits for the epochs of the others: nobody waits for a whole tensor. Two halves of the room take turns: a
rank that is one exchange ahead cannot overwrite what another still reads, for it has waited for that one's next push.

Many elements go in two turns: each block has one rank that adds it and gives the others what it comes to, in 16 bits.
In either way no rank ends an exchange of a block before all others have begun it, which is what the halves stand on.

A program that waits for longer than LIMIT stops the device with an error, so that nothing spins for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import has_pdl, launch
from fastspec.kernels.flags import awaited, signalled

BLOCK, NUM_WARPS = 1024, 4  # fixed: where a block lies in the room must not depend on the tensor
LIMIT = 120_000_000_000  # nanoseconds
ALL = 2**62
# elements of a sum, by the number of ranks, from which each rank adds a part and hands it out rounded: fewer bytes than
# if all ranks get all partial sums, and a second wait
TWO_TURNS = {2: ALL, 4: ALL, 8: ALL}  # none, until it was timed


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that the ranks of a host share.

    Attributes:
        rank, size: of this process.
        elements: of 4 bytes, of the largest tensor.
        buffers: int64 [size], where each rank's fp32 [2, size, elements] lies.
        flags: int64 [size], where each rank's int32 [size, blocks] lies, zeros at first.
        epochs: int32 [blocks], this rank's own, zeros at first.
        held: the memory itself, kept alive.
    """

    rank: int
    size: int
    elements: int
    buffers: Tensor
    flags: Tensor
    epochs: Tensor
    held: tuple[object, ...] = ()


def blocks_of(elements: int) -> int:
    """Blocks of a tensor."""
    return -(-elements // BLOCK)


@triton.jit
def _push_and_wait(
    value, at, there, room, elements, limit, blocks, RANK: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Gives a block to all other ranks, and waits for theirs; returns where they lie, a rank's behind the other's."""
    buffers_ptr, flags_ptr, epochs_ptr = room
    pid = tl.program_id(0)
    epoch = tl.load(epochs_ptr + pid) + 1
    half = (epoch % 2).to(tl.int64) * SIZE * elements
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.float32))
            tl.store(theirs + (half + RANK * elements.to(tl.int64)) + at, value, mask=there)
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            signalled(flags_ptr, peer, epoch, blocks, RANK)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            awaited(flags_ptr, peer, epoch, blocks, limit, RANK)
    tl.debug_barrier()
    tl.store(epochs_ptr + pid, epoch)
    return tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.float32)) + half


@triton.jit
def _of_rank(own, mine, at, there, elements, rank: tl.constexpr, RANK: tl.constexpr):
    """A block of one rank: what was kept of this one's own, or what another pushed."""
    if rank == RANK:
        return own
    else:
        return tl.load(mine + rank * elements.to(tl.int64) + at, mask=there, other=0.0, volatile=True)


@triton.jit
def _tree(own, mine, at, there, elements, FIRST: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr):
    """The sum of COUNT ranks from FIRST on: 1, 2, 4 or 8 of them."""
    if COUNT == 1:
        return _of_rank(own, mine, at, there, elements, FIRST, RANK)
    else:
        left = _tree(own, mine, at, there, elements, FIRST, COUNT // 2, RANK)
        right = _tree(own, mine, at, there, elements, FIRST + COUNT // 2, COUNT // 2, RANK)
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
def _added_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, room, count, width, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """One block of the sum."""
    at, there, own = _begun(x_ptr, count, BLOCK, PDL, WAYS)
    mine = _push_and_wait(own, at, there, room, elements, limit, blocks, RANK, SIZE)
    total = _tree(own, mine, at, there, elements, 0, SIZE, RANK)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % width, mask=there, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
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
    total = _tree(own, mine, at, there, elements, 0, SIZE, RANK)
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
):  # fmt: skip
    """One block of every rank's part."""
    at, there, own = _begun(x_ptr, count, BLOCK, PDL, WAYS)
    mine = _push_and_wait(own, at, there, room, elements, limit, blocks, RANK, SIZE)
    place = (at // width).to(tl.int64) * (SIZE * width) + at % width
    for rank in tl.static_range(SIZE):
        part = _of_rank(own, mine, at, there, elements, rank, RANK)
        tl.store(out_ptr + place + rank * width, part, mask=there)


@triton.jit
def _half(base, at, there):
    """The bits of 4-byte elements as the lower half of 64."""
    return tl.load(base + at, mask=there, other=0.0, volatile=True).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _largest_kernel(
    keys_ptr, out_ptr, room, count, width, stride, elements, blocks, limit,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The best of half a block of keys, which travel as two elements each, low half first."""
    at, entered, own = _begun(keys_ptr, count, BLOCK, PDL, WAYS)
    mine = _push_and_wait(own, at, entered, room, elements, limit, blocks, RANK, SIZE)
    row = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    there = row < count // 2
    best = tl.zeros([BLOCK // 2], tl.int64)
    for rank in tl.static_range(SIZE):
        base = keys_ptr if rank == RANK else mine + rank * elements.to(tl.int64)
        key = (_half(base, 2 * row + 1, there) << 32) | _half(base, 2 * row, there)
        best = tl.maximum(best, tl.where(key > 0, key - rank * width, 0))
    tl.store(out_ptr + row.to(tl.int64) * stride, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=there)


def exchange_added(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, room: Room, least: int | None = None
) -> Tensor:
    """round(residual + (sum over ranks of x [+ bias])), or the sum in fp32 without a residual.

    x has residual's shape, or an axis of 1, 2 or 4 ways in front, which are added as a tree first. From `least`
    elements on the sum goes in two turns; default: TWO_TURNS.

    Raises:
        ValueError: x is not contiguous fp32, or has no room.
    """
    ways = len(x) if residual is not None and x.dim() > residual.dim() else 1
    some = x[0] if ways > 1 else x
    _check(some, room)
    out = torch.empty_like(some if residual is None else residual)
    residual = None if residual is None else residual.contiguous()
    turns = (
        residual is not None
        and out.element_size() == 2
        and some.numel() >= (TWO_TURNS[room.size] if least is None else least)
    )
    _launch(_handed_kernel if turns else _added_kernel, some, (x, bias, residual, out), room, ways=ways)
    return out


def exchange_gather(x: Tensor, room: Room) -> Tensor:
    """x [..., W] of every rank side by side: [..., size * W].

    Raises:
        ValueError: as `exchange_added`.
    """
    _check(x, room)
    out = torch.empty(*x.shape[:-1], room.size * x.shape[-1], dtype=x.dtype, device=x.device)
    _launch(_gather_kernel, x, (x, out), room)
    return out


def exchange_largest(keys: Tensor, width: int, room: Room, out: Tensor) -> None:
    """Writes to out int64 [R] the id of each row's largest logit, by the keys uint64 [R] of each rank's `width` ids.

    Raises:
        ValueError: keys are not contiguous uint64, or have no room.
    """
    if keys.dtype != torch.uint64:
        raise ValueError(f"keys are {keys.dtype}; wanted torch.uint64")
    halves = keys.view(torch.float32)
    _check(halves, room)
    _launch(_largest_kernel, halves, (halves, out), room, (halves.numel(), width, out.stride(0)))


def _launch(
    kernel: object,
    x: Tensor,
    tensors: tuple[Tensor | None, ...],
    room: Room,
    numbers: tuple[int, ...] | None = None,
    ways: int = 1,
) -> None:
    pdl = has_pdl(x.device)
    launch(
        kernel,
        (blocks_of(x.numel()),),
        *tensors,
        (room.buffers, room.flags, room.epochs),
        *(numbers or (x.numel(), x.shape[-1])),
        *(room.elements, len(room.epochs), LIMIT),
        RANK=room.rank,
        SIZE=room.size,
        BLOCK=BLOCK,
        PDL=pdl,
        WAYS=ways,
        num_warps=NUM_WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )


def _check(x: Tensor, room: Room) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous() or x.numel() > room.elements:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, contiguous: {x.is_contiguous()}; wanted contiguous float32 of at most "
            f"{room.elements} elements"
        )
