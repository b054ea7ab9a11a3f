"""Prompt lookup: drafts copied from where a row's last tokens stood before, found on the device inside the step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.proposers.deterministic import DeterministicProposer
from fastspec.state import DecodeState

_LONGEST = 32


class NGram(DeterministicProposer):
    """Drafts what followed the last occurrence of a row's last tokens in the row itself.

    The longest match of max_n down to min_n tokens wins, among equally long ones the most recent. Where fewer than k
    tokens followed it, the copy goes on with what it has copied, so that a text that repeats itself is drafted as one.
    A row without a match has no drafts in that step.

    Args:
        min_n, max_n: tokens that must match at least, and that are compared at most: 1 <= min_n <= max_n <= 32.

    Raises:
        ValueError: min_n or max_n is out of range.
    """

    def __init__(self, min_n: int = 1, max_n: int = 4) -> None:
        if not (type(min_n) is type(max_n) is int and 1 <= min_n <= max_n <= _LONGEST):
            raise ValueError(
                f"{type(self).__name__} needs whole numbers 1 <= min_n <= max_n <= {_LONGEST}, got min_n={min_n!r}, "
                f"max_n={max_n!r}"
            )
        self.min_n, self.max_n = min_n, max_n

    def __repr__(self) -> str:
        """The arguments, which ranks compare."""
        return f"{type(self).__name__}(min_n={self.min_n}, max_n={self.max_n})"

    def __str__(self) -> str:
        """A short description, for messages and `explain()`."""
        return f"lookup of the last {self.min_n} to {self.max_n} tokens in the row itself"

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """k drafts for rows with a match; see `DeterministicProposer.guess`."""
        start, run = self._match(tokens, lengths)
        return self._copied(tokens, lengths, start, k), torch.where(run > 0, k, 0)

    def look_up(self, state: DecodeState, k: int) -> tuple[Tensor, Tensor]:
        """`guess` for the rows of a state."""
        return self.guess(state.tokens, state.lengths, k)

    def _copied(self, tokens: Tensor, lengths: Tensor, start: Tensor, k: int) -> Tensor:
        """The k tokens of each row from `start` on; behind the row's end the copy is continued by itself."""
        period = (lengths - start).clamp_min(1)
        offsets = torch.arange(k, device=tokens.device) % period[:, None]
        return tokens.gather(1, start[:, None] + offsets)

    def _match(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(start int64 [B], run int64 [B]): the place after the best match, and its tokens; 0 where there is none."""
        width = tokens.shape[1]
        place = torch.arange(width, device=tokens.device)
        matching = place < lengths[:, None]
        run = torch.zeros_like(tokens)  # how many tokens before each place equal the row's last ones
        for back in range(1, self.max_n + 1):
            last = tokens.gather(1, (lengths - back).clamp_min(0)[:, None])
            before = pad(tokens, (back, 0))[:, :width]
            matching = matching & (before == last) & (place >= back)
            run = run + matching
        best = torch.where(run >= self.min_n, run * width + place, 0).amax(dim=1)
        return best % width, best // width
