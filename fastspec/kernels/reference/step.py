"""Torch definition of the ops of a step around the passes of models: the tokens of a pass, and the end of a step.

`fastspec.sampling.verify` defines the commit itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.common.weights import Weight
from fastspec.kernels.reference.linear import PartKeys, norm
from fastspec.sampling import processors, verify


@dataclass(frozen=True, slots=True)
class Record:
    """A request to record log-probabilities at the end of a step.

    Attributes:
        top: number of most probable ids to record at each place, beside the emitted id.
        work: from `Ops.record_work`. Torch needs none.
        details: outbox that they are published to, see `publish`. None: they stay in the rows.
    """

    top: int
    work: Any = None
    details: Tensor | None = None


def feed_rows(
    tokens: Tensor,
    lengths: Tensor,
    finish: Tensor,
    draft_tokens: Tensor,
    *,
    first: int,
    queries: int,
    limit: int,
    vocab: int,
    draft_counts: Tensor | None = None,
    num_drafts: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Builds the tokens of a pass, at positions lengths + first .. lengths + first + queries - 1 of every row.

    Args:
        tokens: int64 [B, T], read at positions below lengths.
        lengths: int64 [B].
        finish: int64 [B], 0 if the row is running.
        draft_tokens: int64 [B, K]; draft j is at position lengths + j.
        first: first position, relative to lengths.
        queries: tokens per row.
        limit: K and V of positions from here on are not stored.
        vocab: ids outside 0..vocab-1 become 0.
        draft_counts: int64 [B], given in the first pass of a draft, and written: the number of drafts, at most
            num_drafts, whose predecessors all lie below limit. A row without drafts stores nothing.
        num_drafts: k.

    Returns:
        Ids int64 [B, Q], positions int64 [B, Q] >= 0, and bool [B, Q], True for tokens whose K and V are stored.
    """
    offsets = torch.arange(first, first + queries, device=lengths.device)
    positions = lengths[:, None] + offsets
    known = min(queries, max(0, -first))
    at = positions[:, :known].clamp(0, tokens.shape[1] - 1)
    ids = torch.cat((tokens.gather(1, at), draft_tokens[:, first + known : first + queries]), dim=1)
    write_mask = (finish == verify.RUNNING)[:, None] & (positions >= 0) & (positions < limit)
    if draft_counts is not None:
        draft_counts.copy_((limit + 1 - lengths).clamp(0, num_drafts))
        write_mask = write_mask & (draft_counts > 0)[:, None]
    return torch.where((ids >= 0) & (ids < vocab), ids, 0), positions.clamp_min(0), write_mask


def embed(weight: Weight, ids: Tensor) -> Tensor:
    """Looks up rows [..., H] of an embedding [V, H] at int64 ids [...]. Ids are clamped to the table."""
    return weight.embed(ids.clamp(0, weight.shape[0] - 1))


def joined_norms(
    table: Weight, ids: Tensor, x: Tensor, norms: tuple[Tensor, Tensor], eps: float, *, x_first: bool = False
) -> Tensor:
    """Joins embeddings and hidden states, each normed by `norm`.

    Args:
        table: [V, K], x's dtype.
        ids: int64 [B, Q], clamped to the table.
        x: [B, Q, K], hidden states.
        norms: weights [K] for the embeddings and for x.
        eps: epsilon of both norms.
        x_first: x comes before the embeddings.

    Returns:
        [B, Q, 2 K], embeddings first.
    """
    parts = norm(embed(table, ids), norms[0], eps), norm(x, norms[1], eps)
    return torch.cat(parts[::-1] if x_first else parts, dim=-1)


def verify_commit(
    logits: Tensor | PartKeys,
    rows: verify.CommitRows,
    scratch: Any,
    publish_to: tuple[Tensor, Tensor] | None = None,
    record: Record | None = None,
) -> None:
    """Ends a greedy step: `verify.greedy`, `processors.flag_invalid`, then `ended`.

    Args:
        logits: fp32 [B, k+1, V], or the keys of its parts. With keys nothing is recorded.
        rows: changed in place, as by `verify.commit`.
        scratch: from `Ops.commit_scratch`. Torch needs none.
        publish_to: see `commit`.
        record: log-probabilities to record.
    """
    if isinstance(logits, PartKeys):
        picks = logits.picks()
        accepted = verify.agreeing(picks, rows.draft_tokens[:, : picks.shape[1] - 1], rows.draft_counts)
        ended(processors.flag_invalid(accepted, logits.invalid()), picks, rows, picks, publish_to, None)
        return
    accepted, block = verify.greedy(logits, rows.draft_tokens[:, : logits.shape[1] - 1], rows.draft_counts)
    ended(processors.flag_invalid(accepted, processors.invalid(logits)), block, rows, logits, publish_to, record)


def ended(
    accepted: Tensor,
    block: Tensor,
    rows: verify.CommitRows,
    logits: Tensor,
    publish_to: tuple[Tensor, Tensor] | None,
    record: Record | None,
) -> None:
    """Commits a step, and publishes its results if `publish_to` is given.

    If `record` is given, log-probabilities of raw logits [B, k+1, V] are recorded and published as well.
    """
    verify.commit(rows, accepted, block)
    if record is not None:
        record_logprobs(logits, rows, None, record)
    if publish_to is not None:
        details = None if record is None else record.details
        publish(*publish_to, rows, drafting=block.shape[1] > 1, details=details)


def record_logprobs(logits: Tensor, rows: verify.CommitRows, scratch: Any, record: Record) -> None:
    """Stores the log-probabilities of `rows.block` under raw logits, and the largest ones at each place.

    Places that are not emitted may get any values. Of equal logits the lowest id is first.

    Args:
        logits: fp32 [B, k+1, V].
        rows: `logprobs`, `top_ids` and `top_logprobs` are written.
        scratch: from `Ops.commit_scratch`. Torch needs none.
        record: log-probabilities to store. Nothing is published.
    """
    places, top = logits.shape[1], record.top
    values, ids, tops = logprobs_of(logits, rows.block[:, :places], top)
    rows.logprobs[:, :places] = values
    if top:
        rows.top_ids[:, :places, :top] = ids
        rows.top_logprobs[:, :places, :top] = tops


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the log-probabilities of tokens int64 [B, Q] under logits [B, Q, V], and of the `top` largest.

    Returns:
        fp32 [B, Q]; ids int64 [B, Q, top], of equal logits the lowest first; their log-probabilities [B, Q, top].
    """
    logprobs = logits.log_softmax(dim=-1)
    values = logprobs.gather(2, tokens[:, :, None])[:, :, 0]
    if not top:
        return values, tokens[:, :, None][:, :, :0], logprobs[:, :, :0]
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :, :top]
    return values, ids, logprobs.gather(2, ids)


def commit(
    accepted: Tensor,
    block: Tensor,
    rows: verify.CommitRows,
    scratch: Any,
    publish_to: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Ends a step with `verify.commit`, and with `publish` if `publish_to` is given.

    Args:
        accepted: int64 [B], accepted drafts.
        block: int64 [B, k+1], accepted drafts and the token after them.
        rows: changed in place, as by `verify.commit`.
        scratch: from `Ops.commit_scratch`. Torch needs none.
        publish_to: `entries` and `counter` of `publish`.
    """
    verify.commit(rows, accepted, block)
    if publish_to is not None:
        publish(*publish_to, rows, drafting=block.shape[1] > 1)


def publish(
    entries: Tensor, counter: Tensor, rows: verify.CommitRows, *, drafting: bool, details: Tensor | None = None
) -> None:
    """Counts a step in `counter`, and stores its results in slot counter % slots of a ring.

    Args:
        entries: int64 [slots, 1 + Bmax * (5 + K)]: the sequence number, then for each row emitted, accepted, drafts
            that counted, finish, and the K+1 tokens of its block. Entries of rows beyond `rows` are not written.
        counter: int64 [1], sequence number of the last step.
        rows: the results.
        drafting: True if this step had drafts. Otherwise the number of drafts is 0.
        details: int32 [slots, Bmax, K+1, 1+2N]. At each place of the block: the bits of its log-probability, the N most
            probable ids, and the bits of their log-probabilities.
    """
    counter.add_(1)
    slot = counter % entries.shape[0]
    counts = rows.draft_counts * int(drafting)
    entry = torch.cat((torch.stack((rows.emitted, rows.accepted, counts, rows.finish), dim=1), rows.block), dim=1)
    if details is not None:
        values = (rows.logprobs[..., None].view(torch.int32), rows.top_ids, rows.top_logprobs.view(torch.int32))
        details[:, : len(rows.emitted)].index_copy_(0, slot, torch.cat(values, dim=-1).int()[None])
    entries[:, 1 : 1 + entry.numel()].index_copy_(0, slot, entry.flatten()[None])
    entries[:, 0].index_copy_(0, slot, counter)
