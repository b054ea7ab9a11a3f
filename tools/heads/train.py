"""The optimisation of a head."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .dflash import Block, DFlashHead
from .head import DraftHead, Eagle3Head, HeadShape, Variant
from .loss import chain_loss
from .mtp import MtpHead, check_layer, layer_variant
from .recipe import Recipe
from .rows import Batch, Rows
from .target import Target

LOGGER = logging.getLogger(__name__)
LOGGED = 50


@dataclass(slots=True)
class History:
    """What training did.

    Attributes:
        seconds: Wall time.
        losses: The loss of each step.
        accepted: Every LOGGED steps, the step and the chance of acceptance at each place, on training text.
    """

    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    accepted: list[tuple[int, list[float]]] = field(default_factory=list)


def choose_drafted(groups: Sequence[Rows], vocab: int, count: int | None) -> Tensor:
    """The `count` most frequent tokens of training rows, int64 [count], ascending; all of them without a count.

    Tokens the rows lack fill up what is missing, lower ids first.
    """
    if count is None or count >= vocab:
        return torch.arange(vocab)
    texts = [text for rows in groups for text in rows.texts()]
    frequency = torch.bincount(torch.cat(texts), minlength=vocab)
    return frequency.argsort(descending=True, stable=True)[:count].sort().values


def coverage(groups: Sequence[Rows], drafted: Tensor) -> float:
    """Share of the tokens of rows that a head with this vocabulary can draft."""
    texts = [text for rows in groups for text in rows.texts()]
    return torch.isin(torch.cat(texts), drafted).float().mean().item()


def head_shape(target: Target, drafted: int, recipe: Recipe) -> HeadShape:
    """The sizes of a head of the recipe's type for a target, with so many tokens that it drafts."""
    config = target.model.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    return HeadShape(
        hidden=hidden,
        features=len(target.boundaries),
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        intermediate=recipe.intermediate or config.intermediate_size,
        vocab=len(target.embedding),
        draft_vocab=drafted,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        rms_eps=config.rms_norm_eps,
        variant=layer_variant(target.model) if recipe.mtp else Variant(),
    )


def make_head(target: Target, drafted: Tensor, recipe: Recipe) -> DraftHead:
    """A head of the recipe's type that fits a target, at its start."""
    shape = head_shape(target, len(drafted), recipe)
    made: DraftHead
    if recipe.mtp:
        check_layer(target.model, shape)
        made = MtpHead(shape, drafted)
    elif recipe.dflash_layers is None:
        made = Eagle3Head(shape, drafted)
    else:
        mask_id = shape.vocab - 1 if recipe.mask_id is None else recipe.mask_id
        made = DFlashHead(shape, Block(recipe.dflash_layers, recipe.unroll + 1, mask_id), drafted)
    return made.begin(target.model.model.norm.weight, target.head).to(target.device)


def train(head: DraftHead, target: Target, batches: Iterator[Batch], recipe: Recipe) -> History:
    """Trains a head in place and leaves it with averaged weights.

    Passes run in bfloat16 where the target does, in float32 otherwise; the weights and their steps are float32.
    """
    history, start, losses = History(), time.perf_counter(), list[Tensor]()
    mean, optimizer = copy.deepcopy(head).requires_grad_(False), _optimizer(head, recipe)
    half = target.embedding.dtype == torch.bfloat16
    for step, batch in enumerate(itertools.islice(batches, recipe.steps)):
        passed = time.perf_counter() - start
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, passed, recipe)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=half):
            loss, accepted = chain_loss(head, target, batch, recipe)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        decay = min(recipe.ema, (step + 1) / (step + 11))  # a young mean forgets the random start
        with torch.no_grad():
            torch._foreach_lerp_(list(mean.parameters()), list(head.parameters()), 1 - decay)
        losses.append(loss.detach())  # a number here would wait for the device in every step
        last = step + 1 == recipe.steps or (recipe.seconds is not None and passed > recipe.seconds)
        if step % LOGGED == 0 or last:
            chances = [round(chance, 4) for chance in accepted.tolist()]
            history.accepted.append((step, chances))
            LOGGER.info("step %d of %d: loss %.4f, accepted %s", step, recipe.steps, loss.item(), chances)
        if last:
            break
    history.losses = torch.stack(losses).tolist()
    head.load_state_dict(mean.state_dict())
    history.seconds = round(time.perf_counter() - start, 1)
    return history


def _optimizer(head: DraftHead, recipe: Recipe) -> torch.optim.Optimizer:
    learnt = [parameter for parameter in head.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in learnt if parameter.dim() == 2]
    vectors = [parameter for parameter in learnt if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=head.fc.weight.is_cuda)


def _rate(step: int, seconds: float, recipe: Recipe) -> float:
    """The learning rate of a step that begins after so many seconds of training."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    passed = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    if recipe.seconds is not None:
        passed = min(1.0, max(passed, seconds / recipe.seconds))
    return recipe.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * passed)))
