"""Exchange between GPUs of one host: by a kernel of ours where they reach each other's memory, else by NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastspec.kernels.reference import largest_of
from fastspec.kernels.room import WORD_BLOCK, Room, blocks_of, elements_of, places_of, takes_prompts, words_of
from fastspec.parallel.exchange import add_rounded, one_way, tree_sum
from fastspec.parallel.world import World


class OverDevices:
    """Exchange of CUDA tensors; all of it can be captured.

    Tensors of a step are pushed into the peers' memory, between two GPUs those of prompts as well. What is larger goes
    by NCCL: each rank gets its rows of all partial sums, adds them in the order of the tree, and gives the rounded rows
    to the others.

    Args:
        world: of all ranks, one GPU each.
        device: this rank's, the current one.
        elements: of 4 bytes, of the largest tensor of a step.
        prompts: likewise, of a pass over prompts.
    """

    def __init__(self, world: World, device: torch.device, elements: int, prompts: int = 0) -> None:
        from fastspec.kernels import exchange

        self._world, self._kernels = world, exchange
        self._group: Any = dist.new_group(list(range(world.size)), backend="nccl")
        warm = torch.zeros(world.size, dtype=torch.float32, device=device)
        dist.all_reduce(warm, group=self._group)  # makes the communicator, which no capture may
        torch.cuda.synchronize(device)
        self._prompts = takes_prompts(world.size, prompts)
        self.room, self._why = _room_of(world, device, self._group, elements_of(world.size, elements, prompts))

    def describe(self) -> str:
        """As in `Exchange`."""
        if self.room is None:
            return f"NCCL in the graph, for {self._why}"
        prompts = "" if self._prompts else "; prompts by NCCL"
        return f"pushed into the peers' memory by a kernel of the step, added as one tree in fp32{prompts}"

    def sum(self, partial: Tensor) -> Tensor:
        """As in `Exchange`."""
        if (room := self._room_for(partial)) is not None:
            return self._kernels.exchange_added(partial, None, None, room)
        return tree_sum(self._gathered(partial))

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """As in `Exchange`."""
        if (room := self._room_for(residual)) is not None and partial.is_contiguous():
            return self._kernels.exchange_added(partial, bias, residual, room)
        partial = one_way(partial, residual)
        rows, size = partial.view(-1, partial.shape[-1]), self._world.size
        if len(rows) % size:
            return add_rounded(tree_sum(self._gathered(partial)), bias, residual)
        others = torch.empty_like(rows)
        dist.all_to_all_single(others, rows, group=self._group)
        own = residual.reshape(rows.shape).chunk(size)[self._world.rank]
        mine = add_rounded(tree_sum(others.chunk(size)), bias, own)
        out = torch.empty(rows.shape, dtype=residual.dtype, device=residual.device)
        _all_gather(out, mine, self._group)
        return out.view(residual.shape)

    def gather(self, part: Tensor) -> Tensor:
        """As in `Exchange`."""
        if (room := self._room_for(part)) is not None:
            return self._kernels.exchange_gather(part, room)
        return torch.cat(self._gathered(part), dim=-1)

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """As in `Exchange`."""
        halves = keys.view(torch.float32)
        if (room := self._room_for(halves)) is not None:
            self._kernels.exchange_largest(keys, width, room, out)
        else:
            out.copy_(largest_of([each.view(torch.int64) for each in self._gathered(halves)], width))

    def _room_for(self, tensor: Tensor) -> Room | None:
        """The room for a tensor; None where it goes by NCCL."""
        fits = self.room is not None and tensor.numel() <= self.room.elements and tensor.is_contiguous()
        return self.room if fits else None

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        out = torch.empty(self._world.size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        _all_gather(out.view(-1), tensor.contiguous().view(-1), self._group)
        return list(out)


def _all_gather(out: Tensor, part: Tensor, group: Any) -> None:
    """One call of NCCL, whose name newer versions of torch have changed."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def _room_of(world: World, device: torch.device, group: Any, elements: int) -> tuple[Room | None, str]:
    """Memory that all ranks reach, or why there is none: the same answer on all ranks."""
    made, why = None, ""
    if all(torch.cuda.can_device_access_peer(device.index, peer) for peer in _others(world, device)):
        try:
            made = _symmetric(world, device, group, elements)
        except (RuntimeError, ImportError) as error:
            why = f"shared memory of the GPUs cannot be had ({str(error).splitlines()[0]})"
    else:
        why = "the GPUs do not reach each other's memory"
    told = world.gather_bytes(why.encode())
    refused = next((each.decode() for each in told if each), "")
    return (None, refused) if refused else (made, "")


def _others(world: World, device: torch.device) -> list[int]:
    indices = world.gather(torch.tensor([device.index], dtype=torch.int64, device="cpu"))
    return [int(index) for index in indices if int(index) != device.index]


def _symmetric(world: World, device: torch.device, group: Any, elements: int) -> Room:
    """Symmetric memory of torch, and where it lies on each rank. Plain peer access: no multicast."""
    import torch.distributed._symmetric_memory as symmetric

    places, blocks, max_words = places_of(world.size, elements), blocks_of(elements), words_of(world.size, elements)
    # all at once: for each tensor of its own the ranks would meet once more
    memory = symmetric.empty(places.total // 4, dtype=torch.int32, device=device)
    memory[: places.buffers // 4].zero_()
    shared = symmetric.rendezvous(memory, group)
    torch.cuda.synchronize(device)
    world.gather_bytes(b"")  # all flags and words are zero
    words, flags, buffers = (
        torch.tensor([base + place for base in shared.buffer_ptrs], dtype=torch.int64, device=device)
        for place in (places.words, places.flags, places.buffers)
    )
    epochs, word_epochs = (
        torch.zeros(count, dtype=torch.int32, device=device) for count in (blocks, -(-max_words // WORD_BLOCK))
    )
    pushed = (elements, buffers, flags, epochs)
    return Room(world.rank, world.size, *pushed, max_words, words, word_epochs, (memory, shared))
