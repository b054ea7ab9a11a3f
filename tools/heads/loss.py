"""How far a head's chains are from what makes the target accept them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .head import DraftHead
from .recipe import Recipe
from .rows import Batch
from .target import Target


def law_temperatures(recipe: Recipe) -> tuple[float, float]:
    """The temperatures of the target's laws that the loss compares with."""
    return 1.0, recipe.greedy_temperature


def chain_loss(head: DraftHead, target: Target, batch: Batch, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The loss of all chains that start in a batch.

    Each place adds the cross entropy to the target's law, and minus the logarithm of the chance that its token is
    accepted: sum(min(p, q)), at temperature 1 and at a low one that stands for greedy decoding. A place weighs as much
    as the chance that drafting comes that far, for what follows a refused token is never looked at.

    Returns:
        The loss, a scalar; and the mean chance of acceptance at temperature 1 of each place, [unroll], detached.
    """
    said = head.unroll(batch.features.to(head.fc.weight.dtype), batch.ids, target.embedding, recipe.unroll)
    starts = said[0].shape[1]
    laws = _laws(target, head, batch, recipe)
    survival = torch.ones_like(batch.text[:, :starts], dtype=torch.float32)
    loss, accepted = survival.new_zeros(()), []
    for place, logits in enumerate(said):
        # start i, in this pass, speaks about what follows position i + 1 + place
        here = slice(1 + place, 1 + place + starts)
        text = batch.text[:, here]
        missed, chance = _place_loss(logits.float(), [law[:, here] for law in laws], recipe)
        weights = text * (recipe.least_weight + (1 - recipe.least_weight) * survival)
        loss = loss + (weights * missed).sum() / text.sum().clamp_min(1)
        survival = survival * chance
        accepted.append((text * chance).sum() / text.sum().clamp_min(1))
    return loss / len(said), torch.stack(accepted)


@torch.no_grad()
def _laws(target: Target, head: DraftHead, batch: Batch, recipe: Recipe) -> list[Tensor]:
    """The target's laws at temperature 1 and the low one, [rows, tokens, draft_vocab], of what can be drafted."""
    temperatures, drafted = law_temperatures(recipe), None if len(head.d2t) == len(target.head) else head.drafted
    if all(temperature in batch.log_sums for temperature in temperatures):
        logits = target.logits(batch.last, drafted)
        return [(logits / each - batch.log_sums[each][..., None]).exp() for each in temperatures]
    logits = target.logits(batch.last)
    laws = [F.softmax(logits / temperature, -1) for temperature in temperatures]
    return laws if drafted is None else [law[..., drafted] for law in laws]


def _place_loss(logits: Tensor, laws: list[Tensor], recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Loss [rows, starts] of one place, and the chance of acceptance at temperature 1, detached."""
    log_q = F.log_softmax(logits, -1)
    loss = -(laws[0] * log_q).sum(-1)
    drafts = (log_q.exp(), F.softmax(logits / recipe.greedy_temperature, -1))
    chances = [torch.minimum(p, q).sum(-1) for p, q in zip(laws, drafts, strict=True)]
    for chance in chances:
        loss = loss - recipe.overlap_weight * chance.clamp_min(1e-4).log()
    return loss, chances[0].detach()
