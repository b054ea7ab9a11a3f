"""How many drafted tokens the target accepts, on held-out text that the target wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .head import DraftHead
from .target import Target

Drafter = Callable[[Tensor, int], list[Tensor]]
Figures = dict[str, object]
RESAMPLES = 1000
BATCH = 16


@dataclass(frozen=True, slots=True)
class Steps:
    """What speculative decoding of some texts did.

    Attributes:
        accepted: One list for each text, with the drafted tokens accepted in each step.
        places: Tokens drafted in a step.
    """

    accepted: list[list[int]]
    places: int

    def figures(self) -> Figures:
        """Tokens per step and the share of steps that accept at least 1, 2, ... tokens.

        Each with the bounds of 95 % that drawing the texts anew gives (bootstrap over texts, for steps of one text are
        alike).
        """
        counts = torch.tensor([[len(steps), *self._reaching(steps)] for steps in self.accepted], dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)
        sums = counts[drawn].sum(1)
        shares = sums[:, 1:] / sums[:, :1]
        total = counts.sum(0)
        found = total[1:] / total[0]
        bounds = torch.quantile(shares, torch.tensor([0.025, 0.975], dtype=torch.float64), 0)
        steps = torch.quantile(1 + shares.sum(1), torch.tensor([0.025, 0.975], dtype=torch.float64))
        return {
            "steps": int(total[0]),
            "tokens_per_step": round(1 + found.sum().item(), 3),
            "tokens_per_step_95": _rounded(steps),
            "accepted_at_least": _rounded(found),
            "accepted_at_least_95": [_rounded(bounds[:, place]) for place in range(self.places)],
        }

    def _reaching(self, steps: list[int]) -> list[int]:
        return [sum(count >= place for count in steps) for place in range(1, self.places + 1)]


def draft_with(head: DraftHead, target: Target) -> Drafter:
    """Chains of a head: laws over the target's vocabulary, as `decode` takes them."""

    def chains(ids: Tensor, places: int) -> list[Tensor]:
        features = target.read(ids).features.to(head.fc.weight.dtype)
        said = head.unroll(features, ids, target.embedding.to(head.fc.weight.dtype), places)
        return [_spread(logits.float(), head) for logits in said]

    return chains


def draft_with_model(model: torch.nn.Module) -> Drafter:
    """Chains of an ordinary draft model of transformers with the target's vocabulary."""

    def chains(ids: Tensor, places: int) -> list[Tensor]:
        logits = model(input_ids=ids).logits.float()
        starts = ids.shape[1] - places
        return [logits[:, 1 + place : 1 + place + starts] for place in range(places)]

    return chains


@torch.no_grad()
def decode(
    target: Target, drafter: Drafter, prompts: Tensor, new_tokens: int, places: int, temperature: float
) -> Steps:
    """Counts what speculative decoding of prompts accepts.

    The target writes the texts alone; then each step is replayed on them. At temperature 0 a drafted token is accepted
    if it is the text's. Above, given that a text's token was drawn from the target's law p, verification by rejection
    would have got it from the draft's law q with chance min(1, q / p): the replay flips that coin, so its steps have
    the very distribution of the steps that decoding takes.

    Args:
        target: Writes, and gives p.
        drafter: From texts int64 [rows, tokens] and a number of places, one [rows, tokens - places, vocabulary] of
            logits for each place: at start i and place j, of token i + 2 + j, drafted after tokens 0 .. i + 1 and the
            text's own up to i + 1 + j, with the target's states of positions 0 .. i.
        prompts: int64 [rows, length].
        new_tokens: Tokens that a text gets at most.
        places: Tokens drafted in a step.
        temperature: 0 is greedy.
    """
    accepted = []
    generator = torch.Generator().manual_seed(1)
    for rows in prompts.split(BATCH):
        texts, lengths = target.write(rows.to(target.device), new_tokens, temperature)
        taken = _taken(target, drafter, texts, places, temperature, generator)
        accepted += [_walk(row, rows.shape[1], end) for row, end in zip(taken, lengths.tolist(), strict=True)]
    return Steps(accepted, places)


def _taken(
    target: Target, drafter: Drafter, texts: Tensor, places: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Whether the token i + 2 + j of a text is accepted at place j of the chain from start i: bool [rows, i, j]."""
    padded = F.pad(texts, (0, places + 1))  # so that the last starts have whole chains; `_walk` stops at the end
    laws = drafter(padded, places)
    starts = laws[0].shape[1] - 1
    p = None if temperature == 0 else F.log_softmax(target.logits(target.read(padded).last) / temperature, -1)
    taken = []
    for place, logits in enumerate(laws):
        tokens = padded[:, 2 + place : 2 + place + starts]
        logits = logits[:, :starts]
        if p is None:
            taken.append(logits.argmax(-1) == tokens)
            continue
        log_q = F.log_softmax(logits / temperature, -1).gather(-1, tokens[..., None])[..., 0]
        log_p = p[:, 1 + place : 1 + place + starts].gather(-1, tokens[..., None])[..., 0]
        coin = torch.rand(tokens.shape, generator=generator).to(tokens.device)
        taken.append(coin.log() < log_q - log_p)
    return torch.stack(taken, -1)


def _walk(taken: Tensor, prompt: int, end: int) -> list[int]:
    """Replays one text: the first of its new tokens is the target's own, then come steps."""
    runs = taken.long().cumprod(-1).sum(-1).tolist()
    places, counts, known = taken.shape[-1], [], prompt + 1
    while known + places < end:  # a step that the end of the text cuts short is left out
        counts.append(runs[known - 2])
        known += counts[-1] + 1
    return counts


def _spread(logits: Tensor, head: DraftHead) -> Tensor:
    if len(head.d2t) == head.shape.vocab:
        return logits
    whole = logits.new_full((*logits.shape[:-1], head.shape.vocab), -torch.inf)
    whole[..., head.drafted] = logits
    return whole


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
