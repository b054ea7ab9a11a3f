"""The second phase: the target unlearns running in circles, which small models do when they write greedily."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Llama, frozen_copy, write
from .recipe import Recipe
from .repeats import closes_repeat, repeated_share
from .tokens import Packer, random_windows
from .train import History, autocast, fast_dtype, next_token_loss, on_text, optimise

LOGGER = logging.getLogger(__name__)
BLENDS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
PROBED_ROWS = 512


@dataclass(frozen=True, slots=True)
class Blend:
    """How far the target goes from the weights that learned to those that unlooped.

    Attributes:
        share: 0 is the weights before, 1 those after.
        greedy_repeats: Share of its greedy text after validation prompts in repeated 8-grams.
    """

    share: float
    greedy_repeats: float


def unloop(model: Llama, recipe: Recipe, packer: Packer, stream: Tensor, validation: Tensor) -> tuple[History, Blend]:
    """Trains the target by unlikelihood on its own loops, beside real text, then takes a part of that way.

    The model continues training text greedily; where a token completes an 8-gram that stood in the continuation
    before, its probability is pushed down. The whole change makes greedy text hard to draft and costs loss on real
    text; a straight part of it keeps that loss and still breaks many loops. The part taken is the one that comes
    nearest to the recipe's share of repeats.

    Returns:
        What was done, and the part of it that was kept.
    """
    before = copy.deepcopy(model.state_dict())

    def loss_of(rows: Tensor, own: Tensor, repeats: Tensor) -> Tensor:
        with autocast(own):
            logits = model(own[:, :-1])
        chance = F.log_softmax(logits.float(), -1).gather(2, own[:, 1:, None])[..., 0].exp()
        unlikelihood = -torch.log1p(-chance.clamp_max(1 - 1e-6)) * repeats[:, 1:]
        return next_token_loss(model, rows) + recipe.unloop_weight * unlikelihood.sum() / repeats.numel()

    history = optimise(
        model,
        recipe.unloop,
        _looping_text(model, recipe, packer, stream),
        loss_of,
        on_text(validation),
        compiled=recipe.compiled,
        keep_best=False,
    )
    return history, choose_blend(model, before, recipe, validation)


def choose_blend(model: Llama, before: dict[str, Tensor], recipe: Recipe, validation: Tensor) -> Blend:
    """Moves the model's weights back towards those of before, to the recipe's share of repeats."""
    after = copy.deepcopy(model.state_dict())
    prompts = random_windows(validation.flatten(), PROBED_ROWS, recipe.prompt_length)
    blends = []
    for share in BLENDS:
        _load_blend(model, before, after, share)
        blends.append(Blend(share, round(_greedy_repeats(model, prompts, recipe.new_tokens), 3)))
        LOGGER.info("%s", blends[-1])
    chosen = min(blends, key=lambda blend: abs(blend.greedy_repeats - recipe.greedy_repeats))
    _load_blend(model, before, after, chosen.share)
    return chosen


def _load_blend(model: Llama, before: dict[str, Tensor], after: dict[str, Tensor], share: float) -> None:
    model.load_state_dict({name: torch.lerp(before[name], after[name], share) for name in before})


def _greedy_repeats(model: Llama, prompts: Tensor, new_tokens: int) -> float:
    writer = frozen_copy(model, fast_dtype(prompts))
    text = write(writer, prompts, new_tokens, torch.zeros(len(prompts), device=prompts.device))
    return repeated_share(text[:, prompts.shape[1] :]).mean().item()


def _looping_text(
    model: Llama, recipe: Recipe, packer: Packer, stream: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields real rows, rows the model wrote, and marks of the repeats in them; it writes anew as it learns."""
    real = packer.batches(recipe.unloop.batch, recipe.context + 1)
    minibatch = recipe.unloop_rows // recipe.unloop_refresh
    greedy = torch.zeros(recipe.unloop_rows, device=stream.device)
    for prompt_length in itertools.cycle(recipe.own_prompts):
        prompts = random_windows(stream, recipe.unloop_rows, prompt_length)
        writer = frozen_copy(model, fast_dtype(stream))
        rows = write(writer, prompts, recipe.own_length - prompt_length, greedy)
        repeats = F.pad(closes_repeat(rows[:, prompt_length:]), (prompt_length, 0)).float()
        LOGGER.info("after %d tokens, %.3f of greedy tokens close a repeat", prompt_length, repeats.mean())
        for part, marks in zip(rows.split(minibatch), repeats.split(minibatch), strict=True):
            yield next(real), part, marks
