"""Torch definition of the ops of steps that sample: the end of a step, and the draw of a draft."""

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
        """int64 [B]."""

    @property
    def draft_probs(self) -> Tensor:
        """[B, K, V]."""

    @property
    def output_counts(self) -> Tensor:
        """int32 [B, V]."""

    @property
    def processed(self) -> Tensor:
        """bool [B]."""

    @property
    def sampler(self) -> distribution.SamplerRows:
        """Options of the distribution."""

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
    """Ends a step that samples: judges drafts, flags invalid logits, commits, counts outputs, and publishes on request.

    Args:
        logits: fp32 [B, k+1, V] of the target.
        rows: changed in place, as by `commit` and `processors.count`.
        scratch: from `Ops.commit_scratch`. Torch needs none.
        work: from `Ops.sampled_work`. Torch needs none.
        publish_to: see `commit`.
        rule: one of `fastspec.sampling.rules.MODES`.
        deterministic: drafts were not drawn, so each has probability 1. Otherwise draft_probs has their distributions.
        draws: uniform numbers and draws.
        record: log-probabilities of the raw logits to record.
    """
    k = logits.shape[1] - 1
    drafts, counts = rows.draft_tokens[:, :k], rows.draft_counts
    places = rows.lengths[:, None] + torch.arange(k + 1, device=logits.device)
    judged = processors.process(logits, rows.processors, rows.lengths, drafts)
    invalid = processors.invalid(judged)
    # drafts after a place without a distribution cannot be judged, so they do not count
    counts = torch.minimum(counts, processors.first_invalid(invalid))
    # a place without a distribution accepts nothing; greedy rows keep their pick
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
    """Returns the logits of the distributions from which rows sample, for their log-probabilities.

    They are `distribution.sampled_logits` of `processors.process`. Rows whose `processed` is False keep their logits.

    Args:
        logits: fp32 [B, k+1, V] of the target, before the commit of the step.
        rows: nothing is changed.
        work: from `Ops.sampled_work`. Torch needs none.

    Returns:
        fp32 [B, k+1, V]; places that are not emitted have no meaning.
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
    """Draws draft j of every row and writes it to draft_tokens[:, j].

    Args:
        logits: fp32 [B, 1, V'] of the draft model, for the ids below V' <= V. Other ids have probability 0.
        rows: changed in place.
        j: number of the draft, which follows the row's first j drafts.
        work: from `Ops.sampled_work`. Torch needs none.
        purpose: key of the draw.
        keep_draft_probs: writes the distribution to draft_probs[:, j], for the verification.
        draws: draws.
    """
    judged = processors.process(logits, rows.processors, rows.lengths, rows.draft_tokens[:, :j])
    probs = distribution.compute_probs(judged, rows.sampler)[:, 0].masked_fill(processors.invalid(judged), torch.nan)
    probs = processors.drawable(probs)
    rows.draft_tokens[:, j] = draws.sample(probs, rows.lengths + j, purpose)
    if keep_draft_probs:
        known = probs.shape[1]
        rows.draft_probs[:, j, :known] = probs
        rows.draft_probs[:, j, known:] = 0.0  # an earlier deterministic draft may have written there
