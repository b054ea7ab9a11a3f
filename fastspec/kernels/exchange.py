"""All-reduce, all-gather and argmax over the GPUs of one host, inside a captured CUDA graph.

Each rank writes directly into the receive buffers of the others. Their memory is a `Room` (room.py).

    exchange_added:   out = round(residual + (x_0 + x_1 + ..  [+ bias]))     x_r: fp32 addends of rank r
    exchange_gather:  out = x_0 | x_1 | ..                                   joined along the last axis
    exchange_largest: out = id of the largest logit of all ranks. Each rank gives its largest logit with the id as one
                      integer, a key (`reference.keys_of`)

| argument | shape, dtype                                | notes                                                    |
|----------|---------------------------------------------|----------------------------------------------------------|
| x        | [M, N] fp32                                 | contiguous, at most `Room.elements` elements             |
|          | [PARTS, M, N] fp32, `exchange_added` only   | split-K partial sums, added first as a tree; PARTS 1, 2, 4 |
| keys     | [R] uint64, `exchange_largest` only         | contiguous; a key counts as two elements                 |
| residual | [M, N] bf16, fp16 or fp32                   | None: out is the sum, in fp32                            |
| bias     | [N], any float dtype                        | or None                                                  |

Every rank adds the addends of all ranks as one binary tree, neighbours first. So all ranks get the same bits.

Elements arrive without flags (the Lamport all-reduce of TensorRT-LLM). An element of a receive buffer to which nothing
was sent holds EMPTY, a NaN whose bits are never sent. A reader polls the element until it holds another value, and then
sets it to EMPTY again. So no rank waits for a flag. The address of an element depends only on its index in the tensor.

A tensor is exchanged in blocks of BLOCK elements. A receive buffer has two halves, which successive exchanges of a
block use in turn. Rank A writes to the same half of rank B again two exchanges later. By then A has received B's data
of the exchange in between. B emptied the half before it sent that data. So A overwrites nothing that B still reads.

A large sum is two-shot: one rank adds each block, and sends the sum to the others in 16 bits. A small sum is one-shot:
every rank gets the addends of all ranks, and adds them. In both cases no rank ends an exchange of a block before all
others have begun it; the two halves rely on that.

A CTA that waits for longer than LIMIT stops the device with an error. So no kernel waits for ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.common.launch import launch
from fastspec.kernels.exchange_kernels import _gather_kernel, _largest_kernel, _one_shot_kernel, _two_shot_kernel
from fastspec.kernels.room import BLOCK, LIMIT, TWO_SHOT, Room

NUM_WARPS = 4


def exchange_added(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, room: Room, least: int | None = None
) -> Tensor:
    """All-reduces x: adds it over all ranks, then adds bias and residual.

    Args:
        x: fp32 [M, N], or [parts, M, N] with 1, 2 or 4 split-K partial sums, which are added as a tree.
        bias: [N]. None: no bias is added.
        residual: [M, N]. None: no residual is added.
        room: receive buffers of the ranks.
        least: smallest number of elements of a two-shot sum, if the residual has 16 bits. Smaller sums are one-shot.
            None: TWO_SHOT for this number of ranks.

    Returns:
        [M, N], round(residual + (sum over ranks of x [+ bias])) in the residual's dtype. Without a residual, fp32.

    Raises:
        ValueError: x is not contiguous fp32, or is larger than the room.
    """
    parts = len(x) if residual is not None and x.dim() > residual.dim() else 1
    some = x[0] if parts > 1 else x
    _check(some, room)
    out = torch.empty_like(some if residual is None else residual)
    residual = None if residual is None else residual.contiguous()
    two_shot = (
        residual is not None
        and out.element_size() == 2
        and some.numel() >= (TWO_SHOT[room.size] if least is None else least)
    )
    _launch(
        _two_shot_kernel if two_shot else _one_shot_kernel,
        some,
        (x, bias, residual, out),
        room,
        parts=parts,
    )
    return out


def exchange_gather(x: Tensor, room: Room) -> Tensor:
    """All-gathers x, fp32 [..., W], along the last axis. Returns [..., ranks * W].

    Raises:
        ValueError: x is not contiguous fp32, or is larger than the room.
    """
    _check(x, room)
    out = torch.empty(*x.shape[:-1], room.size * x.shape[-1], dtype=x.dtype, device=x.device)
    _launch(_gather_kernel, x, (x, out), room)
    return out


def exchange_largest(keys: Tensor, width: int, room: Room, out: Tensor) -> None:
    """Computes the argmax of logits rows whose vocabulary is divided between ranks.

    Args:
        keys: uint64 [R], a key for each row: the largest logit of this rank joined with its id, see
            `reference.keys_of`.
        width: number of vocabulary ids that each rank has.
        room: receive buffers of the ranks.
        out: output, int64 [R] with any stride: each row's argmax, an id in the whole vocabulary.

    Raises:
        ValueError: keys are not contiguous uint64, or do not fit in the room.
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
    parts: int = 1,
) -> None:
    launch(
        kernel,
        (-(-x.numel() // BLOCK),),
        *tensors,
        (room.buffers, room.turns),
        *(numbers or (x.numel(), x.shape[-1])),
        *(room.elements, LIMIT),
        RANK=room.rank,
        SIZE=room.size,
        BLOCK=BLOCK,
        PARTS=parts,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def _check(x: Tensor, room: Room) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous() or x.numel() > room.elements:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, contiguous: {x.is_contiguous()}; wanted contiguous float32 of at most "
            f"{room.elements} elements"
        )
