"""Chooses the proposer of a generator from the arguments `draft` and `proposer`."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from fastspec.proposers.combined import ContinuesDrafts, LookupThenModel
from fastspec.proposers.interface import Proposer, Wrapping
from fastspec.proposers.ngram import NGram
from fastspec.sampling.verify import Draws
from fastspec.shapes import StepShape
from fastspec.state import DecodeState

_NEEDED = ("propose", "catch_up", "max_length", "deterministic")


def check(proposer: object, *, with_draft: bool) -> None:
    """Checks the argument `proposer` of the generator, before any model is loaded.

    Args:
        proposer: the argument `proposer` of the generator. None: it was not given.
        with_draft: True if the generator has a draft model or a head.

    Raises:
        ValueError: the object is not a proposer, or cannot be combined with a draft.
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
            f"proposer {type(proposer).__name__} has no {', '.join(missing)}; pass NGram(), Suffix(), a subclass of "
            "DeterministicProposer, or an object with all of fastspec.proposers.interface.Proposer"
        )
    if with_draft and not isinstance(proposer, NGram):
        raise ValueError(
            f"a draft can be combined only with NGram() or Suffix() (lookup first, then the draft), got a "
            f"{type(proposer).__name__}; leave out draft or proposer"
        )


def choose(proposer: Proposer | None, model: ContinuesDrafts | None, vocab_size: int) -> Proposer | None:
    """Returns the proposer of a generator. None: decoding is plain.

    It is the user's proposer, the draft model or head, or a lookup combined with the draft model or head.

    Args:
        proposer: the argument `proposer` of the generator. None: it was not given.
        model: proposer with the draft model or head. None: there is none.
        vocab_size: vocabulary size of the target.
    """
    if proposer is None:
        return model
    if isinstance(proposer, NGram):
        return proposer if model is None else LookupThenModel(proposer, model)
    return Guarded(proposer, vocab_size)


class Guarded(Wrapping):
    """Wrapper of the user's own proposer. It removes invalid draft tokens.

    If the target has no such token id, this draft token and all later ones are removed. No error can be raised inside a
    step, and an unknown id would be used as an index into the target's distribution.

    Args:
        proposer: the user's proposer.
        vocab_size: vocabulary size of the target.
    """

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        super().__init__(proposer)
        self._vocab_size = vocab_size

    def __str__(self) -> str:
        """Returns the name of the proposer's class."""
        return type(self._inner).__name__

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        """Calls the user's proposer, then removes invalid draft tokens."""
        self._inner.propose(state, shape, draws, **features)
        drafts = state.draft_tokens[:, : shape.num_drafts]
        known = ((drafts >= 0) & (drafts < self._vocab_size)).long().cumprod(dim=1).sum(dim=1)
        state.draft_counts.copy_(torch.minimum(state.draft_counts.clamp_min(0), known))
        drafts.clamp_(0, self._vocab_size - 1)
