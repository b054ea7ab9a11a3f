"""Base class of proposers whose drafts are a function of a row's tokens, without random numbers."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from fastspec.proposers.interface import ProposerBase
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState


class DeterministicProposer(ProposerBase):
    """Proposer that is defined by one function, `guess`. It stores nothing between steps.

    A subclass may have `features`, a tuple of target layers (see `Proposer`). Its `guess` then has a fourth argument:
    features [B, layers, hidden], hidden states at the position before each row's last token. The target has not read
    the last token yet, so there are no newer hidden states. In a row of one token they are undefined.
    """

    deterministic = True

    @abstractmethod
    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Guesses the next tokens of each row.

        It runs inside the step, which is captured and replayed. So it may use only torch operations whose shapes do not
        depend on values, and must not read values on the host: no .item(), no `if` on a tensor, no boolean mask as
        index.

        Args:
            tokens: int64 [B, T] on the device. The first `lengths` ids of a row are its tokens; the others are
                undefined.
            lengths: int64 [B], number of tokens of each row, at least 1.
            k: largest number of drafts per row.

        Returns:
            (drafts int64 [B, k], counts int64 [B]). The first `counts` drafts of a row are used; 0: none.
        """

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Writes the drafts of `guess`; see `Proposer.propose`."""
        newest = {name: _newest(state, buffer) for name, buffer in features.items()}
        drafts, counts = self.guess(state.tokens, state.lengths, shape.num_drafts, **newest)
        state.draft_tokens[:, : shape.num_drafts] = drafts
        state.draft_counts.copy_(counts)

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Does nothing, because the proposer stores nothing about a row."""
        return


def _newest(state: DecodeState, buffer: Tensor) -> Tensor:
    """Returns each row's newest hidden states, [B, layers, hidden], from a buffer [B, K+1, layers, hidden].

    See `Proposer` for the order of its entries.
    """
    last = (state.emitted - 1).clamp_min(0)
    return buffer[torch.arange(state.batch, device=last.device), last]
