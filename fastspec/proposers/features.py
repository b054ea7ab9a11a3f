"""Passes the target's hidden states to the proposer that reads them, after each step and prefill pass."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fastspec.proposers.interface import FeatureReader, Proposer, computed_again_of, takes_features
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
    """Passes the target's hidden states of a decode step to the proposer, after draft tokens were accepted or rejected.

    The hidden states of accepted positions are passed together with the tokens that follow them. Sequences that ended
    in the step are included, because later prompts may reuse their KV cache pages.

    Args:
        proposer: the proposer. Nothing is done if it is None, or has no `features`.
        state: buffers of the step's batch slots.
        shape: shape of the step.
        features: [B, k+1, layers, hidden], hidden states at the positions that the step fed to the target.
        rows: the tokens and positions that the step fed.
        buffer: result of `feature_buffer`, for at least B batch slots. None: nothing is stored between steps.
    """
    if takes_features(proposer):
        count = state.emitted  # 0 for rows that did not step
        committed = torch.arange(features.shape[1], device=count.device) < count[:, None]
        following = state.block[:, : features.shape[1]].contiguous()
        reader, fed = cast("FeatureReader", proposer), replace(rows, ids=following, write_mask=committed)
        if buffer is not None and (older := computed_again_of(reader)):
            kept, joined = buffer[: state.batch], torch.cat((buffer[: state.batch], features), dim=1)
            reader.take_features(state, shape, joined, _with_older(state, fed, older))
            _keep_window(joined, count, kept)
        else:
            _tell(reader, state, shape, features, fed, count, buffer)
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
    """Passes the target's hidden states of a prefill pass to the proposer.

    Args:
        proposer, state, shape: see `hand_over_step`.
        features: [B, Q, layers, hidden], hidden states at the positions that the pass fed.
        rows: the tokens and positions that the pass fed.
        buffer: [1, ..], the sequence's entry of the result of `feature_buffer`. None: nothing is stored between steps.
    """
    if takes_features(proposer):
        following = state.tokens.gather(1, (rows.positions + 1).clamp(max=state.tokens.shape[1] - 1))
        reader, count = cast("FeatureReader", proposer), rows.write_mask.sum(dim=1)
        if buffer is not None and computed_again_of(reader):
            # nothing is computed again, because all tokens of the prompt were known in the pass before
            _keep_window(torch.cat((buffer, features), dim=1), count, buffer)
        _tell(reader, state, shape, features, replace(rows, ids=following), count, buffer)
    elif buffer is not None:
        _keep_newest(features, rows.write_mask.sum(dim=1), buffer[:, 0])


def _with_older(state: DecodeState, fed: ForwardBatch, older: int) -> ForwardBatch:
    """Returns `fed` with `older` more positions before the first position of each sequence.

    As in `fed`, `ids` are the tokens that follow the positions. The added positions are written if the first position
    of the sequence is written.
    """
    positions = fed.positions[:, :1] + torch.arange(-older, 0, device=fed.positions.device)
    written = fed.write_mask[:, :1] & (positions >= 0)
    positions = positions.clamp_min(0)
    return replace(
        fed,
        ids=torch.cat((state.tokens.gather(1, positions + 1), fed.ids), dim=1),
        positions=torch.cat((positions, fed.positions), dim=1),
        write_mask=torch.cat((written, fed.write_mask), dim=1),
        first_block=0,  # these positions may be in an earlier block than those of the step
    )


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
    """Copies the last valid entry of each sequence to the buffer. Sequences with a count of 0 keep their old entry.

    Args:
        found: [B, Q, ..], one entry for each of Q positions.
        count: int64 [B], number of valid entries of each sequence: the first ones.
        buffer: [B, ..], one entry for each sequence.
    """
    wide = [1] * (found.dim() - 2)
    if found.shape[1] > 1:
        newest = (count - 1).clamp_min(0).view(-1, 1, *wide)
        found = found.gather(1, newest.expand(-1, 1, *found.shape[2:]))
    torch.where((count > 0).view(-1, *wide), found[:, 0], buffer, out=buffer)


def _keep_window(joined: Tensor, count: Tensor, buffer: Tensor) -> None:
    """Copies the n newest entries of each sequence to the buffer.

    Args:
        joined: [B, n + Q, ..], the n entries of the buffer, then one entry for each of Q positions.
        count: int64 [B], number of valid entries of each sequence among the Q: the first ones.
        buffer: [B, n, ..], n entries for each sequence.
    """
    wide = [1] * (joined.dim() - 2)
    places = count[:, None] + torch.arange(buffer.shape[1], device=count.device)
    buffer.copy_(joined.gather(1, places.view(*places.shape, *wide).expand(-1, -1, *joined.shape[2:])))
