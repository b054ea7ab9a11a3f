"""What a proposer must do. A proposer sees views of the state, never the target model."""

from __future__ import annotations

from typing import Protocol

from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState


class Proposer(Protocol):
    """Writes the drafts of a step.

    Attributes:
        max_length: tokens of a row, from the first, that the proposer wants to be fed by `catch_up`; 0 for one that
            keeps nothing of its own.
        certain: drafts are a function of the row's tokens, with nothing drawn: their law is one on them, and
            draft_probs is neither written nor read.
    """

    max_length: int
    deterministic: bool

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws) -> None:
        """Fills state.draft_tokens[:, :k] and draft_counts, and draft_probs[:, :k] where `keep_draft_probs` says so.

        Runs inside the step: no host read, no data-dependent shape. Rows that are not running may be filled
        with anything. Drafts must be ids the target knows; the law written must be the one drawn from. A row's
        drafts from draft_counts on are ignored. What is drawn at a position is drawn with `purpose_of(shape)`.
        """

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Takes in up to `chunk` committed tokens per row that were not seen yet, advancing draft_lengths."""
