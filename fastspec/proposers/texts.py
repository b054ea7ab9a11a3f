"""TextIndex: texts on the device, and where their token sequences occur; static arrays that a step searches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

LOOKED_AT = 8  # occurrences of a match that are compared: the latest ones
_UNUSED = torch.iinfo(torch.int64).max


def rungs_between(shortest: int, longest: int) -> tuple[int, ...]:
    """Returns the lengths of the sequences that an index knows: both bounds, and the powers of two between them."""
    powers = (2**power for power in range(longest.bit_length()))
    return tuple(sorted({shortest, longest, *(one for one in powers if shortest < one < longest)}))


class TextIndex:
    """Tokens of several texts, and a sorted table of the hashes of their sequences of `rungs` tokens.

    A step finds a sequence by binary search in the table, and compares its tokens before it trusts the hash. The host
    writes texts between steps, in the stream of the steps, and then calls `sort`. Addresses never change.

    Args:
        capacity: tokens.
        rungs: ascending lengths of the sequences in the table, each at least 1.
        device: device of the arrays.

    Attributes:
        tokens: int64 [C].
        texts: int64 [C], number of the text that a token belongs to; -1: none.
        owners: int64 [C], owner of that text.
    """

    def __init__(self, capacity: int, rungs: tuple[int, ...], device: torch.device) -> None:
        self.capacity, self.rungs = capacity, rungs
        self.tokens, self.owners = (torch.zeros(capacity, dtype=torch.int64, device=device) for _ in range(2))
        self.texts = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self._keys = torch.full((capacity * len(rungs),), _UNUSED, dtype=torch.int64, device=device)
        self._places = torch.zeros_like(self._keys)
        self._factors = _numbers(rungs[-1] + 2, device)
        self._lengths = torch.tensor(rungs, device=device)

    @staticmethod
    def nbytes(capacity: int, rungs: tuple[int, ...]) -> int:
        """Bytes of the arrays of an index."""
        return 8 * capacity * (3 + 2 * len(rungs))

    def write(self, start: int, tokens: Sequence[int], text: int, owner: int) -> None:
        """Queues the copy of a text to places `start` and on. `sort` is due afterwards."""
        if not tokens:
            return
        stop = start + len(tokens)
        sent = torch.frombuffer(array("q", tokens), dtype=torch.int64)
        on_gpu = self.tokens.device.type == "cuda"
        self.tokens[start:stop].copy_(sent.pin_memory() if on_gpu else sent, non_blocking=on_gpu)
        self.texts[start:stop].fill_(text)
        self.owners[start:stop].fill_(owner)

    def erase(self, start: int, stop: int) -> None:
        """Forgets the tokens of places start..stop-1. `sort` is due afterwards."""
        self.texts[start:stop].fill_(-1)
        self.tokens[start:stop].zero_()

    def sort(self) -> None:
        """Makes the table anew. Among equal hashes places ascend."""
        place = torch.arange(self.capacity, device=self.tokens.device)
        hashed, columns, known = torch.zeros_like(self.tokens), [], self.texts >= 0
        for back in range(1, self.rungs[-1] + 1):
            hashed = hashed + (pad(self.tokens, (back, 0))[: self.capacity] + 1) * self._factors[back - 1]
            if back in self.rungs:
                began = pad(self.texts, (back, 0), value=-1)[: self.capacity]  # texts lie in one piece
                key = hashed + self._of_owner(self.owners) + back * self._factors[-1]
                columns.append(torch.where(known & (began == self.texts), key, _UNUSED))
        keys, order = torch.cat(columns).sort(stable=True)
        self._keys.copy_(keys)
        self._places.copy_(place.repeat(len(self.rungs))[order])

    def look_up(self, recent: Tensor, known: Tensor, owners: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Finds the latest occurrences of each row's last tokens, and drafts what follows most of them.

        The longest rung with an occurrence is searched. Of its latest `LOOKED_AT` occurrences those with the longest
        match count. The draft is the continuation that shares most tokens with those of the others. It ends before the
        first token that fewer than a quarter of them share.

        Args:
            recent: int64 [B, W], last tokens of each row, the last one first; W is the longest rung.
            known: bool [B, W], False beyond a row's beginning.
            owners: int64 [B], only texts of this owner are found.
            k: drafts.

        Returns:
            (drafts int64 [B, k], counts int64 [B], matched int64 [B]: tokens that match, 0 for none).
        """
        found, matched = self._occurrences(recent, known, owners)
        best = matched.amax(dim=1)
        counted = (matched == best[:, None]) & (best > 0)[:, None]
        after = found[:, :, None] + torch.arange(k, device=found.device)  # [B, M, k]
        inside = after < self.capacity
        after = after.clamp(max=self.capacity - 1)
        alive = inside & (self.texts[after] == self.texts[found][:, :, None]) & counted[:, :, None]
        follow = self.tokens[after]
        equal = (follow[:, :, None] == follow[:, None]) & alive[:, :, None] & alive[:, None]  # [B, M, M, k]
        shared = equal.long().cumprod(dim=3).sum(dim=2)  # [B, M, k]: occurrences that go on alike so far
        order = torch.arange(found.shape[1], device=found.device)
        score = (shared.sum(dim=2) * len(order) + len(order) - order) * counted  # the latest of equally good ones
        chosen = score.argmax(dim=1)[:, None, None].expand(-1, 1, k)
        enough = shared.gather(1, chosen)[:, 0] * 4 >= counted.sum(dim=1)[:, None]
        counts = (enough & alive.gather(1, chosen)[:, 0]).long().cumprod(dim=1).sum(dim=1)
        return follow.gather(1, chosen)[:, 0], counts, torch.where(counts > 0, best, 0)

    def _occurrences(self, recent: Tensor, known: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (places int64 [B, M], tokens that match before each int64 [B, M]), the latest place first."""
        rungs, width = self._lengths, self.rungs[-1]
        hashed = ((recent + 1) * self._factors[:width]).cumsum(dim=1)[:, rungs - 1]
        key = hashed + self._of_owner(owners)[:, None] + rungs * self._factors[-1]
        low, high = torch.searchsorted(self._keys, key), torch.searchsorted(self._keys, key, right=True)
        hits = (high > low) & known[:, rungs - 1]
        rung = (hits * torch.arange(1, len(self.rungs) + 1, device=key.device)).amax(dim=1)
        at = (rung - 1).clamp_min(0)[:, None]
        index = high.gather(1, at) - 1 - torch.arange(LOOKED_AT, device=key.device)
        valid = (index >= low.gather(1, at)) & (rung > 0)[:, None]
        places = self._places[index.clamp(0, len(self._keys) - 1)]
        before = places[:, :, None] - 1 - torch.arange(width, device=key.device)
        same = (before >= 0) & known[:, None]
        before = before.clamp_min(0)
        same &= (self.tokens[before] == recent[:, None]) & (self.texts[before] == self.texts[places][:, :, None])
        run = same.long().cumprod(dim=2).sum(dim=2)
        valid &= (self.owners[places] == owners[:, None]) & (self.texts[places] >= 0) & (run >= self.rungs[0])
        return places, torch.where(valid, run, 0)

    def _of_owner(self, owners: Tensor) -> Tensor:
        return (owners + 1) * self._factors[-2]


def _numbers(count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits, the same in every process: SplitMix64 of 1, 2, and so on."""
    made = []
    for index in range(1, count + 1):
        state = index * 0x9E3779B97F4A7C15 % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state = (state ^ (state >> 31)) | 1
        made.append(state - 2**64 if state >= 2**63 else state)
    return torch.tensor(made, dtype=torch.int64, device=device)
