"""Base of proposers whose drafts are a function of a row's tokens, with nothing drawn."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from fastspec.proposers.interface import ProposerBase
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState


class DeterministicProposer(ProposerBase):
    """A proposer that is one function, `guess`. It keeps nothing between steps, so nothing can be out of date.

    Where a class has `features`, a tuple of layers of the target (see `Proposer`), its `guess` takes one argument more:
    features [B, layers, hidden], what they left at each row's last position but one. That is the newest there is: the
    last token was picked by it, and was not fed yet. Zeros, or junk, in a row of one token.
    """

    deterministic = True

    @abstractmethod
    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Guesses the next tokens of each row.

        Runs inside the step, which is captured and replayed: torch operations whose shapes do not depend on values,
        and nothing that reads a value (no .item(), no if on a tensor, no boolean mask as an index).

        Args:
            tokens: int64 [B, T] on the device; a row's tokens are the first `lengths` ones, the others are junk.
            lengths: int64 [B], at least 1.
            k: drafts a row may have.

        Returns:
            (drafts int64 [B, k], counts int64 [B]: how many of a row's drafts count, from the first; 0 for none).
        """

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Writes the drafts of `guess`; see `Proposer.propose`."""
        newest = {name: _newest(state, buffer) for name, buffer in features.items()}
        drafts, counts = self.guess(state.tokens, state.lengths, shape.num_drafts, **newest)
        state.draft_tokens[:, : shape.num_drafts] = drafts
        state.draft_counts.copy_(counts)

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Does nothing: it keeps nothing of a row."""
        return


def _newest(state: DecodeState, buffer: Tensor) -> Tensor:
    """Picks each row's newest entry [B, layers, hidden] of a buffer; see `Proposer`."""
    last = (state.emitted - 1).clamp_min(0)
    return buffer[torch.arange(state.batch, device=last.device), last]
