"""Prompt lookup: copies drafts from an earlier occurrence of a row's last tokens.

It runs on the device, in the step.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor
from typing_extensions import Self

from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.lookup import LookUp
from fastspec.proposers.deterministic import DeterministicProposer
from fastspec.state import DecodeState

_LONGEST = 32


class NGram(DeterministicProposer):
    """Drafts the tokens that followed the last occurrence of a row's last tokens in the row itself.

    The longest match of min_n to max_n tokens is used; of equally long matches, the most recent one. If fewer than k
    tokens follow the match, the copy continues with the tokens that it has just copied. So repetitive text is drafted
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
        self.ops = Ops()

    def __repr__(self) -> str:
        """Formats the arguments. Ranks compare this text."""
        return f"{type(self).__name__}(min_n={self.min_n}, max_n={self.max_n})"

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        return f"lookup of the last {self.min_n} to {self.max_n} tokens in the row itself"

    def on(self, device: torch.device, ops: Ops) -> Self:
        """Returns a copy for one generator, whose steps run `ops` on `device`."""
        made = copy(self)
        made.ops = ops
        return made

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns k drafts for rows with a match; see `DeterministicProposer.guess`."""
        return self.ops.look_up(LookUp(tokens, lengths, self.min_n, self.max_n), k)

    def look_up(self, state: DecodeState, k: int) -> tuple[Tensor, Tensor]:
        """Returns the result of `guess` for the rows of a state."""
        return self.guess(state.tokens, state.lengths, k)
