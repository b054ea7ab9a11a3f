"""Hands the target's hidden states to the proposer that reads them, at the end of a step and over a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fastspec.proposers.interface import FeatureReader, Proposer, takes_features
from fastspec.shapes import ForwardBatch, StepShape
from fastspec.state import DecodeState


def hand_over_step(
    proposer: Proposer | None,
    state: DecodeState,
    shape: StepShape,
    features: Tensor,
    rows: ForwardBatch,
    buffer: Tensor | None,
) -> None:
    """Hands over the hidden states of a step, after its commit.

    Newly committed positions are handed over with the tokens that follow them, which are those that the step emitted;
    also those of rows that ended in the step, because their pages may be kept for later prompts.

    Args:
        proposer: with `features`.
        state: the step's rows.
        features: [B, k+1, layers, hidden] of the positions that the step fed.
        rows: what it fed.
        buffer: as `feature_buffer` makes it, of at least these rows.
    """
    if takes_features(proposer):
        count = state.emitted  # 0 of rows that did not step
        committed = torch.arange(features.shape[1], device=count.device) < count[:, None]
        following = state.block[:, : features.shape[1]].contiguous()
        reader = cast("FeatureReader", proposer)
        _tell(reader, state, shape, features, replace(rows, ids=following, write_mask=committed), count, buffer)
    elif buffer is not None:
        kept = buffer[: state.batch, : features.shape[1]]
        kept.copy_(torch.where(state.running[:, None, None, None], features, kept))


def hand_over_prompt(
    proposer: Proposer | None,
    state: DecodeState,
    shape: StepShape,
    features: Tensor,
    rows: ForwardBatch,
    buffer: Tensor | None,
) -> None:
    """Hands over the hidden states of a pass over a piece of a prompt; arguments as of `hand_over_step`, for one row.

    Args:
        rows: what the pass fed.
    """
    if takes_features(proposer):
        following = state.tokens.gather(1, (rows.positions + 1).clamp(max=state.tokens.shape[1] - 1))
        reader = cast("FeatureReader", proposer)
        _tell(reader, state, shape, features, replace(rows, ids=following), rows.write_mask.sum(dim=1), buffer)
    elif buffer is not None:
        _keep_newest(features, rows.write_mask.sum(dim=1), buffer[:, 0])


def _tell(
    proposer: FeatureReader,
    state: DecodeState,
    shape: StepShape,
    features: Tensor,
    rows: ForwardBatch,
    count: Tensor,
    buffer: Tensor | None,
) -> None:
    found = proposer.take_features(state, shape, features, rows)
    if buffer is not None and found is not None:
        _keep_newest(found, count, buffer[: state.batch])


def _keep_newest(found: Tensor, count: Tensor, buffer: Tensor) -> None:
    """Copies each row's last valid entry, number `count` [B] of found [B, Q, ..], to the buffer, where it has any."""
    wide = [1] * (found.dim() - 2)
    if found.shape[1] > 1:
        newest = (count - 1).clamp_min(0).view(-1, 1, *wide)
        found = found.gather(1, newest.expand(-1, 1, *found.shape[2:]))
    torch.where((count > 0).view(-1, *wide), found[:, 0], buffer, out=buffer)
