"""Real speculative rollouts on held-out prompts: tokens per step, acceptance, and repeats in the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Llama
from .recipe import Recipe
from .repeats import repeated_share
from .tokens import END_OF_TEXT_ID

Figures = dict[str, float | int | list[float]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """What speculative decoding wrote.

    Attributes:
        text: int64 [rows, new_tokens], prompts left out.
        accepted: Drafted tokens accepted, one number for each step of each row.
        drafted: Tokens drafted in a step.
    """

    text: Tensor
    accepted: list[int]
    drafted: int

    def figures(self) -> Figures:
        """Returns the figures of the report, means over all steps of all rows."""
        steps = len(self.accepted)
        return {
            "tokens_per_step": round(sum(self.accepted) / steps + 1, 3),
            "acceptance_rate": round(sum(self.accepted) / (steps * self.drafted), 3),
            "accepted_at_least": [
                round(sum(count >= place for count in self.accepted) / steps, 3) for place in range(1, self.drafted + 1)
            ],
            "repeated_8gram_share": round(repeated_share(self.text).mean().item(), 3),
            "rows_that_end": int((self.text == END_OF_TEXT_ID).any(1).sum()),
        }


@torch.no_grad()
def speculate(target: Llama, draft: Llama, prompts: Tensor, new_tokens: int, k: int, temperature: float) -> Rollout:
    """Decodes prompts [rows, length] by drafting k tokens and verifying them, without caches.

    Each step of a row emits the accepted tokens and one of the target's. The end of text does not stop a row.
    """
    rows, length = prompts.shape
    ids = F.pad(prompts, (0, new_tokens + 2 * k + 1))
    lengths = torch.full((rows,), length, device=ids.device)
    counts: list[Tensor] = []
    while (live := lengths < length + new_tokens).any():
        q = _draft_tokens(draft, ids, lengths, k, temperature)
        p = _law(_logits_at(target, ids, lengths - 1, k + 1), temperature)
        accepted, next_token = _verify(p, q, ids.gather(1, _span(lengths, k)))
        ids.scatter_(1, (lengths + accepted)[:, None], next_token[:, None])
        lengths = torch.where(live, lengths + accepted + 1, lengths)
        counts.append(torch.where(live, accepted, -1))
    flat = [count for count in torch.stack(counts).flatten().tolist() if count >= 0]
    return Rollout(ids[:, length : length + new_tokens], flat, k)


def _draft_tokens(draft: Llama, ids: Tensor, lengths: Tensor, k: int, temperature: float) -> Tensor:
    """Writes k drafted tokens after each row's end into `ids`; returns their laws [rows, k, vocab]."""
    laws = []
    for place in range(k):
        law = _law(_logits_at(draft, ids, lengths + place - 1, 1), temperature)
        ids.scatter_(1, (lengths + place)[:, None], torch.multinomial(law[:, 0], 1))
        laws.append(law)
    return torch.cat(laws, 1)


def _verify(p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts a run of drafted tokens and picks the one after it.

    Args:
        p: The target's laws [rows, k + 1, vocab].
        q: The draft's laws [rows, k, vocab].
        drafted: int64 [rows, k].

    Returns:
        Accepted counts [rows] and next tokens [rows].
    """
    k, at = drafted.shape[1], drafted[..., None]
    ratio = (p[:, :k].gather(2, at) / q.gather(2, at))[..., 0]
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
    proposed = F.pad(q, (0, 0, 0, 1))  # nothing is proposed after k tokens: the last residual is p itself
    # A trace of p keeps the sum above zero where rounding leaves no residual.
    residual = ((p - proposed).clamp_min(0) + 1e-12 * p)[torch.arange(len(p), device=p.device), accepted]
    return accepted, torch.multinomial(residual, 1)[:, 0]


def _law(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return F.softmax(logits.float() / temperature, -1)


def _logits_at(model: Llama, ids: Tensor, first: Tensor, count: int) -> Tensor:
    """Returns logits [rows, count, vocab] from position first[row] on; causality hides the rest."""
    end = int(first.max()) + count
    at = _span(first, count)[..., None]
    logits: Tensor = model(ids[:, :end])
    return logits.gather(1, at.expand(-1, -1, logits.shape[-1]))


def _span(first: Tensor, count: int) -> Tensor:
    return first[:, None] + torch.arange(count, device=first.device)


def pick_prompts(documents: list[Tensor], count: int, length: int, seed: int = 7) -> Tensor:
    """Takes prompts of one length from random places, the documents in turn: int64 [count, length]."""
    generator = torch.Generator().manual_seed(seed)
    long_enough = [document for document in documents if len(document) > length]
    order = torch.randperm(len(long_enough), generator=generator).tolist()
    prompts = []
    for turn in range(count):
        document = long_enough[order[turn % len(order)]]
        start = int(torch.randint(len(document) - length + 1, (), generator=generator))
        prompts.append(document[start : start + length].long())
    return torch.stack(prompts)


def measure_pair(target: Llama, draft: Llama, prompts: Tensor, recipe: Recipe) -> dict[str, Figures]:
    """Rolls out every setting that the report lists; both models compute in float32."""
    settings = [(temperature, 4) for temperature in (0.0, 0.6, 0.8, 1.0)]
    settings += [(temperature, k) for temperature in (0.0, 0.8) for k in (5, 7)]
    measured = {}
    for temperature, k in settings:
        rollout = speculate(target, draft, prompts, recipe.new_tokens, k, temperature)
        measured[f"temperature {temperature}, k {k}"] = rollout.figures()
    return measured


def real_text_repeats(documents: list[Tensor], recipe: Recipe) -> float:
    """Returns the share of repeats in held-out text itself, in windows as long as a rollout."""
    windows = pick_prompts(documents, 4 * recipe.prompts, recipe.new_tokens)
    return round(repeated_share(windows).mean().item(), 3)
