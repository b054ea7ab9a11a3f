"""The optimisation loop that every phase shares, and the first phase: the target learns real text."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Llama
from .recipe import Phase, Recipe
from .tokens import Packer

Batch = tuple[Tensor, ...]
LossOf = Callable[..., Tensor]
LOGGER = logging.getLogger(__name__)


@dataclass(slots=True)
class History:
    """What a phase did.

    Attributes:
        steps: Steps taken.
        best_step: The step whose weights were kept.
        seconds: Wall time, compilation included.
        validation: (step, loss on validation text) at each reading.
    """

    steps: int = 0
    best_step: int = 0
    seconds: float = 0.0
    validation: list[tuple[int, float]] = field(default_factory=list)


class Averaged:
    """The running mean of a model's weights."""

    def __init__(self, model: Llama, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self._means: list[Tensor] = list(self.model.parameters())
        self._live: list[Tensor] = list(model.parameters())
        self._updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Moves the mean towards the weights of now."""
        self._updates += 1
        decay = min(self.decay, self._updates / (self._updates + 10))  # young means forget the random start
        torch._foreach_lerp_(self._means, self._live, 1 - decay)


def optimise(
    model: Llama,
    phase: Phase,
    batches: Iterator[Batch],
    loss_of: LossOf,
    validate: Callable[[Llama], float],
    *,
    compiled: bool,
    keep_best: bool = True,
) -> History:
    """Trains a model in place and leaves it with averaged weights, in evaluation mode.

    Args:
        model: The model that `loss_of` computes with.
        phase: Steps, rates and patience.
        batches: Arguments for `loss_of`, one tuple a step.
        loss_of: The loss of a batch.
        validate: The loss of a model on validation text.
        compiled: Whether `loss_of` is compiled.
        keep_best: Whether the weights of the best reading are kept and readings can end the phase;
            otherwise the last weights are.

    Returns:
        What was done.
    """
    history, start = History(), time.perf_counter()
    step_loss = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    optimizer = _optimizer(model, phase)
    averaged = Averaged(model, phase.ema)
    best, best_state = math.inf, copy.deepcopy(averaged.model.state_dict())
    every = max(1, phase.steps // phase.evaluations)
    model.train()
    for step, batch in enumerate(itertools.islice(batches, phase.steps), 1):
        _take_step(model, optimizer, step_loss(*batch), phase, step)
        averaged.update()
        history.steps = step
        if step % every and step != phase.steps:
            continue
        reading = validate(averaged.model)
        history.validation.append((step, round(reading, 4)))
        LOGGER.info("step %d of %d: validation %.4f", step, phase.steps, reading)
        if reading < best or not keep_best:
            best, best_state, history.best_step = reading, copy.deepcopy(averaged.model.state_dict()), step
        elif step - history.best_step >= phase.patience * every:
            break
    model.load_state_dict(best_state)
    model.eval()
    history.seconds = round(time.perf_counter() - start, 1)
    return history


def learn(model: Llama, recipe: Recipe, packer: Packer, validation: Tensor) -> History:
    """Teaches the target real text. `validation` is [rows, context + 1]."""

    def loss_of(rows: Tensor) -> Tensor:
        return next_token_loss(model, rows)

    batches = ((rows,) for rows in packer.batches(recipe.learn.batch, recipe.context + 1))
    return optimise(model, recipe.learn, batches, loss_of, on_text(validation), compiled=recipe.compiled)


def next_token_loss(model: Llama, rows: Tensor) -> Tensor:
    """Returns the mean cross-entropy of rows [n, length + 1], each token given those before it."""
    with autocast(rows):
        logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def text_loss(model: Llama, rows: Tensor) -> float:
    """Returns the mean cross-entropy over all rows [n, length + 1], a few at a time."""
    parts = [(next_token_loss(model, part).item(), len(part)) for part in rows.split(32)]
    return sum(loss * count for loss, count in parts) / len(rows)


def on_text(rows: Tensor) -> Callable[[Llama], float]:
    """Returns the reading of `optimise` that is the mean cross-entropy over rows."""
    return lambda model: text_loss(model, rows)


def autocast(tensor: Tensor) -> torch.autocast:
    """Returns the context to train in: bfloat16 products on a GPU, plain float32 elsewhere."""
    return torch.autocast(tensor.device.type, dtype=torch.bfloat16, enabled=tensor.is_cuda)


def fast_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype that frozen models compute in where the tensor lies."""
    return torch.bfloat16 if tensor.is_cuda else torch.float32


def _optimizer(model: Llama, phase: Phase) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": phase.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=phase.lr, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def _take_step(model: Llama, optimizer: torch.optim.Optimizer, loss: Tensor, phase: Phase, step: int) -> None:
    progress = step / phase.steps
    rate = phase.lr * min(1.0, step / phase.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
    for group in optimizer.param_groups:
        group["lr"] = rate
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
