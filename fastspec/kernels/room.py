"""Layout and size of the memory that GPUs of one host share for their exchanges.

`exchange` describes its use. This module needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK = 1024  # elements; constant, because the place of a block in the room must not depend on the tensor
ALL = 2**62
# elements, by the number of ranks, from which a sum is two-shot. Two-shot sends fewer bytes, but waits twice. The
# number for eight ranks is computed from the bytes that leave a rank, not measured
TWO_SHOT = {2: 96 * 4096, 4: 20 * 4096, 8: 8 * 4096}
# elements, by the number of ranks, up to which one kernel computes a sum between products of many rows and the next
# norm. That kernel is one-shot: for more elements over many ranks two kernels are faster
WITH_NORM = {2: ALL, 4: 20 * 4096, 8: 8 * 4096}
MAX_ELEMENTS = 2**24  # largest number of 4-byte elements that the kernel exchanges; larger tensors use NCCL
LIMIT = 120_000_000_000  # nanoseconds after which a CTA that waits for a peer stops the device
# bits of an element to which nothing was sent: a NaN in fp32. Either half is a NaN in bf16 and in fp16. As the lower
# half of a key of `reference.keys_of` they would mean id 8257662, and no rank has so many ids.
EMPTY = 0xFF81FF81 - 2**32
_PIECE = 2 * 2**20  # bytes: the driver allocates memory in multiples of this


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that the ranks of a host share.

    Attributes:
        rank, size: this process, and the number of ranks.
        elements: 4-byte elements of the largest tensor.
        buffers: int64 [size], addresses of each rank's fp32 [2, size, elements]. All elements are EMPTY at first.
        turns: int32 [blocks], zeros at first: the half that a block of this rank uses next.
        held: the memory itself, kept alive.
    """

    rank: int
    size: int
    elements: int
    buffers: Tensor
    turns: Tensor
    held: tuple[object, ...] = ()


def blocks_of(elements: int) -> int:
    """Returns the number of blocks of a tensor."""
    return -(-elements // BLOCK)


def takes_prompts(prompts: int) -> bool:
    """True if sums of `prompts` elements fit into the room. Prefill passes then use the room instead of NCCL."""
    return 0 < prompts <= MAX_ELEMENTS


def elements_of(step: int, prompts: int) -> int:
    """Returns the elements of a room, in whole blocks, for the largest tensors of a step and of a prefill pass."""
    largest = max(step, prompts if takes_prompts(prompts) else 0)
    return blocks_of(min(largest, MAX_ELEMENTS)) * BLOCK


def buffer_bytes(size: int, elements: int) -> int:
    """Returns the bytes of a rank's buffers for a room, rounded up to the driver's unit of allocation."""
    return -(-2 * size * elements * 4 // _PIECE) * _PIECE


def room_bytes(size: int, step: int, prompts: int) -> int:
    """Returns the bytes of one rank's memory for the room.

    Args:
        size: number of ranks. A single rank has no room.
        step: 4-byte elements of the largest tensor of a step.
        prompts: 4-byte elements of the largest sum in a prefill pass.
    """
    return 0 if size == 1 else buffer_bytes(size, elements_of(step, prompts))
