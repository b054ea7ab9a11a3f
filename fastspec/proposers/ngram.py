"""Prompt lookup: copies draft tokens from an earlier occurrence of a sequence's last tokens.

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
    """Finds an earlier occurrence of a sequence's last tokens in the sequence, and drafts the tokens that followed.

    The longest match of min_n to max_n tokens is used. Behind an edit of up to 8 tokens, the tokens before the edit
    tell where the copy goes on: of equally long matches, the nearest to this place is used. If nothing matches, the
    place itself is used. Otherwise the most recent of equally long matches is used. If fewer than k tokens follow the
    match, the copy continues with the tokens that it has just copied. So repetitive text is drafted correctly. A
    sequence without a match has no draft tokens in that step.

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
        """Formats the constructor's arguments. Ranks compare this text to check that their settings are equal."""
        return f"{type(self).__name__}(min_n={self.min_n}, max_n={self.max_n})"

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        return f"lookup of the last {self.min_n} to {self.max_n} tokens in the row itself"

    def on(self, device: torch.device, ops: Ops) -> Self:
        """Returns a copy of this proposer for one generator.

        Args:
            device: device of the generator.
            ops: kernels of the generator's steps.
        """
        made = copy(self)
        made.ops = ops
        return made

    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns k draft tokens for each sequence with a match; see `DeterministicProposer.guess`."""
        return self.ops.look_up(LookUp(tokens, lengths, self.min_n, self.max_n), k)

    def look_up(self, state: DecodeState, k: int) -> tuple[Tensor, Tensor]:
        """Returns the result of `guess` for the sequences of a decode state."""
        return self.guess(state.tokens, state.lengths, k)
