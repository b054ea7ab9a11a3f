"""Proposer that tries lookup first, and uses the draft model in rows without a match."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from fastspec.proposers.interface import Proposer, Wrapping
from fastspec.proposers.ngram import NGram
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState


class ContinuesDrafts(Proposer, Protocol):
    """Proposer that can continue drafts of another one: a draft model or a learned drafter."""

    def propose(self, *arguments: Any, **features: Any) -> None:
        """Makes drafts. Accepts `lookup` as `DraftModel.propose` does."""


class LookupThenModel(Wrapping):
    """Drafts by lookup in rows with a match, and with a model in other rows.

    The model still runs in every row, because the shape of a step is fixed. In rows with a match it is fed the lookup's
    tokens. So its KV cache has the drafts of every row, and it never has to catch up. Lookup can give better drafts, in
    long copies, but does not make a step cheaper.

    Args:
        lookup: the lookup, which is tried first.
        model: makes the other drafts.
    """

    def __init__(self, lookup: NGram, model: ContinuesDrafts) -> None:
        super().__init__(model)
        self.deterministic = False
        self.lookup, self.model = lookup, model

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        return f"{self.lookup}, then {self.model} in rows where lookup finds nothing"

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Makes k drafts per running row. A row beyond the model's context has only the drafts of the lookup."""
        drafts, found = self.lookup.look_up(state, shape.num_drafts)
        self.model.propose(state, shape, draws, (drafts, found), **features)
        state.draft_counts.copy_(found.maximum(state.draft_counts))
