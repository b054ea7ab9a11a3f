"""Proposer that drafts by lookup or with a model: for each sequence the one whose draft tokens were better so far."""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from torch import Tensor

from fastspec.proposers.interface import Proposer, Wrapping
from fastspec.proposers.ngram import NGram
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState

RATE: Final = 0.25  # weight of the last step in a row's averages


class ContinuesDrafts(Proposer, Protocol):
    """Interface of proposers that can continue the draft tokens of a lookup: with a draft model or a learned head."""

    def propose(self, *arguments: Any, **features: Any) -> None:
        """Makes draft tokens. Takes the argument `lookup` of `DraftModel.propose`."""


class LookupThenModel(Wrapping):
    """Drafts by lookup or with a model: for each sequence with the one that was right more often.

    Each sequence has two moving averages. The first counts correct draft tokens of the lookup, also in steps that used
    the model's. The second counts accepted draft tokens of the model. A sequence in which lookup finds a match drafts
    by lookup, unless the model's average is larger. Other sequences draft with the model.

    The model still runs for every sequence, because the shape of a step is fixed. For sequences that draft by lookup,
    the model reads the lookup's tokens. So its KV cache has the draft tokens of every sequence. In long copies lookup
    gives better draft tokens, but does not make a step faster.

    Args:
        lookup: the lookup, which is tried first.
        model: proposer with the draft model or learned head.
    """

    def __init__(self, lookup: NGram, model: ContinuesDrafts) -> None:
        super().__init__(model)
        self.deterministic = False
        self.lookup, self.model = lookup, model

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        return f"{self.lookup}, then {self.model} in rows where lookup finds nothing or is right less often"

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Makes k draft tokens for each running sequence; see `Proposer.propose`.

        A sequence that is longer than the model's context has only draft tokens of the lookup.
        """
        k = shape.num_drafts
        learn(state)
        drafts, found = self.lookup.look_up(state, k)
        state.lookup_drafts[:, :k] = drafts
        state.lookup_counts.copy_(found)
        state.proposed_at.copy_(state.lengths)
        preferred = state.lookup_mean >= state.model_mean
        if self.max_length:  # the model's context may end within the drafts
            preferred |= state.lengths + k > self.max_length
        chosen = torch.where(preferred, found, 0)
        self.model.propose(state, shape, draws, (drafts, chosen), **features)
        state.draft_counts.copy_(chosen.maximum(state.draft_counts))
        state.draft_source.copy_((chosen == 0) & (state.draft_counts > 0))


def learn(state: DecodeState) -> None:
    """Updates the two moving averages of each sequence after a step, see `LookupThenModel`.

    A sequence is left out if its last step had no proposed draft tokens.

    Args:
        state: the decode state. `block` has the tokens that the last step emitted. `lookup_drafts` has the draft tokens
            that lookup found for that step.
    """
    stepped = (state.accepted >= 0) & (state.lengths - state.emitted == state.proposed_at)
    places = torch.arange(state.lookup_drafts.shape[1], device=state.lengths.device)
    right = (state.lookup_drafts == state.block[:, :-1]) & (places < state.emitted[:, None])
    right &= places < state.lookup_counts[:, None]
    lookup = right.long().cumprod(dim=1).sum(dim=1)
    for mean, count, known in (
        (state.lookup_mean, lookup, stepped & (state.lookup_counts > 0)),
        (state.model_mean, state.accepted, stepped & state.draft_source),
    ):
        mean.add_(torch.where(known, (count - mean) * RATE, 0.0))
