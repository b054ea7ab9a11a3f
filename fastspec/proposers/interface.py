"""What a proposer must do. A proposer sees views of the state, and hidden states of the target if it asks for them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState


class Proposer(Protocol):
    """Writes the drafts of a step.

    Attributes:
        max_length: tokens of a row, from the first, that the proposer wants to be fed by `catch_up`; 0 for one that
            keeps nothing of its own.
        deterministic: drafts are a function of the row's tokens (and features), with nothing drawn: their
            distribution is one on them, and draft_probs is neither written nor read.

    Optional, read by `features_of`:
        features: tuple of target layers, counted from 0, whose residual stream the proposer reads. `propose` is then
            called with features=buffer [B, K+1, layers, hidden], in the target's dtype. Of a row whose last step
            emitted n = state.emitted tokens, entry i < n belongs to position lengths - 1 - n + i; entries from n on
            are those of refused drafts. They are 0 in a row that has made no step since it was admitted: passes over
            prompts leave none.
    """

    max_length: int
    deterministic: bool

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws) -> None:
        """Fills state.draft_tokens[:, :k] and draft_counts, and draft_probs[:, :k] where `keep_draft_probs` says so.

        Runs inside the step: no host read, no data-dependent shape. Rows that are not running may be filled
        with anything. Drafts must be ids the target knows; the distribution written must be the one drawn from. A row's
        drafts from draft_counts on are ignored. What is drawn at a position is drawn with `purpose_of(shape)`.
        """

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Takes in up to `chunk` committed tokens per row that were not seen yet, advancing draft_lengths."""


def features_of(proposer: object) -> tuple[int, ...]:
    """The target layers whose residual stream a proposer reads; none for most."""
    return tuple(getattr(proposer, "features", ()))


def is_deterministic(proposer: object) -> bool:
    """The proposer's `deterministic`; one written for an older release may still call it `certain`."""
    return bool(proposer.deterministic if hasattr(proposer, "deterministic") else getattr(proposer, "certain", False))


def feature_buffer(
    proposer: object, batch: int, max_drafts: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The static buffer [batch, max_drafts + 1, layers, hidden] for a proposer's features; None if it has none."""
    layers = features_of(proposer)
    if not layers:
        return None
    return torch.zeros(batch, max_drafts + 1, len(layers), hidden, dtype=dtype, device=device)
