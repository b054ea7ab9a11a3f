"""Sends new weights from a trainer to generators in other processes, over a group of torch.distributed.

    trainer:    send(model.state_dict().items())
    generator:  generator.update_weights(receive(device=generator.device), version=step)

Every process of the group calls one of the two functions. The trainer first sends names, dtypes and shapes. Then it
sends the values in pieces, each with one broadcast: over NCCL between GPUs, or over gloo between CPUs. With
`tensor_parallel` every rank receives whole tensors, and keeps its slices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fastspec.errors import UnsupportedOption

__all__ = ["receive", "send"]

_PIECE = 256 * 2**20  # largest number of bytes of a broadcast with several tensors; a larger tensor is sent alone
_DTYPES = {str(each): each for each in (torch.bfloat16, torch.float16, torch.float32)}
_ALIGNED = 16  # alignment in bytes of each tensor in a piece, so that it can be viewed in its dtype
Described = tuple[str, str, list[int]]  # name, dtype, shape


def send(tensors: Iterable[tuple[str, Tensor]], *, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Sends tensors to all other processes of a group, which call `receive`.

    Args:
        tensors: (name, tensor) pairs, with the names of the checkpoint.
        group: process group of trainer and generators. None: the default group.
        source: global rank of this process.

    Raises:
        UnsupportedOption: a dtype other than bfloat16, float16 or float32. Nothing was sent then.
    """
    given = [(name, tensor.detach()) for name, tensor in tensors]
    for name, tensor in given:
        if str(tensor.dtype) not in _DTYPES:
            raise UnsupportedOption(f"{name} is of {tensor.dtype}; weights are bfloat16, float16 or float32")
    described: list[Described] = [(name, str(each.dtype), list(each.shape)) for name, each in given]
    device = given[0][1].device if given else torch.device("cpu")
    text = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8).to(device)
    dist.broadcast(torch.tensor([len(text)], device=device), source, group=group)
    dist.broadcast(text, source, group=group)
    by_name = dict(given)
    for piece in _pieces(described):
        room = torch.zeros(sum(map(_bytes_of, piece)), dtype=torch.uint8, device=device)
        for (name, _, _), place in zip(piece, _places(piece, room), strict=True):
            place.copy_(by_name[name])
        dist.broadcast(room, source, group=group)


def receive(
    *, device: torch.device | str, group: dist.ProcessGroup | None = None, source: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Receives the tensors that the trainer sends with `send`. Yields (name, tensor) pairs.

    `FastSpecGenerator.update_weights` takes the result.

    Args:
        device: device of the tensors: a GPU with NCCL, or "cpu" with gloo.
        group: process group of trainer and generators. None: the default group.
        source: global rank of the trainer's process that calls `send`.
    """
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(size, source, group=group)
    text = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(text, source, group=group)
    described: list[Described] = json.loads(bytes(text.tolist()))
    for piece in _pieces(described):
        room = torch.zeros(sum(map(_bytes_of, piece)), dtype=torch.uint8, device=device)
        dist.broadcast(room, source, group=group)
        yield from ((name, place) for (name, _, _), place in zip(piece, _places(piece, room), strict=True))


def _bytes_of(described: Described) -> int:
    """Returns the number of bytes that a tensor occupies in a piece, with padding."""
    _, dtype, shape = described
    return -(-torch.Size(shape).numel() * _DTYPES[dtype].itemsize // _ALIGNED) * _ALIGNED


def _pieces(described: list[Described]) -> Iterator[list[Described]]:
    """Splits a list of tensors into pieces. One broadcast sends the tensors of one piece."""
    piece, size = list[Described](), 0
    for each in described:
        if piece and size + _bytes_of(each) > _PIECE:
            yield piece
            piece, size = [], 0
        piece.append(each)
        size += _bytes_of(each)
    if piece:
        yield piece


def _places(piece: list[Described], room: Tensor) -> Iterator[Tensor]:
    """Yields a view of each tensor of a piece in the memory `room`, uint8 [bytes of the piece]."""
    start = 0
    for each in piece:
        _, dtype, shape = each
        size = torch.Size(shape).numel() * _DTYPES[dtype].itemsize
        yield room[start : start + size].view(_DTYPES[dtype]).view(shape)
        start += _bytes_of(each)
