"""One decoding step: propose, score, verify, commit. Every running row advances by 1..k+1 tokens.

The step reads and writes one DecodeState. It never reads a value back to the host, and no shape in it depends
on data, so that it can be captured as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec import sampling, verify
from fastspec.kv_cache.cache import PassRows, slots_of
from fastspec.models.base import CausalModel
from fastspec.proposers.base import FILTERED, GREEDY, Proposer, StepShape
from fastspec.state import AT_LIMIT, RUNNING, STOPPED, DecodeState


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step runs on besides its state.

    Attributes:
        target: the model whose law the output follows.
        proposer: writes the drafts; None allows k = 0 only.
        page_size: positions per cache page.
    """

    target: CausalModel
    proposer: Proposer | None
    page_size: int


def step(parts: Parts, state: DecodeState, shape: StepShape, draws: verify.Draws) -> None:
    """Advances every running row of `state`; rows that are not running are left as they are."""
    if shape.num_drafts and parts.proposer is not None:
        parts.proposer.propose(state, shape, draws)
    drafts = state.draft_tokens[:, : shape.num_drafts]
    places = state.lengths[:, None] + torch.arange(shape.num_drafts + 1, device=state.lengths.device)
    logits = score(parts, state, shape, drafts, places - 1)
    if shape.sampler == GREEDY:
        accepted, block = verify.greedy(logits, drafts, state.draft_counts)
    else:
        p = sampling.law(logits, state.sampler, filtered=shape.sampler == FILTERED)
        q = state.draft_probs[:, : shape.num_drafts].to(p.dtype)
        accepted, block = verify.rejection(p, q, drafts, state.draft_counts, places, draws, sampling.TARGET)
    if shape.top_logprobs is not None:
        record_logprobs(state, shape.top_logprobs, logits, block)
    commit(state, shape, accepted, block)


def score(parts: Parts, state: DecodeState, shape: StepShape, drafts: Tensor, positions: Tensor) -> Tensor:
    """Feeds the last token and the drafts to the target; logits [B, k+1, V] of what follows each."""
    last = state.tokens.gather(1, positions[:, :1].clamp(0, state.tokens.shape[1] - 1))
    rows = PassRows(
        tokens=torch.cat((last, drafts), dim=1),
        positions=positions,
        slots=slots_of(state.block_table, positions, parts.page_size, state.running[:, None]),
        block_table=state.block_table,
        num_blocks=shape.num_blocks,
        tiling=shape.tiling,
    )
    return parts.target.logits(parts.target.hidden(rows), shape.tiling)


def commit(state: DecodeState, shape: StepShape, accepted: Tensor, block: Tensor) -> None:
    """Appends block[:, :accepted+1], cut at the first stop id or at the row's limit, whichever is first.

    Args:
        accepted: int64 [B], drafts accepted.
        block: int64 [B, k+1], the accepted drafts and one more token.
    """
    k = shape.num_drafts
    running = state.running
    places = torch.arange(k + 1, device=block.device)
    is_stop = (block[:, :, None] == state.stop_ids[:, None, :]).any(-1) & (places <= accepted[:, None])
    # one more than the place of the first stop id; k + 2 where there is none
    upto_stop = torch.where(is_stop, places + 1, k + 2).amin(dim=1)
    room = state.limits - state.lengths
    count = torch.minimum(torch.minimum(accepted + 1, upto_stop), room)
    count = torch.where(running, count, 0)
    finish = torch.where(upto_stop <= room, torch.where(upto_stop <= k + 1, STOPPED, RUNNING), RUNNING)
    finish = torch.where((finish == RUNNING) & (count == room), AT_LIMIT, finish)

    junk = state.tokens.shape[1] - 1
    at = (state.lengths[:, None] + places).clamp(max=junk)
    state.tokens.scatter_(1, torch.where(places < count[:, None], at, junk), block)
    if k:
        # the draft fed positions up to lengths + drafts - 2; its next pass starts two before the new length
        fed = torch.minimum(state.lengths + state.draft_counts - 1, state.lengths + count - 1)
        state.draft_lengths.copy_(torch.where(running & (state.draft_counts > 0), fed, state.draft_lengths))
    state.lengths.add_(count)
    state.finish.copy_(torch.where(running, finish, state.finish))
    state.block[:, : k + 1].copy_(block)
    state.emitted.copy_(count)
    state.accepted.copy_(torch.where(running, accepted, -1))


def record_logprobs(state: DecodeState, top: int, logits: Tensor, block: Tensor) -> None:
    """Stores the raw target's log-probabilities of block [B, k+1], and of the `top` largest logits [B, k+1, V]."""
    places = block.shape[1]
    logprobs = logits.log_softmax(dim=-1)
    state.logprobs[:, :places] = logprobs.gather(2, block[:, :, None])[:, :, 0]
    if top:
        values, ids = logprobs.topk(top, dim=-1)
        state.top_logprobs[:, :places, :top] = values
        state.top_ids[:, :places, :top] = ids


def prefill(parts: Parts, state: DecodeState, shape: StepShape, start: int, chunk: int) -> None:
    """Feeds the target the prompt tokens of positions start..start+chunk-1 of one row, all but the last.

    The caller passes a state of one row, chunks at fixed absolute positions and a tiling of exactly one chunk, so
    that a prompt's K/V bits depend on that prompt alone.
    """
    positions = torch.arange(start, start + chunk, device=state.lengths.device)[None]
    writes = state.running[:, None] & (positions < state.lengths[:, None] - 1)
    tokens = state.tokens.gather(1, positions.clamp(max=state.tokens.shape[1] - 1))
    rows = PassRows(
        tokens=tokens,
        positions=torch.where(writes, positions, 0),
        slots=slots_of(state.block_table, positions, parts.page_size, writes),
        block_table=state.block_table,
        num_blocks=shape.num_blocks,
        tiling=shape.tiling,
    )
    parts.target.hidden(rows)
