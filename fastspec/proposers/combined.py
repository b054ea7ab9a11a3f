"""Lookup first, the draft model where it misses."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from fastspec.proposers.interface import Proposer, Wrapping
from fastspec.proposers.ngram import NGram
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState


class ContinuesDrafts(Proposer, Protocol):
    """A proposer that continues drafts of another one: a draft model, or a learned drafter."""

    def propose(self, *arguments: Any, **features: Any) -> None:
        """Drafts, and takes `lookup` as `DraftModel.propose` does."""


class LookupThenModel(Wrapping):
    """Drafts by lookup in rows where it finds a match, with a model in the others.

    The model still runs in every row, because the shape of a step is fixed. In rows with a match it is fed the tokens
    of the lookup, so its cache holds the drafts of every row and never has to catch up. Lookup can add better drafts
    (long copies), not a cheaper step.

    Args:
        lookup: asked first.
        model: drafts the rest.
    """

    def __init__(self, lookup: NGram, model: ContinuesDrafts) -> None:
        super().__init__(model)
        self.deterministic = False
        self.lookup, self.model = lookup, model

    def __str__(self) -> str:
        """A short description, for messages and `explain()`."""
        return f"{self.lookup}, then {self.model} where it finds nothing"

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Drafts k tokens per running row; a row beyond the model's context has only the drafts of the lookup."""
        drafts, found = self.lookup.look_up(state, shape.num_drafts)
        self.model.propose(state, shape, draws, (drafts, found), **features)
        state.draft_counts.copy_(found.maximum(state.draft_counts))
