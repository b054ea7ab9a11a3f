"""The memory that GPUs of one host share for their exchanges: how it is laid out, and how much it is.

`exchange` says how it is used. This is arithmetic, and needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# fixed: where a block lies in the room must not depend on the tensor
BLOCK, WORD_BLOCK = 1024, 512  # WORD_BLOCK: of what goes as words
ALL = 2**62
# elements, by the number of ranks, from which a sum is two-shot: fewer bytes than one-shot, where all ranks get all
# partial sums, but a second wait. ALL: not timed on so many
TWO_SHOT = {2: 256 * 4096, 4: ALL, 8: ALL}
# elements, by the number of ranks, up to which they go as words: as many bytes leave a rank of four and eight as of two
WORDS = {2: 48 * 4096, 4: 16 * 4096, 8: 6 * 4096}
# elements of the room, by the number of ranks, up to which a sum in a chain of products of many rows is one kernel with
# the norm behind it; 0: not timed on so many
WITH_NORM = {2: ALL, 4: 0, 8: 0}
MAX_ELEMENTS = 2**24  # 4-byte elements that the kernel exchanges at once; more go to NCCL
LIMIT = 120_000_000_000  # nanoseconds that a program waits for a peer at most
_PIECE = 2 * 2**20  # bytes: the device gives shared memory in whole pieces
_PAD = 9216  # bytes of torch's own after it, at most


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that the ranks of a host share.

    Attributes:
        rank, size: of this process.
        elements: of 4 bytes, of the largest tensor.
        buffers: int64 [size], where each rank's fp32 [2, size, elements] lies.
        flags: int64 [size], where each rank's int32 [size, blocks] lies, zeros at first.
        epochs: int32 [blocks], this rank's own, zeros at first.
        max_words: elements of the largest tensor that goes as words.
        words: int64 [size], where each rank's int64 [2, size, max_words] lies, zeros at first.
        word_epochs: int32 [blocks of WORD_BLOCK], as epochs.
        held: the memory itself, kept alive.
    """

    rank: int
    size: int
    elements: int
    buffers: Tensor
    flags: Tensor
    epochs: Tensor
    max_words: int
    words: Tensor
    word_epochs: Tensor
    held: tuple[object, ...] = ()


def blocks_of(elements: int) -> int:
    """Blocks of a tensor."""
    return -(-elements // BLOCK)


def takes_prompts(size: int, prompts: int) -> bool:
    """Whether sums of prompts have a room between so many ranks: where that is faster than NCCL."""
    return 0 < prompts <= MAX_ELEMENTS and TWO_SHOT[size] < MAX_ELEMENTS


def elements_of(size: int, step: int, prompts: int) -> int:
    """Elements of a room, in whole blocks, for the largest tensors of a step and of a pass over prompts."""
    largest = max(step, prompts if takes_prompts(size, prompts) else 0)
    return blocks_of(min(largest, MAX_ELEMENTS)) * BLOCK


def words_of(size: int, elements: int) -> int:
    """Elements of the largest tensor that goes as words in such a room."""
    return min(elements, WORDS[size])


class Places(NamedTuple):
    """Bytes at which words, flags and buffers begin in a rank's memory, and how many there are in all."""

    words: int
    flags: int
    buffers: int
    total: int


def places_of(size: int, elements: int) -> Places:
    """Where what such a room is made of lies; each at a multiple of 256 bytes."""
    flags = 2 * size * words_of(size, elements) * 8
    buffers = flags + -(-size * blocks_of(elements) * 4 // 256) * 256
    return Places(0, flags, buffers, buffers + 2 * size * elements * 4)


def room_bytes(size: int, step: int, prompts: int) -> int:
    """Bytes of a rank's own memory that its room takes.

    Args:
        size: ranks; one alone has no room.
        step, prompts: 4-byte elements of the largest tensor of a step, and of a sum in a pass over prompts.
    """
    if size == 1:
        return 0
    return -(-(places_of(size, elements_of(size, step, prompts)).total + _PAD) // _PIECE) * _PIECE
