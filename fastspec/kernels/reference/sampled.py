"""Torch definition of the sampling ops: verification with commit, the target's processed logits, a draft's draw."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fastspec.kernels.reference.step import Record, ended
from fastspec.sampling import distribution, processors, verify
from fastspec.sampling.rules import BLOCK, COUPLED


class SampledRows(verify.CommitRows, Protocol):
    """Tensors of B rows that the sampling ops read and write; `fastspec.state.DecodeState` describes them."""

    @property
    def seeds(self) -> Tensor:
        """Seed of each row, int64 [B]."""

    @property
    def draft_probs(self) -> Tensor:
        """Distributions from which the draft tokens were drawn, [B, K, V]."""

    @property
    def output_counts(self) -> Tensor:
        """Number of occurrences of each id in a row's output, int32 [B, V]."""

    @property
    def processed(self) -> Tensor:
        """True for rows whose log-probabilities are those of the processed logits, bool [B]."""

    @property
    def sampler(self) -> distribution.SamplerRows:
        """Temperature, top-k, top-p and min-p of each row."""

    @property
    def processors(self) -> processors.ProcessorRows:
        """Logit processors of the rows."""


def sampled_commit(
    logits: Tensor,
    rows: SampledRows,
    scratch: Any,
    work: Any,
    publish_to: tuple[Tensor, Tensor] | None = None,
    *,
    rule: str,
    deterministic: bool,
    draws: verify.Draws,
    record: Record | None = None,
) -> None:
    """Ends a step in which rows sample: verifies draft tokens, commits the accepted ones and one more, counts outputs.

    Args:
        logits: fp32 [B, k+1, V], the target's logits.
        rows: state of the rows, changed as by `commit` and `processors.count`.
        scratch: scratch memory from `Ops.commit_scratch`. Torch needs none.
        work: scratch memory from `Ops.sampled_work`. Torch needs none.
        publish_to: `entries` and `counter` of `publish`. None: nothing is published.
        rule: verification rule, one of `fastspec.sampling.rules.MODES`.
        deterministic: True if draft tokens were not drawn, so that each has probability 1. False: `rows.draft_probs`
            has the distributions from which they were drawn.
        draws: source of random numbers.
        record: log-probabilities of the raw logits to record. None: nothing is recorded.
    """
    k = logits.shape[1] - 1
    drafts, counts = rows.draft_tokens[:, :k], rows.draft_counts
    places = rows.lengths[:, None] + torch.arange(k + 1, device=logits.device)
    judged = processors.process(logits, rows.processors, rows.lengths, drafts)
    invalid = processors.invalid(judged)
    # drafts after a position with invalid logits cannot be verified, so they do not count
    counts = torch.minimum(counts, processors.first_invalid(invalid))
    # at a position with invalid logits nothing is accepted; greedy rows keep their argmax
    undefined = invalid & (rows.sampler.temperature > 0)[:, None]
    p = distribution.compute_probs(judged, rows.sampler).masked_fill(undefined[:, :, None], torch.nan)
    if rule == COUPLED:
        accepted, block = verify.coupled(p, drafts, counts, places, draws, distribution.TARGET)
    else:
        q = None if deterministic else rows.draft_probs[:, :k].to(p.dtype)
        judge = verify.block if rule == BLOCK else verify.rejection
        accepted, block = judge(p, q, drafts, counts, places, draws, distribution.TARGET)
    ended(processors.flag_invalid(accepted, invalid), block, rows, logits, publish_to, record)
    processors.count(rows.output_counts, rows.block, rows.emitted)


def processed_logits(logits: Tensor, rows: SampledRows, work: Any) -> Tensor:
    """Returns the logits from whose softmax rows sample, so that their log-probabilities can be recorded.

    These are the logits after the logit processors, temperature, top-k, top-p and min-p. Rows with False in
    `rows.processed` keep the raw logits.

    Args:
        logits: fp32 [B, k+1, V], the target's logits.
        rows: state of the rows before the commit of the step. It is not changed.
        work: scratch memory from `Ops.sampled_work`. Torch needs none.

    Returns:
        fp32 [B, k+1, V]. Values at positions whose token is not emitted have no meaning.
    """
    drafts = rows.draft_tokens[:, : logits.shape[1] - 1]
    judged = processors.process(logits, rows.processors, rows.lengths, drafts)
    return torch.where(rows.processed[:, None, None], distribution.sampled_logits(judged, rows.sampler), logits)


def sampled_draw(
    logits: Tensor,
    rows: SampledRows,
    j: int,
    work: Any,
    *,
    purpose: int,
    keep_draft_probs: bool,
    draws: verify.Draws,
) -> None:
    """Draws the draft token with index j of every row, and writes it to `rows.draft_tokens[:, j]`.

    Args:
        logits: fp32 [B, 1, V'], the draft model's logits for ids below V' <= V. Other ids have probability 0.
        rows: state of the rows, changed in place.
        j: index of the draft token, from 0 on.
        work: scratch memory from `Ops.sampled_work`. Torch needs none.
        purpose: selects the random numbers: the draft's own, or those of the target (coupled verification).
        keep_draft_probs: True to write the distribution to `rows.draft_probs[:, j]`, which verification reads.
        draws: source of random numbers.
    """
    judged = processors.process(logits, rows.processors, rows.lengths, rows.draft_tokens[:, :j])
    probs = distribution.compute_probs(judged, rows.sampler)[:, 0].masked_fill(processors.invalid(judged), torch.nan)
    probs = processors.drawable(probs)
    rows.draft_tokens[:, j] = draws.sample(probs, rows.lengths + j, purpose)
    if keep_draft_probs:
        known = probs.shape[1]
        rows.draft_probs[:, j, :known] = probs
        rows.draft_probs[:, j, known:] = 0.0  # an earlier deterministic draft may have written there
