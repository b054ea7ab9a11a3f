"""TextIndex: texts on the device, with a table of their token sequences, in static arrays that a step searches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.kernels.reference.lookup import TextTable

_UNUSED = torch.iinfo(torch.int64).max


def rungs_between(shortest: int, longest: int) -> tuple[int, ...]:
    """Returns the lengths of the token sequences that a `TextIndex` hashes.

    They are both arguments, and the powers of two between them, ascending.
    """
    powers = (2**power for power in range(longest.bit_length()))
    return tuple(sorted({shortest, longest, *(one for one in powers if shortest < one < longest)}))


class TextIndex:
    """Tokens of several texts, and a sorted table of the hashes of their token sequences.

    `Ops.look_up` finds a token sequence by binary search in the table. Because hashes may collide, it then compares the
    tokens. The host writes texts between steps, in the CUDA stream of the steps, and then calls `sort`. Addresses never
    change.

    Args:
        capacity: largest number of tokens of all texts.
        rungs: lengths of the sequences in the table, ascending, each at least 1.
        device: device of the arrays.

    Attributes:
        capacity: see Args.
        table: tokens, hashes and places of the sequences, as device arrays.
    """

    def __init__(self, capacity: int, rungs: tuple[int, ...], device: torch.device) -> None:
        self.capacity = capacity

        def filled(size: int, value: int) -> torch.Tensor:
            return torch.full((size,), value, dtype=torch.int64, device=device)

        self.table = TextTable(
            tokens=filled(capacity, 0),
            texts=filled(capacity, -1),
            owners=filled(capacity, 0),
            keys=filled(capacity * len(rungs), _UNUSED),
            places=filled(capacity * len(rungs), 0),
            factors=_numbers(rungs[-1] + 2, device),
            lengths=torch.tensor(rungs, device=device),
            rungs=rungs,
        )

    @staticmethod
    def nbytes(capacity: int, rungs: tuple[int, ...]) -> int:
        """Returns the number of bytes of the arrays of an index."""
        return 8 * capacity * (3 + 2 * len(rungs))

    def write(self, start: int, tokens: Sequence[int], text: int, owner: int) -> None:
        """Queues the copy of a text to the index. `sort` must be called afterwards.

        Args:
            start: index in the array of tokens at which the text begins.
            tokens: token ids of the text.
            text: number that identifies the text.
            owner: number of the group of requests that may search the text, see `Suffix.owner_of`.
        """
        if not tokens:
            return
        stop = start + len(tokens)
        sent = torch.frombuffer(array("q", tokens), dtype=torch.int64)
        on_gpu = self.table.tokens.device.type == "cuda"
        self.table.tokens[start:stop].copy_(sent.pin_memory() if on_gpu else sent, non_blocking=on_gpu)
        self.table.texts[start:stop].fill_(text)
        self.table.owners[start:stop].fill_(owner)

    def erase(self, start: int, stop: int) -> None:
        """Removes the tokens at indices start..stop-1 of the array of tokens.

        `sort` must be called afterwards, to remove their sequences from the table of hashes.
        """
        self.table.texts[start:stop].fill_(-1)
        self.table.tokens[start:stop].zero_()

    def sort(self) -> None:
        """Computes the table of hashes again from the texts. Equal hashes are ordered by their places in the array."""
        table, rungs = self.table, self.table.rungs
        place = torch.arange(self.capacity, device=table.tokens.device)
        hashed, columns, known = torch.zeros_like(table.tokens), [], table.texts >= 0
        for back in range(1, rungs[-1] + 1):
            hashed = hashed + (pad(table.tokens, (back, 0))[: self.capacity] + 1) * table.factors[back - 1]
            if back in rungs:
                began = pad(table.texts, (back, 0), value=-1)[: self.capacity]  # texts lie in one piece
                key = hashed + table.of_owner(table.owners) + back * table.factors[-1]
                columns.append(torch.where(known & (began == table.texts), key, _UNUSED))
        keys, order = torch.cat(columns).sort(stable=True)
        table.keys.copy_(keys)
        table.places.copy_(place.repeat(len(rungs))[order])


def _numbers(count: int, device: torch.device) -> Tensor:
    """Returns `count` odd 64-bit numbers, the same in every process: SplitMix64 of 1, 2, and so on."""
    made = []
    for index in range(1, count + 1):
        state = index * 0x9E3779B97F4A7C15 % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state = (state ^ (state >> 31)) | 1
        made.append(state - 2**64 if state >= 2**63 else state)
    return torch.tensor(made, dtype=torch.int64, device=device)
