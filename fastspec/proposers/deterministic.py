"""Proposers whose drafts follow from a row's tokens alone, with nothing drawn: the shortest way to one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState


class DeterministicProposer(ABC):
    """A proposer that is one function, `guess`. It keeps nothing between steps, so nothing can go stale.

    Where a class has `features`, a tuple of layers of the target (see `Proposer`), its `guess` takes one argument more:
    features [B, layers, hidden], what they left at each row's last position but one. That is the newest there is: the
    last token was picked by it, and was not fed yet. Zeros, or junk, in a row of one token.
    """

    max_length = 0
    deterministic = True

    @abstractmethod
    def guess(self, tokens: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """What may follow each row.

        Runs inside the step, which is captured and replayed: torch operations whose shapes do not depend on values,
        and nothing that reads a value (no .item(), no if on a tensor, no boolean mask as an index).

        Args:
            tokens: int64 [B, T] on the device; a row's tokens are the first `lengths` ones, what follows is junk.
            lengths: int64 [B], at least 1.
            k: drafts a row may have.

        Returns:
            (drafts int64 [B, k], counts int64 [B]: how many of a row's drafts count, from the first; 0 for none).
        """

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Writes what `guess` says; see `Proposer.propose`."""
        newest = {name: _newest(state, buffer) for name, buffer in features.items()}
        drafts, counts = self.guess(state.tokens, state.lengths, shape.num_drafts, **newest)
        state.draft_tokens[:, : shape.num_drafts] = drafts
        state.draft_counts.copy_(counts)

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """There is nothing to take in."""
        return


def _newest(state: DecodeState, buffer: Tensor) -> Tensor:
    """Each row's newest entry [B, layers, hidden] of a buffer as `Proposer` describes it."""
    last = (state.emitted - 1).clamp_min(0)
    return buffer[torch.arange(state.batch, device=last.device), last]
