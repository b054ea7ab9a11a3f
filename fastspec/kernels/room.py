"""Layout and size of the receive buffers through which the GPUs of one host exchange tensors.

exchange.py describes their use. This module needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK = 1024  # elements; constant, because the offset of a block in a buffer must not depend on the tensor
ALL = 2**62
# elements, by the number of ranks, from which a sum is two-shot. Two-shot sends fewer bytes, but waits twice. The
# number for eight ranks is computed from the bytes that leave a rank, not measured
TWO_SHOT = {2: 96 * 4096, 4: 20 * 4096, 8: 8 * 4096}
# elements, by the number of ranks, up to which one kernel all-reduces a layer's output and computes the next norm (in
# layers whose products have many rows). That kernel is one-shot: with more elements over many ranks, two kernels are
# faster
WITH_NORM = {2: ALL, 4: 20 * 4096, 8: 8 * 4096}
MAX_ELEMENTS = 2**24  # largest number of 4-byte elements that the kernel exchanges; larger tensors use NCCL
LIMIT = 120_000_000_000  # nanoseconds after which a CTA that waits for a peer stops the device
# bits of an element to which nothing was sent: a NaN in fp32. Each 16-bit half is a NaN in bf16 and in fp16. As the
# lower half of a key of `reference.keys_of` they would mean id 8257662, and no rank has so many ids.
EMPTY = 0xFF81FF81 - 2**32
_PIECE = 2 * 2**20  # bytes: the driver allocates memory in multiples of this


@dataclass(frozen=True, slots=True)
class Room:
    """Receive buffers of the ranks of a host. Every rank can write to all of them.

    Attributes:
        rank: index of this rank.
        size: number of ranks.
        elements: largest number of 4-byte elements of an exchanged tensor.
        buffers: int64 [size], the address of each rank's buffer. A buffer is fp32 [2, size, elements]: two halves, each
            with `elements` from every sending rank. All elements are EMPTY at first.
        turns: int32 [blocks], zeros at first. For each block of BLOCK elements, the half (0 or 1) that this rank uses
            in its next exchange.
        held: objects that own the memory, kept alive.
    """

    rank: int
    size: int
    elements: int
    buffers: Tensor
    turns: Tensor
    held: tuple[object, ...] = ()


def blocks_of(elements: int) -> int:
    """Returns the number of blocks of BLOCK elements into which a tensor of `elements` elements is divided."""
    return -(-elements // BLOCK)


def takes_prompts(prompts: int) -> bool:
    """True if prefill passes all-reduce through a `Room` instead of NCCL.

    Args:
        prompts: number of 4-byte elements of the largest tensor that a prefill pass all-reduces.
    """
    return 0 < prompts <= MAX_ELEMENTS


def elements_of(step: int, prompts: int) -> int:
    """Returns the value for `Room.elements`, rounded up to whole blocks. For the arguments see `room_bytes`."""
    largest = max(step, prompts if takes_prompts(prompts) else 0)
    return blocks_of(min(largest, MAX_ELEMENTS)) * BLOCK


def buffer_bytes(size: int, elements: int) -> int:
    """Returns the bytes of one rank's receive buffer, rounded up to the driver's unit of allocation.

    For `size` and `elements` see `Room`.
    """
    return -(-2 * size * elements * 4 // _PIECE) * _PIECE


def room_bytes(size: int, step: int, prompts: int) -> int:
    """Returns the bytes of device memory that each rank needs for a `Room`.

    Args:
        size: number of ranks. A single rank needs no memory.
        step: number of 4-byte elements of the largest tensor that a decoding step exchanges.
        prompts: number of 4-byte elements of the largest tensor that a prefill pass all-reduces.
    """
    return 0 if size == 1 else buffer_bytes(size, elements_of(step, prompts))
