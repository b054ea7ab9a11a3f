"""Exchanges between GPUs of one host: by Triton kernels if the GPUs reach each other's memory, else by NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastspec.distributed.exchange import add_rounded, sum_parts, tree_sum
from fastspec.distributed.peer_memory import SharedMemory
from fastspec.distributed.world import World
from fastspec.errors import RankFailed
from fastspec.kernels.reference import largest_of
from fastspec.kernels.room import EMPTY, Room, blocks_of, buffer_bytes, elements_of, takes_prompts


class OverDevices:
    """Exchange of CUDA tensors. All operations can be captured in a CUDA graph.

    A kernel writes a tensor that fits into `room` to the other GPUs' memory. Larger tensors use NCCL. With NCCL, each
    rank receives a part of the rows of all ranks' partial sums. It adds them as one binary tree, and sends the rounded
    rows to all ranks.

    Args:
        world: all ranks, with one GPU each.
        device: the CUDA device of this rank, which is the current device.
        elements: number of 4-byte elements of the largest tensor of a step.
        prompts: number of 4-byte elements of the largest tensor of a prefill pass.

    Attributes:
        room: memory on all GPUs to which all ranks can write. None: the GPUs do not reach each other's memory.
    """

    def __init__(self, world: World, device: torch.device, elements: int, prompts: int = 0) -> None:
        from fastspec.kernels import exchange

        self._world, self._kernels, self._device = world, exchange, device
        self._prompts = takes_prompts(prompts)
        self.room, self._why = _room_of(world, device, elements_of(elements, prompts))
        self._nccl: Any = None
        if self.room is None or self.room.elements < max(elements, prompts):
            self._group()

    def describe(self) -> str:
        """Describes how ranks exchange tensors, as a short text for `explain`."""
        if self.room is None:
            return f"NCCL in the graph, because {self._why}"
        prompts = "" if self._prompts else "; prompts by NCCL"
        return f"pushed into the peers' memory by a kernel of the step, added as one tree in fp32{prompts}"

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum of all ranks' `partial`; see `Exchange.sum`."""
        if (room := self._room_for(partial)) is not None:
            return self._kernels.exchange_added(partial, None, None, room)
        return tree_sum(self._gathered(partial))

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Returns residual + the sum of all ranks' `partial` [+ bias]; see `Exchange.added`."""
        if (room := self._room_for(residual)) is not None and partial.is_contiguous():
            return self._kernels.exchange_added(partial, bias, residual, room)
        partial = sum_parts(partial, residual)
        rows, size = partial.view(-1, partial.shape[-1]), self._world.size
        if len(rows) % size:
            return add_rounded(tree_sum(self._gathered(partial)), bias, residual)
        others = torch.empty_like(rows)
        dist.all_to_all_single(others, rows, group=self._group())
        own = residual.reshape(rows.shape).chunk(size)[self._world.rank]
        mine = add_rounded(tree_sum(others.chunk(size)), bias, own)
        out = torch.empty(rows.shape, dtype=residual.dtype, device=residual.device)
        _all_gather(out, mine, self._group())
        return out.view(residual.shape)

    def gather(self, part: Tensor) -> Tensor:
        """Returns all ranks' `part`, joined along the last axis; see `Exchange.gather`."""
        if (room := self._room_for(part)) is not None:
            return self._kernels.exchange_gather(part, room)
        return torch.cat(self._gathered(part), dim=-1)

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """Writes the id of each row's largest logit over all ranks to `out`; see `Exchange.largest`."""
        halves = keys.view(torch.float32)
        if (room := self._room_for(halves)) is not None:
            self._kernels.exchange_largest(keys, width, room, out)
        else:
            out.copy_(largest_of([each.view(torch.int64) for each in self._gathered(halves)], width))

    def _room_for(self, tensor: Tensor) -> Room | None:
        """Returns the memory through which kernels exchange a tensor. None if the tensor must use NCCL."""
        fits = self.room is not None and tensor.numel() <= self.room.elements and tensor.is_contiguous()
        return self.room if fits else None

    def _group(self) -> Any:
        """Returns the NCCL communicator, and creates it at the first call.

        Creation takes about 1 s and cannot happen during graph capture. Every pass runs once before its capture, so the
        communicator exists by then.
        """
        if self._nccl is None:
            self._nccl = dist.new_group(list(range(self._world.size)), backend="nccl")
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self._device), group=self._nccl)
            torch.cuda.synchronize(self._device)
        return self._nccl

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        out = torch.empty(self._world.size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        _all_gather(out.view(-1), tensor.contiguous().view(-1), self._group())
        return list(out)


def _all_gather(out: Tensor, part: Tensor, group: Any) -> None:
    """Calls NCCL's all-gather, which has another name in newer versions of torch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def _room_of(world: World, device: torch.device, elements: int) -> tuple[Room | None, str]:
    """Allocates GPU memory to which all ranks can write. Waits for all ranks, which get the same result.

    Args:
        world: all ranks, with one GPU each.
        device: the GPU of this rank.
        elements: number of 4-byte elements of the largest tensor to exchange.

    Returns:
        (memory, "") or (None, reason why it is not possible).
    """
    made, why = None, ""
    reached = all(torch.cuda.can_device_access_peer(device.index, peer) for peer in _others(world, device))
    if not all(world.gather_bytes(b"yes" if reached else b"")):
        return None, "the GPUs do not reach each other's memory"
    try:
        made = _shared(world, device, elements)
    except RankFailed:
        raise
    except (RuntimeError, OSError) as error:
        why = f"shared memory of the GPUs cannot be allocated ({str(error).splitlines()[0]})"
    told = world.gather_bytes(why.encode())  # also a barrier: all ranks have initialised their room to EMPTY
    refused = next((each.decode() for each in told if each), "")
    return (None, refused) if refused else (made, "")


def _others(world: World, device: torch.device) -> list[int]:
    indices = world.gather(torch.tensor([device.index], dtype=torch.int64, device="cpu"))
    return [int(index) for index in indices if int(index) != device.index]


def _shared(world: World, device: torch.device, elements: int) -> Room:
    """Allocates this rank's part of the shared memory, and opens the parts of the other ranks.

    A rank may use the memory only after all ranks have allocated their parts.
    """
    torch.cuda.current_stream(device).synchronize()  # makes the CUDA context of the device current
    memory = SharedMemory(buffer_bytes(world.size, elements), EMPTY, world.gather_bytes, world.rank)
    buffers = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
    turns = torch.zeros(blocks_of(elements), dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    return Room(world.rank, world.size, elements, buffers, turns, (memory,))
