"""Which hidden states a head was trained on: where its config can be read in several ways, tried on a short text."""

from __future__ import annotations

import warnings
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fastspec.models.heads.boundaries import described
from fastspec.proposers.combined import LookupThenModel
from fastspec.runtime.engine import Engine
from fastspec.shapes import GREEDY, ForwardBatch


@runtime_checkable
class HasReadings(Protocol):
    """A proposer that may have to choose.

    Attributes:
        readings: the ways of reading, as boundaries; the most likely first.
        sample: ids of a text to try them on.
    """

    readings: tuple[tuple[int, ...], ...]
    sample: tuple[int, ...]

    def read(self, reading: tuple[int, ...]) -> None:
        """Reads these hidden states from now on, and no others any more."""

    def layers_of(self, reading: tuple[int, ...]) -> tuple[int, ...]:
        """A reading as the target's layers, see `Proposer.features`."""

    def first_drafts(self, features: Tensor, rows: ForwardBatch) -> Tensor:
        """The first draft behind every place of rows [B, Q]: int64 [B, Q], in the target's ids.

        Args:
            features: [B, Q, layers, hidden] of the positions.
            rows: as `FeatureReader.take_in` has them.
        """


def settle_reading(engine: Engine) -> None:
    """Lets a head read what makes its first drafts best, and says so; does nothing where there is one way only.

    Waits for the device. No row may have been admitted yet.
    """
    proposer = engine.parts.proposer
    if isinstance(proposer, LookupThenModel):
        proposer = proposer.model
    if not isinstance(proposer, HasReadings) or len(proposer.readings) < 2:
        return
    with engine.on_device():
        shares = _accepted(engine, proposer)
    best = max(range(len(shares)), key=lambda index: shares[index])  # the first of equals
    tried = "; ".join(
        f"boundaries {described(reading)}: {share:.0%}"
        for reading, share in zip(proposer.readings, shares, strict=True)
    )
    chosen = proposer.readings[best]
    proposer.read(chosen)
    warnings.warn(
        f"the head's config names layers of its target, and engines differ in how they count them. First drafts taken "
        f"on a short text: {tried}. Boundaries {described(chosen)} are read; feature_layers={list(chosen)} says so "
        "without a trial",
        stacklevel=4,
    )


def _accepted(engine: Engine, proposer: HasReadings) -> list[float]:
    """By reading, the share of places of the text where the first draft is what the target picks there."""
    parts, device = engine.parts, engine.state.lengths.device
    chunk = engine.chunks[0]
    text = proposer.sample[:chunk]
    count = len(text)
    shape = engine.chunk_shape(chunk, chunk, GREEDY)
    ids = torch.tensor([[*text, *[0] * (chunk - count)]], dtype=torch.int64, device=device)
    places = torch.arange(chunk, device=device)[None]
    pages = torch.arange(1, engine.state.block_table.shape[1] + 1, device=device)[None]  # nobody has them yet

    def rows(ids: Tensor, upto: int) -> ForwardBatch:
        mask = places < upto
        return ForwardBatch(ids, torch.where(mask, places, 0), mask, pages, shape.num_blocks, shape.tiling)

    wanted = [proposer.layers_of(reading) for reading in proposer.readings]
    layers = tuple(dict.fromkeys(layer for each in wanted for layer in each))
    hidden, features = parts.target.hidden_with_features(rows(ids, count), layers)
    picks = parts.target.logits(hidden.transpose(0, 1), engine.decode_tiling)[:, 0].argmax(-1)
    found = []
    for each in wanted:
        read = features[:, :, [layers.index(layer) for layer in each]]
        drafts = proposer.first_drafts(read, rows(ids.roll(-1, 1), count - 1))[0]
        found.append(float((drafts[: count - 2] == picks[1 : count - 1]).float().mean()))
    return found
