"""Interfaces of proposers, and their base classes.

A proposer gets views of the `DecodeState`, and hidden states of the target if it has `features`.
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
    """Makes the draft tokens of a decode step.

    A "row" is the batch slot of one running request, and also its sequence of tokens. k is the number of draft tokens
    of the step, K the largest k.

    Attributes:
        max_length: largest number of a row's tokens that `catch_up` may feed, from the first one on. 0: it feeds none.
        deterministic: True if draft tokens are a function of the row's tokens (and features), without random numbers.
            Then each draft token has probability 1, and draft_probs is neither written nor read.

    A proposer that reads the target's hidden states also has:

    - `features`, a tuple of target layers, counted from 0, whose residual stream it reads. -1 is the embedding, and the
      number of layers is the stream after the final norm.

    A proposer with features and without `take_features` is called as propose(..., features=buffer). The buffer [B, K+1,
    layers, hidden] has hidden states in the target's dtype. If the last step of a row emitted n = state.emitted tokens,
    entry i < n belongs to position lengths - 1 - n + i. Entries from n on belong to rejected draft tokens. Before the
    first step of a row n is 1, and entry 0 belongs to the position before the last token of its prompt. For a prompt of
    one token n is 0.

    A proposer that stores features itself, for example in a KV cache, is a `FeatureReader` and has:

    - `take_features(state, shape, features, rows)`. It is called for all positions of a row except the last, in order,
      each once, with features [B, Q, layers, hidden]. The call is made in the prefill pass that computed the features,
      or at the end of the decode step. It is made in steps without draft tokens, too.
    - `kept`, the shape of the entry that is stored for each row between steps; () if nothing is stored. propose is then
      called with features=buffer [B, *kept], which has the entry that `take_features` returned for the newest position.
    - optionally `computed_again` = n > 0, if the proposer's K/V of a position depend on n more tokens after the next
      one. Then `kept` is (n, layers, hidden), and the entry has the target's hidden states at a row's n newest
      positions. At the end of each step, `take_features` is called with the positions of the step and, before them, the
      n positions of that entry. It returns None.

    A proposer that stores everything about a row in the row's KV cache pages has:

    - `in_pages`, a bool: True if `catch_up` and `take_features` write only to the pages of the row. Then rows with the
      same first tokens share these pages. If False, `catch_up` reads every row from its start. A proposer with
      `take_features` then has no prefix cache.
    """

    max_length: int
    deterministic: bool

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws) -> None:
        """Writes state.draft_tokens[:, :k] and draft_counts; with `keep_draft_probs` also draft_probs[:, :k].

        It runs inside the step, so it must not read values on the host, and no shape may depend on data. Rows that are
        not running may get any values. Draft tokens must be ids of the target. draft_probs must have the distribution
        from which each draft token was drawn. The first `draft_counts` draft tokens of a row are used, the others are
        ignored.

        Args:
            state: views of the buffers of the step's rows.
            shape: shape of the step. k is `shape.num_drafts`.
            draws: source of random numbers, to be drawn for the purpose `purpose_of(shape)`.
        """

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Reads tokens of each row that the proposer has not read yet, at most `chunk` of them.

        Adds the numbers of tokens that were read to state.draft_lengths. Draft tokens are not read before they are
        accepted.
        """


class FeatureReader(Proposer, Protocol):
    """Proposer that gets the target's hidden states as soon as they are computed.

    Attributes:
        features, kept: see `Proposer`.
    """

    features: tuple[int, ...]
    kept: tuple[int, ...]

    def take_features(
        self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch
    ) -> Tensor | None:
        """Reads the target's hidden states at some positions of each row.

        It runs inside a step or a prefill pass, so it must not read values on the host, and no shape may depend on
        data.

        Args:
            state: buffers of the batch slots, after the accepted tokens were written; one slot in a prefill pass.
            shape: shape of the step or pass.
            features: [B, Q, layers, hidden], hidden states in the target's dtype.
            rows: `rows.positions` are the positions of `features`, `rows.ids` the tokens that follow these positions.
                `rows.write_mask` is False for rejected draft tokens, batch slots that do not run, and padding.

        Returns:
            [B, Q, *kept], an entry for each position. The entry of a sequence's newest position is stored. None if
            `kept` is ().
        """


class ProposerBase(ABC):
    """Base class of this package's proposers. Subclasses define `propose` and `catch_up`. Other methods have defaults.

    Attributes:
        max_length, deterministic, kept, computed_again, in_pages: see `Proposer`.
        reads_back: number of a sequence's newest tokens that `propose` itself reads, if they were not read before.
            `catch_up` leaves them out.
        feeds_drafts: True if K/V of the draft tokens are in the proposer's KV cache after `propose`.
    """

    max_length: int = 0
    deterministic: bool = False
    kept: tuple[int, ...] = ()
    computed_again: int = 0
    in_pages: bool = False
    reads_back: int = 2
    feeds_drafts: bool = True

    @property
    def features(self) -> tuple[int, ...]:
        """Target layers whose residual stream the proposer reads, see `Proposer`. () by default: it reads none."""
        return ()

    @property
    def takes_features(self) -> bool:
        """True if this proposer is a `FeatureReader`."""
        return type(self).take_features is not ProposerBase.take_features

    @property
    def drafter(self) -> object:
        """The proposer that makes the draft tokens: this object, or in a wrapper the wrapped proposer."""
        return self

    @abstractmethod
    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Reads tokens that the proposer has not read yet; see `Proposer.catch_up`."""

    def take_features(
        self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch
    ) -> Tensor | None:
        """Reads hidden states of the target; see `FeatureReader`. Only called if a subclass defines it."""
        raise NotImplementedError


class Wrapping(ProposerBase):
    """Base class of proposers that wrap another proposer. Attributes and calls are forwarded to the wrapped one.

    Args:
        inner: the wrapped proposer. It may lack attributes that `Proposer` does not require.
    """

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.max_length, self.deterministic = inner.max_length, is_deterministic(inner)
        self.kept, self.in_pages = kept_of(inner), kept_in_pages(inner)
        self.computed_again = computed_again_of(inner)
        self.reads_back, self.feeds_drafts = reads_back_of(inner), feeds_drafts(inner)

    @property
    def features(self) -> tuple[int, ...]:
        """Target layers that the wrapped proposer reads. `LearnedDrafts.read` may change them later."""
        return features_of(self._inner)

    @property
    def takes_features(self) -> bool:
        """True if the wrapped proposer is a `FeatureReader`."""
        return takes_features(self._inner)

    @property
    def drafter(self) -> object:
        """The wrapped proposer."""
        return self._inner

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Forwards the call to the wrapped proposer."""
        self._inner.catch_up(state, shape, chunk)

    def take_features(
        self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch
    ) -> Tensor | None:
        """Forwards the call to the wrapped proposer."""
        return cast("FeatureReader", self._inner).take_features(state, shape, features, rows)


# A user's own proposer need not be a `ProposerBase`. Only these functions know the defaults of attributes that it
# lacks.


def features_of(proposer: object) -> tuple[int, ...]:
    """Returns the target layers whose residual stream a proposer reads. (): it reads no hidden states."""
    return tuple(getattr(proposer, "features", ()))


def kept_of(proposer: object) -> tuple[int, ...]:
    """Returns the shape of the entry that a `FeatureReader` stores for each sequence between steps. (): none."""
    return tuple(getattr(proposer, "kept", ()))


def computed_again_of(proposer: object) -> int:
    """Returns the number of positions that a `FeatureReader` computes again in the next step, see `Proposer`.

    0 if the proposer has no such attribute.
    """
    return int(getattr(proposer, "computed_again", 0))


def reads_back_of(proposer: object) -> int:
    """Returns the number of a sequence's newest tokens that `propose` itself reads, see `ProposerBase`.

    2 if the proposer has no such attribute.
    """
    return int(getattr(proposer, "reads_back", 2))


def feeds_drafts(proposer: object) -> bool:
    """True if K/V of the draft tokens are in the proposer's KV cache after `propose`."""
    return bool(getattr(proposer, "feeds_drafts", True))


def kept_in_pages(proposer: object) -> bool:
    """True if a proposer stores everything about a sequence in the sequence's KV cache pages; see `Proposer`."""
    return bool(getattr(proposer, "in_pages", False))


def takes_features(proposer: object) -> bool:
    """True if a proposer is a `FeatureReader`."""
    if isinstance(proposer, ProposerBase):
        return proposer.takes_features
    return hasattr(proposer, "take_features")


def is_deterministic(proposer: object) -> bool:
    """Returns the attribute `deterministic` of a proposer. It was called `certain` in an older release."""
    return bool(proposer.deterministic if hasattr(proposer, "deterministic") else getattr(proposer, "certain", False))


def reads_ahead(proposer: object) -> int:
    """Returns n if the proposer's K/V of a position depend on the n tokens after that position.

    n is 1 or more for a `FeatureReader`, else 0.
    """
    return 1 + computed_again_of(proposer) if takes_features(proposer) else 0


def drafter_of(proposer: object) -> object:
    """Returns the proposer that makes the draft tokens: `proposer` itself, or the one that it wraps."""
    return proposer.drafter if isinstance(proposer, ProposerBase) else proposer


def feature_shape(proposer: object, max_drafts: int, hidden: int) -> tuple[int, ...]:
    """Returns the shape of the data that is stored for each sequence between steps. (): nothing is stored.

    Args:
        proposer: the proposer that reads the data, see `Proposer`.
        max_drafts: largest number of draft tokens of a step.
        hidden: size of the target's hidden states.
    """
    layers = features_of(proposer)
    if not layers:
        return ()
    return kept_of(proposer) if takes_features(proposer) else (max_drafts + 1, len(layers), hidden)


def feature_buffer(
    proposer: object, batch: int, max_drafts: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Allocates the buffer [batch, *feature_shape] that stores data for a proposer between steps.

    Returns None if nothing is stored. For arguments see `feature_shape`; batch is the number of batch slots.
    """
    shape = feature_shape(proposer, max_drafts, hidden)
    return torch.zeros(batch, *shape, dtype=dtype, device=device) if shape else None
