"""Which proposer a generator gets from its arguments `draft` and `proposer`."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from fastspec.proposers.combined import ContinuesDrafts, LookupThenModel
from fastspec.proposers.interface import Proposer, features_of, is_deterministic, kept_in_pages, takes_features
from fastspec.proposers.ngram import NGram
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState

_NEEDED = ("propose", "catch_up", "max_length", "deterministic")


def check(proposer: object, *, with_draft: bool) -> None:
    """Refuses what cannot be used, before anything is loaded.

    Raises:
        ValueError: it is no proposer, or cannot go with a draft.
    """
    if proposer is None:
        return
    if isinstance(proposer, type):
        raise ValueError(f"proposer must be an object, got the class {proposer.__name__}; write {proposer.__name__}()")
    missing = [name for name in _NEEDED if not hasattr(proposer, name)]
    if "deterministic" in missing and hasattr(proposer, "certain"):
        warnings.warn(
            f"proposer {type(proposer).__name__} has `certain`, which is now called `deterministic`; rename it",
            DeprecationWarning,
            stacklevel=3,
        )
        missing.remove("deterministic")
    if missing:
        raise ValueError(
            f"proposer {type(proposer).__name__} has no {', '.join(missing)}; pass NGram(), a subclass of "
            "DeterministicProposer, or an object with all of fastspec.proposers.interface.Proposer"
        )
    if with_draft and not isinstance(proposer, NGram):
        raise ValueError(
            f"a draft goes together with NGram() alone (lookup first, then the draft), got a "
            f"{type(proposer).__name__}; leave out draft or proposer"
        )


def choose(proposer: Proposer | None, model: ContinuesDrafts | None, vocab_size: int) -> Proposer | None:
    """The proposer of a generator: the draft model or head, what the caller brought, or lookup before the model."""
    if proposer is None:
        return model
    if isinstance(proposer, NGram):
        return proposer if model is None else LookupThenModel(proposer, model)
    return Guarded(proposer, vocab_size)


class Guarded:
    """A caller's proposer; its drafts are cut before the first id that the target does not know.

    Inside a step nothing can raise, and an unknown id would be looked up in the target's distribution.

    Args:
        proposer: what is guarded.
        vocab_size: the target's.
    """

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self.proposer, self.max_length, self.deterministic = proposer, proposer.max_length, is_deterministic(proposer)
        self.features, self.in_pages = features_of(proposer), kept_in_pages(proposer)
        if takes_features(proposer):
            self.take_features, self.kept = proposer.take_features, proposer.kept  # type: ignore[attr-defined]
        self._vocab_size = vocab_size

    def __str__(self) -> str:
        """The name of its class."""
        return type(self.proposer).__name__

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """As the proposer; then cuts."""
        self.proposer.propose(state, shape, draws, **features)
        drafts = state.draft_tokens[:, : shape.num_drafts]
        known = ((drafts >= 0) & (drafts < self._vocab_size)).long().cumprod(dim=1).sum(dim=1)
        state.draft_counts.copy_(torch.minimum(state.draft_counts.clamp_min(0), known))
        drafts.clamp_(0, self._vocab_size - 1)

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """As the guarded proposer's."""
        self.proposer.catch_up(state, shape, chunk)
