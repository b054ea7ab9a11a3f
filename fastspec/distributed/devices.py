"""Exchange between GPUs of one host: by a kernel of ours where they reach each other's memory, else by NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastspec.distributed.exchange import add_rounded, one_way, tree_sum
from fastspec.distributed.peer_memory import SharedMemory
from fastspec.distributed.world import World
from fastspec.errors import RankFailed
from fastspec.kernels.reference import largest_of
from fastspec.kernels.room import EMPTY, Room, blocks_of, buffer_bytes, elements_of, takes_prompts


class OverDevices:
    """Exchange of CUDA tensors; all of it can be captured.

    Tensors of a step and of passes over prompts are pushed into the peers' memory. What is too large for that goes by
    NCCL: each rank gets its rows of all partial sums, adds them in the order of the tree, and gives the rounded rows
    to the others.

    Args:
        world: of all ranks, one GPU each.
        device: this rank's, the current one.
        elements: of 4 bytes, of the largest tensor of a step.
        prompts: likewise, of a pass over prompts.
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
        """Describes the exchange for `explain`."""
        if self.room is None:
            return f"NCCL in the graph, for {self._why}"
        prompts = "" if self._prompts else "; prompts by NCCL"
        return f"pushed into the peers' memory by a kernel of the step, added as one tree in fp32{prompts}"

    def sum(self, partial: Tensor) -> Tensor:
        """Sums fp32 tensors over ranks."""
        if (room := self._room_for(partial)) is not None:
            return self._kernels.exchange_added(partial, None, None, room)
        return tree_sum(self._gathered(partial))

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Adds the sum over ranks [and bias] to residual, rounded once."""
        if (room := self._room_for(residual)) is not None and partial.is_contiguous():
            return self._kernels.exchange_added(partial, bias, residual, room)
        partial = one_way(partial, residual)
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
        """Joins the parts of all ranks along the last axis."""
        if (room := self._room_for(part)) is not None:
            return self._kernels.exchange_gather(part, room)
        return torch.cat(self._gathered(part), dim=-1)

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """Writes the id of each row's largest logit to out."""
        halves = keys.view(torch.float32)
        if (room := self._room_for(halves)) is not None:
            self._kernels.exchange_largest(keys, width, room, out)
        else:
            out.copy_(largest_of([each.view(torch.int64) for each in self._gathered(halves)], width))

    def _room_for(self, tensor: Tensor) -> Room | None:
        """The room for a tensor; None where it goes by NCCL."""
        fits = self.room is not None and tensor.numel() <= self.room.elements and tensor.is_contiguous()
        return self.room if fits else None

    def _group(self) -> Any:
        """NCCL's communicator. Making one takes most of a second and a capture may not, so one is made early or never.

        A pass goes by all its exchanges once before it is captured, so what is not seen beforehand is made then.
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
    """One call of NCCL, whose name newer versions of torch have changed."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def _room_of(world: World, device: torch.device, elements: int) -> tuple[Room | None, str]:
    """Memory that all ranks reach, or why there is none: the same answer on all ranks."""
    made, why = None, ""
    reached = all(torch.cuda.can_device_access_peer(device.index, peer) for peer in _others(world, device))
    if not all(world.gather_bytes(b"yes" if reached else b"")):
        return None, "the GPUs do not reach each other's memory"
    try:
        made = _shared(world, device, elements)
    except RankFailed:
        raise
    except (RuntimeError, OSError) as error:
        why = f"shared memory of the GPUs cannot be had ({str(error).splitlines()[0]})"
    told = world.gather_bytes(why.encode())  # from here on the room of each is EMPTY
    refused = next((each.decode() for each in told if each), "")
    return (None, refused) if refused else (made, "")


def _others(world: World, device: torch.device) -> list[int]:
    indices = world.gather(torch.tensor([device.index], dtype=torch.int64, device="cpu"))
    return [int(index) for index in indices if int(index) != device.index]


def _shared(world: World, device: torch.device, elements: int) -> Room:
    """A room of all ranks. None may be used before all are made."""
    torch.cuda.current_stream(device).synchronize()  # the device's context is current from here on
    memory = SharedMemory(buffer_bytes(world.size, elements), EMPTY, world.gather_bytes, world.rank)
    buffers = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
    turns = torch.zeros(blocks_of(elements), dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    return Room(world.rank, world.size, elements, buffers, turns, (memory,))
