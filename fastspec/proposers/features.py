"""Hidden states of the target on their way to the proposer that reads them: at the end of a step, and of a prompt."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastspec.proposers.interface import Proposer, takes_features
from fastspec.shapes import ForwardBatch, StepShape
from fastspec.state import DecodeState


def hand_over_step(
    proposer: Proposer | None, state: DecodeState, shape: StepShape, features: Tensor, buffer: Tensor | None
) -> None:
    """Hands over what a step found, after its commit.

    Args:
        proposer: with `features`.
        state: the step's rows.
        features: [B, k+1, layers, hidden] of the positions that the step fed.
        buffer: as `feature_buffer` makes it, of at least these rows.
    """
    if takes_features(proposer):
        _tell(proposer, state, shape, features, _emitted(state, shape), buffer)
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
    """Hands over what a pass over a piece of a prompt found; arguments as those of `hand_over_step`, for one row.

    Args:
        rows: what the pass fed.
    """
    if takes_features(proposer):
        following = state.tokens.gather(1, (rows.positions + 1).clamp(max=state.tokens.shape[1] - 1))
        _tell(proposer, state, shape, features, replace(rows, ids=following), buffer)
    elif buffer is not None:
        _keep_newest(features, rows.write_mask, buffer[:, 0])


def _emitted(state: DecodeState, shape: StepShape) -> ForwardBatch:
    """Positions of a step that are committed, and the tokens that follow them.

    Those of rows that the step has ended, too: their pages may be kept for prompts to come.
    """
    places = torch.arange(shape.num_drafts + 1, device=state.lengths.device)
    at = (state.lengths - state.emitted)[:, None] + places  # of the tokens that were emitted
    write_mask = places < state.emitted[:, None]  # none of rows that did not step
    ids = state.tokens.gather(1, at.clamp(max=state.tokens.shape[1] - 1))
    positions = torch.where(write_mask, at - 1, 0)
    return shape.fed(ids, positions, write_mask, state.block_table)


def _tell(
    proposer: object,
    state: DecodeState,
    shape: StepShape,
    features: Tensor,
    rows: ForwardBatch,
    buffer: Tensor | None,
) -> None:
    found = proposer.take_features(state, shape, features, rows)  # type: ignore[attr-defined]
    if buffer is not None:
        _keep_newest(found, rows.write_mask, buffer[: state.batch])


def _keep_newest(found: Tensor, known: Tensor, buffer: Tensor) -> None:
    """The entry [..] of found [B, Q, ..] at the last place that `known` bool [B, Q] has replaces buffer's."""
    newest = (known.sum(dim=1) - 1).clamp_min(0)
    rows = torch.arange(len(known), device=known.device)
    some = known.any(dim=1).view(-1, *[1] * (buffer.dim() - 1))
    buffer.copy_(torch.where(some, found[rows, newest], buffer))
