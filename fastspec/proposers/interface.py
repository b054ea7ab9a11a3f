"""What a proposer must do. A proposer sees views of the state, and hidden states of the target if it asks for them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastspec.sampling.verify import Draws
from fastspec.shapes import ForwardBatch, StepShape
from fastspec.state import DecodeState


class Proposer(Protocol):
    """Writes the drafts of a step.

    Attributes:
        max_length: tokens of a row, from the first, that the proposer wants to be fed by `catch_up`; 0 for one that
            keeps nothing of its own, or that `take_features` tells all.
        deterministic: drafts are a function of the row's tokens (and features), with nothing drawn: their
            distribution is one on them, and draft_probs is neither written nor read.

    A proposer that reads the target's hidden states also has:

    - `features`, a tuple of target layers, counted from 0, whose residual stream it reads. -1 is the embedding, and the
      number of layers is the stream after the final norm.

    A proposer with features and without `take_features` is called as propose(..., features=buffer), a buffer
    [B, K+1, layers, hidden] in the target's dtype. Of a row whose last step emitted n = state.emitted tokens, entry
    i < n belongs to position lengths - 1 - n + i; entries from n on are those of refused drafts. Before a row's first
    step n is 1, and entry 0 belongs to the last position but one of its prompt; of a prompt of one token there is no
    such position, and n is 0.

    One that keeps something of the features, in a K/V cache of its own for example, is a `FeatureReader` and has:

    - `take_features(state, shape, features, rows)`, called with features [B, Q, layers, hidden] of every position of a
      row but the last, once each, in order. The call is made inside the pass that computed them: over a piece of a
      prompt, or at the end of a step, also of a plain one.
    - `kept`, the shape of what is kept of a row between steps; () for nothing. propose is then called with
      features=buffer [B, *kept], which holds what `take_features` returned for the newest position.

    One whose whole memory of a row lies in the row's pages says so:

    - `in_pages`, a bool: what `catch_up` and `take_features` make lies in the pages of the row and nowhere else. Rows
      that begin alike then share it. Without it such a row starts from nothing with `catch_up`, and a proposer with
      `take_features` shares no prompt.
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


class FeatureReader(Proposer, Protocol):
    """A proposer that gets the target's hidden states as soon as they are computed.

    Attributes:
        features: see `Proposer`.
        kept: see `Proposer`.
    """

    features: tuple[int, ...]
    kept: tuple[int, ...]

    def take_features(
        self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch
    ) -> Tensor | None:
        """Takes in what the target made of some positions of each row.

        Runs inside a step or a pass over a prompt: no host read, no data-dependent shape.

        Args:
            state: the rows, after the commit; of a prompt, one row.
            shape: of the step or pass.
            features: [B, Q, layers, hidden], in the target's dtype.
            rows: where they belong. `rows.positions` are theirs, `rows.ids` the tokens that follow each of them, and
                only what `rows.write_mask` says is so: refused drafts, rows that do not run and padding are masked.

        Returns:
            [B, Q, *kept], of which the entry of a row's newest position is kept; None where `kept` is ().
        """


def features_of(proposer: object) -> tuple[int, ...]:
    """The target layers whose residual stream a proposer reads; none for most."""
    return tuple(getattr(proposer, "features", ()))


def kept_in_pages(proposer: object) -> bool:
    """Whether all that a proposer keeps of a row's past lies in the row's pages; see `Proposer`."""
    return bool(getattr(proposer, "in_pages", False))


def reads_ahead(proposer: object) -> int:
    """How many later tokens an entry in the proposer's pages depends on: 1 where it reads features, else 0."""
    return int(takes_features(proposer))


def is_deterministic(proposer: object) -> bool:
    """The proposer's `deterministic`; one written for an older release may still call it `certain`."""
    return bool(proposer.deterministic if hasattr(proposer, "deterministic") else getattr(proposer, "certain", False))


def takes_features(proposer: object) -> bool:
    """Whether a proposer is a `FeatureReader`."""
    return hasattr(proposer, "take_features")


def feature_shape(proposer: object, max_drafts: int, hidden: int) -> tuple[int, ...]:
    """What is kept of a row's features between steps, see `Proposer`; () where nothing is."""
    layers = features_of(proposer)
    if not layers:
        return ()
    kept: tuple[int, ...] = proposer.kept if takes_features(proposer) else (max_drafts + 1, len(layers), hidden)  # type: ignore[attr-defined]
    return kept


def feature_buffer(
    proposer: object, batch: int, max_drafts: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The static buffer [batch, *feature_shape]; None where nothing is kept."""
    shape = feature_shape(proposer, max_drafts, hidden)
    return torch.zeros(batch, *shape, dtype=dtype, device=device) if shape else None
