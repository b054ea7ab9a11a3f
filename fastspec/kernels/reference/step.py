"""Torch definition of a step's ops around forward passes: the input tokens of a pass, verification, commit, publishing.

`fastspec.sampling.verify` defines verification and commit.
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
    """Options by which log-probabilities are recorded when a step is committed.

    Attributes:
        top: number of most probable ids to record for each token of the step, beside the token itself.
        work: scratch memory from `Ops.record_work`. Torch needs none.
        details: ring of results to which the log-probabilities are also published, see `publish`. None: they are only
            stored in the state of the rows.
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
    id_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Builds the input of a forward pass: tokens lengths + first .. lengths + first + queries - 1 of every row.

    Args:
        tokens: int64 [B, T], committed tokens, which are read at positions below lengths.
        lengths: int64 [B], number of committed tokens.
        finish: int64 [B], 0 if the row is running.
        draft_tokens: int64 [B, K]. Draft token j has position lengths + j.
        first: first position, relative to lengths.
        queries: number of tokens per row, Q.
        limit: K and V at positions from `limit` on are not stored.
        vocab: ids outside 0..vocab-1 become 0.
        draft_counts: int64 [B], given only in a draft model's first pass of a step. Receives the number of draft tokens
            that the model may make: at most num_drafts, and each only if all positions before it are below limit. Rows
            without draft tokens store no K and V.
        num_drafts: largest number of draft tokens of a row. Read only with `draft_counts`.
        id_map: int64 [vocab], for each id the one that is fed instead, such as the draft's. None: ids are fed as they
            are.

    Returns:
        Ids int64 [B, Q], positions int64 [B, Q] >= 0, and bool [B, Q], True for tokens whose K and V are stored.
    """
    offsets = torch.arange(first, first + queries, device=lengths.device)
    positions = lengths[:, None] + offsets
    known = min(queries, max(0, -first))
    ids = draft_tokens[:, first + known : first + queries]
    if known:
        at = positions[:, :known].clamp(0, tokens.shape[1] - 1)
        ids = torch.cat((tokens.gather(1, at), ids), dim=1)
    write_mask = (finish == verify.RUNNING)[:, None] & (positions >= 0) & (positions < limit)
    if draft_counts is not None:
        draft_counts.copy_((limit + 1 - lengths).clamp(0, num_drafts))
        write_mask = write_mask & (draft_counts > 0)[:, None]
    ids = torch.where((ids >= 0) & (ids < vocab), ids, 0)
    return ids if id_map is None else id_map[ids], positions.clamp_min(0), write_mask


def embed(weight: Weight, ids: Tensor) -> Tensor:
    """Returns the rows [..., H] of an embedding table [V, H] at int64 ids [...]. Ids are clamped to the table."""
    return weight.embed(ids.clamp(0, weight.shape[0] - 1))


def joined_norms(
    table: Weight, ids: Tensor, x: Tensor, norms: tuple[Tensor, Tensor], eps: float, *, x_first: bool = False
) -> Tensor:
    """Concatenates the RMSNorms of token embeddings and of hidden states: the input of a learned drafter's layer.

    Args:
        table: embedding table [V, K], x's dtype.
        ids: int64 [B, Q], clamped to the table.
        x: [B, Q, K], hidden states.
        norms: weights [K] of the norm of embeddings and of the norm of x; see `norm`.
        eps: epsilon of both norms.
        x_first: True for [x | embeddings], False for [embeddings | x].

    Returns:
        [B, Q, 2 K] in x's dtype.
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
    """Ends a greedy step: accepts the draft tokens that equal the target's argmax, commits and publishes.

    A row emits no token at or after a position with invalid logits (NaN or infinite).

    Args:
        logits: fp32 [B, k+1, V], the target's logits. Or `PartKeys`, only the largest logits of each part of the
            vocabulary; then log-probabilities cannot be recorded.
        rows: state of the rows, changed as by `verify.commit`.
        scratch: scratch memory from `Ops.commit_scratch`. Torch needs none.
        publish_to: `entries` and `counter` of `publish`. None: nothing is published.
        record: log-probabilities to record. None: nothing is recorded.
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
    """Commits the verified tokens of a step. Records log-probabilities and publishes the results if asked to.

    Args:
        accepted, block: see `commit`.
        rows: state of the rows, changed as by `verify.commit`.
        logits: fp32 [B, k+1, V], the target's raw logits. Not read without `record`.
        publish_to: `entries` and `counter` of `publish`. None: nothing is published.
        record: log-probabilities to record and to publish. None: nothing is recorded.
    """
    verify.commit(rows, accepted, block)
    if record is not None:
        record_logprobs(logits, rows, None, record)
    if publish_to is not None:
        details = None if record is None else record.details
        publish(*publish_to, rows, drafting=block.shape[1] > 1, details=details)


def record_logprobs(logits: Tensor, rows: verify.CommitRows, scratch: Any, record: Record) -> None:
    """Stores the log-probability of each token of `rows.block`, and the most probable ids at its position.

    Tokens that are not emitted may get any values. Of equal logits the lowest id is first.

    Args:
        logits: fp32 [B, k+1, V].
        rows: state of the rows, whose `logprobs`, `top_ids` and `top_logprobs` are written.
        scratch: scratch memory from `Ops.commit_scratch`. Torch needs none.
        record: number of most probable ids. Nothing is published.
    """
    places, top = logits.shape[1], record.top
    values, ids, tops = logprobs_of(logits, rows.block[:, :places], top)
    rows.logprobs[:, :places] = values
    if top:
        rows.top_ids[:, :places, :top] = ids
        rows.top_logprobs[:, :places, :top] = tops


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the log-probability of one token for each logits row, and those of the `top` most probable ids.

    Args:
        logits: fp32 [B, Q, V].
        tokens: int64 [B, Q].
        top: number of most probable ids.

    Returns:
        Log-probabilities of the tokens, fp32 [B, Q]; the most probable ids, int64 [B, Q, top], the lowest first if
        equal; the log-probabilities of these ids, fp32 [B, Q, top].
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
    """Commits the verified tokens of a step, and publishes the results if `publish_to` is given.

    Args:
        accepted: int64 [B], number of accepted draft tokens.
        block: int64 [B, k+1], the accepted draft tokens and the token after them.
        rows: state of the rows, changed as by `verify.commit`.
        scratch: scratch memory from `Ops.commit_scratch`. Torch needs none.
        publish_to: `entries` and `counter` of `publish`. None: nothing is published.
    """
    verify.commit(rows, accepted, block)
    if publish_to is not None:
        publish(*publish_to, rows, drafting=block.shape[1] > 1)


def publish(
    entries: Tensor, counter: Tensor, rows: verify.CommitRows, *, drafting: bool, details: Tensor | None = None
) -> None:
    """Adds 1 to `counter`, and writes the results of a step to slot counter % slots of a ring, which the host reads.

    Args:
        entries: int64 [slots, 1 + Bmax * (5 + K)], the ring. A slot has the step's sequence number. Then, for each row,
            it has the numbers of emitted tokens, of accepted and of valid draft tokens, the finish state, and the K+1
            tokens of its block. Results beyond the B rows of `rows` are not written.
        counter: int64 [1], sequence number of the last step.
        rows: state of the rows after the commit.
        drafting: True if this step had draft tokens. Otherwise their number is 0.
        details: int32 [slots, Bmax, K+1, 1+2N], a ring of log-probabilities. For each token of the block it has the
            bits of its log-probability, the N most probable ids, and the bits of their log-probabilities. None: there
            are none.
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
