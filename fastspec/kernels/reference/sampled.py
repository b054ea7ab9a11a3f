"""Torch definition of the ops of a step that samples: the end of a step, and a draft's token with its distribution."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fastspec.kernels.reference.step import Record, ended
from fastspec.sampling import distribution, processors, verify
from fastspec.sampling.rules import BLOCK, COUPLED


class SampledRows(verify.CommitRows, Protocol):
    """Tensors of B rows that a sampling op reads and writes; `fastspec.state.DecodeState` owns and explains them."""

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
    """Ends a step that samples: judges the drafts, flags what is invalid, commits, counts, and publishes if asked to.

    Args:
        logits: fp32 [B, k+1, V] of the target.
        rows: changed in place as by `commit` and `processors.count`.
        scratch, work: of the kernels, without use here.
        publish_to: as in `commit`.
        rule: one of `fastspec.sampling.rules.MODES`.
        deterministic: drafts were not drawn: their distribution is one on them. Otherwise it is that in draft_probs.
        draws: uniform numbers and draws.
        record: log-probabilities to record, of the raw logits.
    """
    k = logits.shape[1] - 1
    drafts, counts = rows.draft_tokens[:, :k], rows.draft_counts
    places = rows.lengths[:, None] + torch.arange(k + 1, device=logits.device)
    judged = processors.process(logits, rows.processors, rows.lengths, drafts)
    invalid = processors.invalid(judged)
    # a draft that comes behind a place without a distribution cannot be judged, and does not count
    counts = torch.minimum(counts, processors.first_invalid(invalid))
    # by a place without a distribution nothing is accepted; a greedy row's pick stays what it is
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
    """Draws draft j of every row: draft_tokens[:, j], and draft_probs[:, j] where distributions are kept.

    Args:
        logits: fp32 [B, 1, V'] of the draft, of the ids below V' <= V; the distribution is zero on the others.
        rows: changed in place.
        j: the draft; it comes after the row's first j drafts.
        work: of the kernels, without use here.
        purpose: keys the draw.
        keep_draft_probs: whether verification needs the distribution later.
        draws: draws.
    """
    judged = processors.process(logits, rows.processors, rows.lengths, rows.draft_tokens[:, :j])
    probs = distribution.compute_probs(judged, rows.sampler)[:, 0].masked_fill(processors.invalid(judged), torch.nan)
    probs = processors.drawable(probs)
    rows.draft_tokens[:, j] = draws.sample(probs, rows.lengths + j, purpose)
    if keep_draft_probs:
        known = probs.shape[1]
        rows.draft_probs[:, j, :known] = probs
        rows.draft_probs[:, j, known:] = 0.0  # a deterministic draft may have been such an id
