"""Base class of proposers whose draft tokens are a function of a sequence's tokens, without random numbers."""

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
    features [B, layers, hidden], hidden states at the position before each sequence's last token. The target has not
    read the last token yet, so there are no newer hidden states. For a sequence of one token they are undefined.
    """

    deterministic = True

    @abstractmethod
    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Guesses the next tokens of each sequence.

        It runs inside the decode step, which is captured as a CUDA graph and replayed. So it may use only torch
        operations whose shapes do not depend on values, and must not read values on the host: no .item(), no `if` on a
        tensor, no boolean mask as index.

        Args:
            tokens: int64 [B, T] on the device, one sequence per row. The first `lengths` ids of a row are its tokens;
                the others are undefined.
            lengths: int64 [B], number of tokens of each sequence, at least 1.
            k: largest number of draft tokens per sequence.

        Returns:
            (draft tokens int64 [B, k], counts int64 [B]). The first `counts` draft tokens of each sequence are used; 0:
            none.
        """

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Writes the draft tokens that `guess` returns; see `Proposer.propose`."""
        newest = {name: _newest(state, buffer) for name, buffer in features.items()}
        drafts, counts = self.guess(state.tokens, state.lengths, shape.num_drafts, **newest)
        state.draft_tokens[:, : shape.num_drafts] = drafts
        state.draft_counts.copy_(counts)

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Does nothing, because the proposer stores nothing about a sequence."""
        return


def _newest(state: DecodeState, buffer: Tensor) -> Tensor:
    """Returns the newest hidden states of each sequence, [B, layers, hidden].

    Args:
        state: the decode state.
        buffer: [B, K+1, layers, hidden], hidden states of the last step. See `Proposer` for the order of entries.
    """
    last = (state.emitted - 1).clamp_min(0)
    return buffer[torch.arange(state.batch, device=last.device), last]
