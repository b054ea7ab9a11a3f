"""What stands between a model's logits and its distribution: biases, penalties, and ids that may not come yet.

The order is that of transformers' `LogitsProcessorList`: bias (`SequenceBiasLogitsProcessor`), repetition penalty
(`RepetitionPenaltyLogitsProcessor`), ids that are banned, stop ids before the least number of new tokens
(`MinNewTokensLengthLogitsProcessor`). vLLM's frequency and presence penalties come after the repetition penalty, as
there. A banned id has a bias of -inf: nothing that comes later brings it back, so one table does for both.

All of it is pure but `count`. Shapes depend on no values, so a step with any of it is captured once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProcessorRows:
    """What B rows do to logits; the neutral values change no bit of them.

    Attributes:
        bias: fp32 [B, V], added; -inf bans an id. Neutral: 0.
        in_prompt: bool [B, V], ids of the prompt.
        output_counts: int32 [B, V], how often an id was emitted.
        repetition: fp32 [B], divides positive logits of ids in prompt or output and multiplies others. Neutral: 1.
        presence: fp32 [B], taken off the logits of ids in the output. Neutral: 0.
        frequency: fp32 [B], taken off as often as the id was emitted. Neutral: 0.
        stop_ids: int64 [B, S], padded with -1.
        min_lengths: int64 [B], tokens of prompt and output that a row has before a stop id may come. Neutral: 0.
    """

    bias: Tensor
    in_prompt: Tensor
    output_counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    stop_ids: Tensor
    min_lengths: Tensor


def process(logits: Tensor, rows: ProcessorRows, lengths: Tensor, drafts: Tensor) -> Tensor:
    """Logits [B, R, V] as a row's options make them, each place as if the drafts before it had been emitted.

    Args:
        logits: of the ids 0..V-1, of which there may be fewer than `rows` know.
        rows: options and counts of committed tokens.
        lengths: int64 [B], committed tokens.
        drafts: int64 [B, D] with D >= R - 1: place r comes after the first D - R + 1 + r of them. What a row's later
            places hold is of no use where its drafts do not count.
    """
    places, vocab = logits.shape[1:]
    counts = counts_at(rows.output_counts[:, :vocab], drafts, places)
    seen = rows.in_prompt[:, None, :vocab] | (counts > 0)
    biased = logits + rows.bias[:, None, :vocab]
    penalty = rows.repetition[:, None, None]
    out = torch.where(seen, torch.where(biased < 0, biased * penalty, biased / penalty), biased)
    out = out - rows.frequency[:, None, None] * counts - rows.presence[:, None, None] * (counts > 0)
    at = lengths[:, None] + torch.arange(drafts.shape[1] - places + 1, drafts.shape[1] + 1, device=logits.device)
    early = (at < rows.min_lengths[:, None])[:, :, None]
    return out.masked_fill(early & _among(rows.stop_ids, vocab)[:, None], -torch.inf)


def counts_at(counts: Tensor, drafts: Tensor, places: int) -> Tensor:
    """int32 [B, R, V]: counts [B, V] and, at place r, the first D - R + 1 + r of drafts [B, D]; no other ids."""
    vocab = counts.shape[1]
    before = drafts.shape[1] - places + 1
    known = ((drafts >= 0) & (drafts < vocab)).to(counts.dtype)
    ids = drafts.clamp(0, vocab - 1)
    first = counts.scatter_add(1, ids[:, :before], known[:, :before])
    later = counts.new_zeros(len(counts), places - 1, vocab)
    later.scatter_add_(2, ids[:, before:, None], known[:, before:, None])
    return torch.cat((first[:, None], later), dim=1).cumsum(dim=1, dtype=counts.dtype)


def _among(ids: Tensor, vocab: int) -> Tensor:
    """bool [B, V]: which ids below V are among int64 [B, S]."""
    at = torch.where((ids >= 0) & (ids < vocab), ids, vocab)
    found = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, at, True)[:, :vocab]


def count(counts: Tensor, block: Tensor, emitted: Tensor) -> None:
    """Adds the first `emitted` int64 [B] tokens of block int64 [B, K+1] to counts int32 [B, V], in place."""
    places = torch.arange(block.shape[1], device=block.device)
    new = (places < emitted[:, None]).to(counts.dtype)
    counts.scatter_add_(1, block.clamp(0, counts.shape[1] - 1), new)


def invalid(logits: Tensor) -> Tensor:
    """bool [B, R]: places where no token can be chosen by logits [B, R, V]: a NaN, an infinity, or all -inf."""
    return ~logits.amax(dim=-1).isfinite()


def flag_invalid(accepted: Tensor, places: Tensor) -> Tensor:
    """Accepted drafts int64 [B], so that nothing chosen at an invalid place is emitted; -1 where that leaves nothing.

    Drafts before that place are emitted: a row may end with one of them, and else the next step begins at that place.

    Args:
        accepted: int64 [B]; a row's tokens are chosen at places 0..accepted.
        places: bool [B, k+1], which are invalid.
    """
    first = first_invalid(places)
    return torch.where(first <= accepted, first - 1, accepted)


def first_invalid(places: Tensor) -> Tensor:
    """int64 [B]: the first invalid one of places bool [B, k+1]; k + 1 where there is none."""
    index = torch.arange(places.shape[1], device=places.device)
    return torch.where(places, index, places.shape[1]).amin(dim=1)


def drawable(probs: Tensor) -> Tensor:
    """Distributions [B, V] to draft from; where a row has none, one on id 0: any draft is judged correctly."""
    none = probs.isnan().any(dim=-1, keepdim=True)
    first = torch.arange(probs.shape[1], device=probs.device) == 0
    return torch.where(none, first.to(probs.dtype), probs)


def allowed(logits: Tensor, masks: Tensor) -> Tensor:
    """Logits fp32 [B, R, V], -inf for ids whose bit is not set; no other bit of them changes.

    Args:
        logits: of R places.
        masks: int32 [B, R or more, W] with 32 W >= V: id i is bit i % 32 of word i // 32.
    """
    batch, places, vocab = logits.shape
    parts = masks[:, :places].contiguous().view(torch.uint8)  # the lowest bits first, as on every machine we run on
    bits = parts[..., None] & (1 << torch.arange(8, dtype=torch.uint8, device=logits.device))
    return logits.masked_fill((bits == 0).view(batch, places, -1)[..., :vocab], -torch.inf)
