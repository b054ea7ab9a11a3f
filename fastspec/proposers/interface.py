"""Interfaces of proposers, and their base classes.

A proposer sees views of the state, and hidden states of the target if it asks for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, cast

import torch
from torch import Tensor

from fastspec.sampling.verify import Draws
from fastspec.shapes import ForwardBatch, StepShape
from fastspec.state import DecodeState


class Proposer(Protocol):
    """Writes the drafts of a step.

    Attributes:
        max_length: number of first tokens of a row that `catch_up` feeds to the proposer. 0: `catch_up` feeds none.
        deterministic: True if drafts are a function of the row's tokens (and features) and nothing is drawn. Their
            distribution is then one on them, and draft_probs is neither written nor read.

    A proposer that reads the target's hidden states also has:

    - `features`, a tuple of target layers, counted from 0, whose residual stream it reads. -1 is the embedding, and the
      number of layers is the stream after the final norm.

    A proposer with features and without `take_features` is called as propose(..., features=buffer), a buffer
    [B, K+1, layers, hidden] in the target's dtype. Of a row whose last step emitted n = state.emitted tokens, entry
    i < n belongs to position lengths - 1 - n + i; entries from n on are those of refused drafts. Before a row's first
    step n is 1, and entry 0 belongs to the last position but one of its prompt; of a prompt of one token there is no
    such position, and n is 0.

    A proposer that stores features itself, in a K/V cache for example, is a `FeatureReader` and has:

    - `take_features(state, shape, features, rows)`, called with features [B, Q, layers, hidden] of every position of a
      row but the last, once each, in order. The call is made inside the pass that computed them: over a piece of a
      prompt, or at the end of a step, also of a plain one.
    - `kept`, the shape of a row's entry that is kept between steps; () for none. propose is then called with
      features=buffer [B, *kept], which holds the entry that `take_features` returned for the newest position.

    A proposer whose whole memory of a row lies in the row's pages has:

    - `in_pages`, a bool: True if results of `catch_up` and `take_features` lie only in the pages of the row. Rows with
      the same beginning then share them. Without it such a row starts from nothing with `catch_up`, and a proposer with
      `take_features` shares no prompt.
    """

    max_length: int
    deterministic: bool

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws) -> None:
        """Fills state.draft_tokens[:, :k] and draft_counts, and draft_probs[:, :k] where `keep_draft_probs` says so.

        Runs inside the step: no host read, no data-dependent shape. Rows that are not running may be filled
        with anything. Drafts must be ids of the target; the written distribution must be the one drawn from. A row's
        drafts from draft_counts on are ignored. Draws use `purpose_of(shape)`.
        """

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Reads up to `chunk` committed tokens per row that it has not read yet, and advances draft_lengths."""


class FeatureReader(Proposer, Protocol):
    """Proposer that gets the target's hidden states as soon as they are computed.

    Attributes:
        features: see `Proposer`.
        kept: see `Proposer`.
    """

    features: tuple[int, ...]
    kept: tuple[int, ...]

    def take_features(
        self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch
    ) -> Tensor | None:
        """Reads the target's hidden states of some positions of each row.

        Runs inside a step or a pass over a prompt: no host read, no data-dependent shape.

        Args:
            state: the rows, after the commit; of a prompt, one row.
            shape: of the step or pass.
            features: [B, Q, layers, hidden], in the target's dtype.
            rows: `rows.positions` are their positions, `rows.ids` the tokens that follow each of them.
                `rows.write_mask` is False for refused drafts, rows that do not run, and padding.

        Returns:
            [B, Q, *kept]; the entry of a row's newest position is kept. None where `kept` is ().
        """


class ProposerBase(ABC):
    """Base of the proposers here: they add `propose` and `catch_up`; all else has a default. See `Proposer`.

    Attributes:
        max_length, deterministic, kept, in_pages: as in `Proposer`.
    """

    max_length: int = 0
    deterministic: bool = False
    kept: tuple[int, ...] = ()
    in_pages: bool = False

    @property
    def features(self) -> tuple[int, ...]:
        """Target layers that it reads; none by default."""
        return ()

    @property
    def takes_features(self) -> bool:
        """True if it is a `FeatureReader`."""
        return type(self).take_features is not ProposerBase.take_features

    @property
    def drafter(self) -> object:
        """The proposer itself; of a wrapping one the proposer inside."""
        return self

    @abstractmethod
    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Reads committed tokens; see `Proposer.catch_up`."""

    def take_features(
        self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch
    ) -> Tensor | None:
        """Reads hidden states; see `FeatureReader`. Not called unless a subclass defines it."""
        raise NotImplementedError


class Wrapping(ProposerBase):
    """Base of proposers around another one, whose attributes it has and whose calls it passes on.

    Args:
        inner: the other proposer; a caller's own has only what `Proposer` requires, and what it adds.
    """

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.max_length, self.deterministic = inner.max_length, is_deterministic(inner)
        self.kept, self.in_pages = kept_of(inner), kept_in_pages(inner)

    @property
    def features(self) -> tuple[int, ...]:
        """Features of the inner proposer; a reading may still change them."""
        return features_of(self._inner)

    @property
    def takes_features(self) -> bool:
        """True if the inner proposer is a `FeatureReader`."""
        return takes_features(self._inner)

    @property
    def drafter(self) -> object:
        """The inner proposer."""
        return self._inner

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Passes the call on."""
        self._inner.catch_up(state, shape, chunk)

    def take_features(
        self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch
    ) -> Tensor | None:
        """Passes the call on."""
        return cast("FeatureReader", self._inner).take_features(state, shape, features, rows)


# A caller's own proposer need not have a `ProposerBase`: these functions alone know what it may lack.


def features_of(proposer: object) -> tuple[int, ...]:
    """Returns the target layers whose residual stream a proposer reads; () for most."""
    return tuple(getattr(proposer, "features", ()))


def kept_of(proposer: object) -> tuple[int, ...]:
    """Returns the shape of a row's entry that a `FeatureReader` keeps between steps; () for others."""
    return tuple(getattr(proposer, "kept", ()))


def kept_in_pages(proposer: object) -> bool:
    """True if all that a proposer keeps of a row lies in the row's pages; see `Proposer`."""
    return bool(getattr(proposer, "in_pages", False))


def takes_features(proposer: object) -> bool:
    """True if a proposer is a `FeatureReader`."""
    if isinstance(proposer, ProposerBase):
        return proposer.takes_features
    return hasattr(proposer, "take_features")


def is_deterministic(proposer: object) -> bool:
    """Returns `deterministic` of a proposer. One written for an older release may still call it `certain`."""
    return bool(proposer.deterministic if hasattr(proposer, "deterministic") else getattr(proposer, "certain", False))


def reads_ahead(proposer: object) -> int:
    """Returns how many later tokens an entry in the proposer's pages depends on: 1 for a `FeatureReader`, else 0."""
    return int(takes_features(proposer))


def drafter_of(proposer: object) -> object:
    """Returns the proposer that drafts, without those that wrap it."""
    return proposer.drafter if isinstance(proposer, ProposerBase) else proposer


def feature_shape(proposer: object, max_drafts: int, hidden: int) -> tuple[int, ...]:
    """Returns the shape of the features of a row that are kept between steps, see `Proposer`; () for none."""
    layers = features_of(proposer)
    if not layers:
        return ()
    return kept_of(proposer) if takes_features(proposer) else (max_drafts + 1, len(layers), hidden)


def feature_buffer(
    proposer: object, batch: int, max_drafts: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Allocates the static buffer [batch, *feature_shape]; None where nothing is kept."""
    shape = feature_shape(proposer, max_drafts, hidden)
    return torch.zeros(batch, *shape, dtype=dtype, device=device) if shape else None
