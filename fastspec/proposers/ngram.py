"""Prompt lookup: copies drafts from an earlier occurrence of a row's last tokens.

It runs on the device, in the step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastspec.proposers.deterministic import DeterministicProposer
from fastspec.state import DecodeState

_LONGEST = 32


class NGram(DeterministicProposer):
    """Drafts the tokens that followed the last occurrence of a row's last tokens in the row itself.

    Uses the longest match of max_n down to min_n tokens; of equally long ones the most recent. If fewer than k tokens
    follow the match, the copy continues with the tokens that it has just copied. So repetitive text is drafted
    correctly. A row without a match has no drafts in that step.

    Args:
        min_n, max_n: smallest and largest number of tokens to match: 1 <= min_n <= max_n <= 32.

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
        """Describes the proposer in a few words, for messages and `explain()`."""
        return f"lookup of the last {self.min_n} to {self.max_n} tokens in the row itself"

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns k drafts for rows with a match; see `DeterministicProposer.guess`."""
        start, run = self._match(tokens, lengths)
        return self._copied(tokens, lengths, start, k), torch.where(run > 0, k, 0)

    def look_up(self, state: DecodeState, k: int) -> tuple[Tensor, Tensor]:
        """`guess` for the rows of a state."""
        return self.guess(state.tokens, state.lengths, k)

    def _copied(self, tokens: Tensor, lengths: Tensor, start: Tensor, k: int) -> Tensor:
        """Returns the k tokens of each row from `start` on. After the row's end the copy repeats its own tokens."""
        period = (lengths - start).clamp_min(1)
        offsets = torch.arange(k, device=tokens.device) % period[:, None]
        return tokens.gather(1, start[:, None] + offsets)

    def _match(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (start int64 [B], run int64 [B]): the position after the best match, and its tokens; 0 if none."""
        width = tokens.shape[1]
        place = torch.arange(width, device=tokens.device)
        matching = place < lengths[:, None]
        # for each position, the number of tokens before it that equal the row's last tokens
        run = torch.zeros_like(tokens)
        for back in range(1, self.max_n + 1):
            last = tokens.gather(1, (lengths - back).clamp_min(0)[:, None])
            before = pad(tokens, (back, 0))[:, :width]
            matching = matching & (before == last) & (place >= back)
            run = run + matching
        best = torch.where(run >= self.min_n, run * width + place, 0).amax(dim=1)
        return best % width, best // width
