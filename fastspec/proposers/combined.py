"""Lookup first, the draft model where it misses."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from fastspec.proposers.interface import Proposer, features_of, kept_in_pages, takes_features
from fastspec.proposers.ngram import NGram
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState


class ContinuesDrafts(Proposer, Protocol):
    """A proposer that can continue drafts made by another one: a draft model, or a learned drafter."""

    def propose(self, *arguments: Any, **features: Any) -> None:
        """As `DraftModel.propose`."""


class LookupThenModel:
    """Drafts by lookup in rows where it finds a match, with a model in the others.

    The model runs in every row all the same, because the shape of a step is fixed. In rows with a match it is fed the
    tokens that lookup chose, so its cache holds the drafts of every row, whoever made them, and never has to catch up.
    What lookup can add is better drafts (long copies), not a cheaper step.

    Args:
        lookup: asked first.
        model: drafts the rest.
    """

    deterministic = False

    def __init__(self, lookup: NGram, model: ContinuesDrafts) -> None:
        self.lookup, self.model = lookup, model
        self.max_length = model.max_length
        self.in_pages = kept_in_pages(model)
        if takes_features(model):
            self.take_features, self.kept = model.take_features, model.kept  # type: ignore[attr-defined]

    @property
    def features(self) -> tuple[int, ...]:
        """The model's."""
        return features_of(self.model)

    def __str__(self) -> str:
        """A short description, for messages and `explain()`."""
        return f"{self.lookup}, then {self.model} where it finds nothing"

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Drafts k tokens per running row; a row beyond the model's context has those of lookup, if any."""
        drafts, found = self.lookup.guess(state.tokens, state.lengths, shape.num_drafts)
        self.model.propose(state, shape, draws, (drafts, found), **features)
        state.draft_counts.copy_(found.maximum(state.draft_counts))

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """As the model's."""
        self.model.catch_up(state, shape, chunk)
