"""Passes the target's hidden states to the proposer that reads them, after each step and prefill pass."""

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
    """Passes the hidden states of a step to the proposer, after its commit.

    The hidden states of newly committed positions are passed together with the tokens that follow them, which the step
    emitted. This includes rows that ended in the step, because their pages may be reused by later prompts.

    Args:
        proposer: the proposer. Nothing is done if it has no `features`.
        state: rows of the step.
        features: [B, k+1, layers, hidden] at the positions that the step fed.
        rows: the tokens and positions that the step fed.
        buffer: result of `feature_buffer`, with at least these rows.
    """
    if takes_features(proposer):
        count = state.emitted  # 0 for rows that did not step
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
    """Passes the hidden states of a prefill pass of one row. For other arguments see `hand_over_step`.

    Args:
        rows: the tokens and positions that the pass fed.
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
    """Copies each row's last valid entry, number `count` - 1 [B] of found [B, Q, ..], to the buffer, if it has any."""
    wide = [1] * (found.dim() - 2)
    if found.shape[1] > 1:
        newest = (count - 1).clamp_min(0).view(-1, 1, *wide)
        found = found.gather(1, newest.expand(-1, 1, *found.shape[2:]))
    torch.where((count > 0).view(-1, *wide), found[:, 0], buffer, out=buffer)
