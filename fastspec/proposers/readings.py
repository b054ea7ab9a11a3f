"""Chooses the target layers whose hidden states a head reads, if the head's config is ambiguous.

Each possible choice of layers is called a reading. All readings are tried on a short text.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from fastspec.models.heads.spec import described
from fastspec.models.interface import CausalModel
from fastspec.proposers.chain import ChainDrafts
from fastspec.proposers.interface import drafter_of
from fastspec.shapes import ForwardBatch, StepShape, Tiling


def choose_reading(
    target: CausalModel, proposer: object, shape: StepShape, tiling: Tiling, pages: Tensor, state_rows: Tensor
) -> None:
    """Chooses the target layers that a head reads, if its config allows several choices (readings).

    The reading is chosen with which the head's first draft tokens agree with the target most often. A warning names it.
    Does nothing if the proposer has no head, or the head has only one reading. Waits for the device.

    Args:
        target: the target model.
        proposer: the head, or lookup combined with it.
        shape: shape of a prefill pass of `shape.tiling.queries` tokens.
        tiling: tile shapes of the matrix products of a decode step.
        pages: int64 [1, P], KV cache pages that no request uses.
        state_rows: int64 [1], index of recurrent states that no request uses.
    """
    head = drafter_of(proposer)
    if not isinstance(head, ChainDrafts) or len(head.readings) < 2:
        return
    shares = _accepted(target, head, shape, tiling, pages, state_rows)
    best = max(range(len(shares)), key=lambda index: shares[index])  # the first of equal ones
    tried = "; ".join(
        f"boundaries {described(reading)}: {share:.0%}" for reading, share in zip(head.readings, shares, strict=True)
    )
    chosen = head.readings[best]
    head.read(chosen)
    warnings.warn(
        f"the head's config names layers of its target, and engines differ in how they count them. First drafts taken "
        f"on a short text: {tried}. Boundaries {described(chosen)} are read; feature_layers={list(chosen)} says so "
        "without a trial",
        stacklevel=5,
    )


def _accepted(
    target: CausalModel, head: ChainDrafts, shape: StepShape, tiling: Tiling, pages: Tensor, state_rows: Tensor
) -> list[float]:
    """Returns one share (0 to 1) for each reading of the head.

    It is the share of positions of a text at which the head's first draft token is the target's most probable token.
    For arguments see `choose_reading`.
    """
    chunk = shape.tiling.queries
    assert chunk is not None, "passes over prompts have a size"
    text = head.sample[:chunk]
    count = len(text)
    ids = torch.tensor([[*text, *[0] * (chunk - count)]], dtype=torch.int64, device=pages.device)
    places = torch.arange(chunk, device=pages.device)[None]

    def rows(ids: Tensor, upto: int) -> ForwardBatch:
        mask = places < upto
        return shape.forward_batch(ids, torch.where(mask, places, 0), mask, pages, state_rows)

    wanted = [head.layers_of(reading) for reading in head.readings]
    layers = tuple(dict.fromkeys(layer for each in wanted for layer in each))
    hidden, features = target.hidden_with_features(rows(ids, count), layers)
    picks = target.logits(hidden.transpose(0, 1), tiling)[:, 0].argmax(-1)
    found = []
    for each in wanted:
        read = features[:, :, [layers.index(layer) for layer in each]]
        drafts = head.first_drafts(read, rows(ids.roll(-1, 1), count - 1))[0]
        found.append(float((drafts[: count - 2] == picks[1 : count - 1]).float().mean()))
    return found
