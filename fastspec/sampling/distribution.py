"""Sampling distribution and random numbers of the sampler.

Random numbers come from Philox4x32-10 (Salmon et al., SC 2011), a counter-based generator. Each number is a function of
(row seed, absolute position, purpose, token). It does not depend on the batch, the step or the row's slot. So a row's
text does not depend on other rows. After rejected draft tokens no random state has to be restored, because the next
step uses the same numbers at the same positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DRAFT, ACCEPT, TARGET = 0, 1, 2  # purposes of random numbers: three independent streams at each position

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10
# largest fp32 below 1: a uniform number of 1 would give an infinite time, and its token could never be drawn
_BELOW_ONE = 1.0 - 2.0**-24


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Computes Philox4x32-10: four random 32-bit numbers from a counter of four such numbers and a key of two.

    All numbers are unsigned, and stored in int64 tensors, which broadcast to one shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, so the high word is right after masking
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0,
            high & _MASK,
            ((low >> 32) & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _unit(high: Tensor, low: Tensor) -> Tensor:
    """Converts two random unsigned 32-bit numbers to one fp32 number in (0, 1). Small values keep their precision."""
    value = high.float() * 2.0**-32 + (low.float() + 0.5) * 2.0**-64
    return value.clamp(max=_BELOW_ONE)


def exponentials(seeds: Tensor, positions: Tensor, purpose: int, num_tokens: int) -> Tensor:
    """Returns random numbers with the distribution Exponential(1), fp32 [B, num_tokens].

    Each number is a function of seeds[b], positions[b], the purpose and the token.

    Args:
        seeds, positions: int64 [B].
        purpose: DRAFT, ACCEPT or TARGET.
        num_tokens: size of the vocabulary.
    """
    pairs = torch.arange((num_tokens + 1) // 2, device=seeds.device)
    words = philox(
        (pairs, positions[:, None] & _MASK, torch.full_like(pairs, purpose), positions[:, None] >> 32),
        (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK),
    )
    even, odd = _unit(words[0], words[1]), _unit(words[2], words[3])
    return -torch.log1p(-torch.stack((even, odd), dim=-1).flatten(1)[:, :num_tokens])


def uniforms(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Returns uniform random numbers in (0, 1), fp32 [B, k].

    Each number is a function of seeds[b], positions[b, j] and the purpose.

    Args:
        seeds: int64 [B].
        positions: int64 [B, k].
        purpose: DRAFT, ACCEPT or TARGET.
    """
    zero = torch.zeros_like(positions)
    words = philox(
        (zero, positions & _MASK, zero + purpose, positions >> 32),
        (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK),
    )
    return _unit(words[0], words[1])


@dataclass(frozen=True, slots=True)
class PhiloxDraws:
    """Source of the random numbers by which draft tokens are accepted and tokens are sampled.

    Attributes:
        seeds: int64 [B], seed of each row.
    """

    seeds: Tensor

    def accept(self, probability: Tensor, positions: Tensor) -> Tensor:
        """Returns bool [B, k], True if a uniform random number at `positions` [B, k] is below `probability` [B, k].

        A probability of 1 always gives True.
        """
        return uniforms(self.seeds, positions, ACCEPT) < probability

    def sample(self, probs: Tensor, positions: Tensor, purpose: int) -> Tensor:
        """Draws ids [B] from probs [B, V], which need not sum to 1.

        The result is the id with the smallest value of (exponential random number / probability), as in the Gumbel-max
        method. So P(token) = probs / sum(probs) exactly, without a cumulative sum. Of equal values the lowest id is
        taken. With probs [B, R, V] and positions [B, R] the result is ids [B, R].

        Args:
            probs: probabilities of the ids.
            positions: absolute positions of the drawn tokens, int64 [B].
            purpose: DRAFT, ACCEPT or TARGET.
        """
        seeds = self.seeds.view(-1, *[1] * (positions.dim() - 1)).expand_as(positions).flatten()
        times = exponentials(seeds, positions.flatten(), purpose, probs.shape[-1])
        return (probs / times.view(probs.shape)).argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """Sampling options of B batch slots.

    Attributes:
        temperature: fp32 [B]; 0 is greedy.
        top_k: int64 [B]; 0 keeps all ids.
        top_p: fp32 [B]; 1 keeps all ids.
        min_p: fp32 [B]; 0 keeps all ids.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def compute_probs(logits: Tensor, options: SamplerRows) -> Tensor:
    """Computes probabilities [B, R, V] from logits [B, R, V]. Options have the order and meaning of transformers.

    Temperature comes first. Top-k also keeps ids whose logit equals the k-th largest. Top-p keeps the smallest set of
    most probable ids whose probabilities sum to at least top_p. Min-p keeps ids with at least min_p times the largest
    probability. A greedy row has probability 1 on the id with the largest logit. Of equal logits the lowest id counts.
    """
    probs = sampled_logits(logits, options).softmax(-1)
    one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where((options.temperature <= 0)[:, None, None], one_hot, probs)


def sampled_logits(logits: Tensor, options: SamplerRows) -> Tensor:
    """Returns logits [B, R, V] divided by the temperature, with -inf for ids that top-k, top-p or min-p removes.

    Their softmax is the distribution from which a row samples. A greedy row keeps its logits.
    """
    greedy_rows = (options.temperature <= 0)[:, None, None]
    scaled = logits / torch.where(greedy_rows, 1.0, options.temperature[:, None, None])
    return torch.where(greedy_rows, scaled, _filter(scaled, options))


def _filter(scaled: Tensor, options: SamplerRows) -> Tensor:
    """Returns logits [B, R, V] with -inf where top-k, top-p or min-p removes a token."""
    order = scaled.sort(dim=-1, descending=True, stable=True)
    kept = _kept_by_rank(order.values, options)
    scaled = scaled.masked_fill(~torch.zeros_like(kept).scatter(-1, order.indices, kept), -torch.inf)
    probs = scaled.softmax(-1)
    floor = options.min_p[:, None, None] * probs.amax(-1, keepdim=True)
    return scaled.masked_fill(probs < floor, -torch.inf)


def _kept_by_rank(descending: Tensor, options: SamplerRows) -> Tensor:
    """Returns bool [B, R, V], True where top-k and then top-p keep a logit of `descending`.

    `descending` [B, R, V] has the logits in descending order.
    """
    vocab = descending.shape[-1]
    top_k = torch.where(options.top_k > 0, options.top_k, vocab).clamp(1, vocab)[:, None, None]
    kth = descending.gather(-1, (top_k - 1).expand(*descending.shape[:-1], 1))
    kept = descending >= kth
    probs = descending.masked_fill(~kept, -torch.inf).softmax(-1)
    # sum of the probabilities from each rank to the last one, added from the smallest up as in transformers. Ids whose
    # sum is at most 1 - top_p are removed
    tail = probs.flip(-1).cumsum(-1).flip(-1)
    heavy = (tail > 1.0 - options.top_p[:, None, None]) | (options.top_p >= 1.0)[:, None, None]
    first = torch.arange(vocab, device=descending.device) == 0
    return kept & (heavy | first)
