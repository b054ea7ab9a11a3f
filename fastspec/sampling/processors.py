"""Logits processors: token masks, biases, penalties, and stop ids before the minimum length.

The order is that of transformers' `LogitsProcessorList`: bias (`SequenceBiasLogitsProcessor`), repetition penalty
(`RepetitionPenaltyLogitsProcessor`), banned ids, stop ids before the minimum number of new tokens
(`MinNewTokensLengthLogitsProcessor`). Frequency and presence penalties are vLLM's, and come after the repetition
penalty. A banned id has a bias of -inf. No later processor can undo that, so one table serves biases and bans.

All functions except `count` are pure. No shape depends on values, so one captured CUDA graph serves all options.

A *place* is one of the positions that a decode step scores in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProcessorRows:
    """Options that change logits, and token counts, of B batch slots. Neutral values leave the logits bit-identical.

    Attributes:
        bias: fp32 [B, V], added to the logits; -inf bans an id. Neutral: 0.
        in_prompt: bool [B, V], True for ids of the prompt.
        output_counts: int32 [B, V], number of times that an id was emitted.
        repetition: fp32 [B], divides positive logits and multiplies others, for ids in prompt or output. Neutral: 1.
        presence: fp32 [B], subtracted from logits of ids in the output. Neutral: 0.
        frequency: fp32 [B], subtracted from an id's logit once for each time the id was emitted. Neutral: 0.
        stop_ids: int64 [B, S], ids that end the row, padded with -1.
        min_lengths: int64 [B], number of tokens of prompt and output before which no stop id is allowed. Neutral: 0.
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
    """Applies biases, penalties and bans to logits. At each place the draft tokens before it count as emitted.

    A place is a position that the step scores.

    Args:
        logits: [B, R, V], logits of the ids 0..V-1 at R places. V may be less than the vocabulary of `rows`.
        rows: options and counts of committed tokens.
        lengths: int64 [B], number of committed tokens.
        drafts: int64 [B, D] with D >= R - 1, draft tokens. Place r comes after the first D - R + 1 + r draft tokens.
            The result at places after the last valid draft token of a row is not used.
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
    """Counts how often each id was emitted or drafted before each of R places: int32 [B, R, V].

    Args:
        counts: int32 [B, V], number of times that each id was emitted before the step.
        drafts: int64 [B, D], draft tokens. The first D - R + 1 + r draft tokens come before place r. Ids outside
            0..V-1 are ignored.
        places: R, the number of positions that the step scores.
    """
    vocab = counts.shape[1]
    before = drafts.shape[1] - places + 1
    known = ((drafts >= 0) & (drafts < vocab)).to(counts.dtype)
    ids = drafts.clamp(0, vocab - 1)
    first = counts.scatter_add(1, ids[:, :before], known[:, :before])
    later = counts.new_zeros(len(counts), places - 1, vocab)
    later.scatter_add_(2, ids[:, before:, None], known[:, before:, None])
    return torch.cat((first[:, None], later), dim=1).cumsum(dim=1, dtype=counts.dtype)


def _among(ids: Tensor, vocab: int) -> Tensor:
    """Returns bool [B, V], True for ids that are in `ids` int64 [B, S]. Ids outside 0..V-1 are ignored."""
    at = torch.where((ids >= 0) & (ids < vocab), ids, vocab)
    found = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, at, True)[:, :vocab]


def count(counts: Tensor, block: Tensor, emitted: Tensor) -> None:
    """Adds the tokens that a decode step has emitted to `counts`, in place.

    Args:
        counts: int32 [B, V], number of times that each id was emitted.
        block: int64 [B, K+1], tokens of the step.
        emitted: int64 [B], number of first tokens of `block` that were emitted.
    """
    places = torch.arange(block.shape[1], device=block.device)
    new = (places < emitted[:, None]).to(counts.dtype)
    counts.scatter_add_(1, block.clamp(0, counts.shape[1] - 1), new)


def invalid(logits: Tensor) -> Tensor:
    """Returns bool [B, R], True for positions at which no token can be chosen.

    The logits of such a position contain NaN or +inf, or are all -inf. `logits` has shape [B, R, V].
    """
    return ~logits.amax(dim=-1).isfinite()


def flag_invalid(accepted: Tensor, places: Tensor) -> Tensor:
    """Lowers the numbers of accepted draft tokens, so that no token of an invalid place is emitted.

    A place is one of the k + 1 positions that a step scores. Draft tokens before the invalid place are still emitted.
    The next step of the sequence begins at that place.

    Args:
        accepted: int64 [B], number of accepted draft tokens. A sequence's tokens are chosen at places 0..accepted.
        places: bool [B, k+1], True for invalid places.

    Returns:
        int64 [B], the lowered numbers. -1 if place 0 is invalid, so that nothing can be emitted.
    """
    first = first_invalid(places)
    return torch.where(first <= accepted, first - 1, accepted)


def first_invalid(places: Tensor) -> Tensor:
    """Returns int64 [B], the index of the first True value in each row of `places` bool [B, k+1]; k + 1 if none."""
    index = torch.arange(places.shape[1], device=places.device)
    return torch.where(places, index, places.shape[1]).amin(dim=1)


def drawable(probs: Tensor) -> Tensor:
    """Returns probs [B, V] in which rows with NaN have probability 1 on id 0, so that a draft token can be drawn.

    The text still follows the target's distribution, because verification ensures this for any draft token.
    """
    none = probs.isnan().any(dim=-1, keepdim=True)
    first = torch.arange(probs.shape[1], device=probs.device) == 0
    return torch.where(none, first.to(probs.dtype), probs)


def allowed(logits: Tensor, masks: Tensor) -> Tensor:
    """Returns logits with -inf for ids that grammar masks do not allow. Other logits are unchanged.

    Args:
        logits: fp32 [B, R, V], logits at R positions.
        masks: int32 [B, R or more, W] with 32 W >= V. Id i is allowed if bit i % 32 of element i // 32 is set.
    """
    batch, places, vocab = logits.shape
    parts = masks[:, :places].contiguous().view(torch.uint8)  # little-endian: byte 0 has bits 0..7
    bits = parts[..., None] & (1 << torch.arange(8, dtype=torch.uint8, device=logits.device))
    return logits.masked_fill((bits == 0).view(batch, places, -1)[..., :vocab], -torch.inf)
