"""The three phases: the target learns real text, unlearns its loops, and the draft learns the target's law."""

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

from .model import Llama, frozen_copy, write
from .recipe import Phase, Recipe
from .repeats import closes_repeat, repeated_share
from .tokens import Packer, random_windows

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
        self._pairs = (list(self.model.parameters()), list(model.parameters()))
        self._updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self._updates += 1
        decay = min(self.decay, self._updates / (self._updates + 10))  # young means forget the random start
        torch._foreach_lerp_(self._pairs[0], [live.detach() for live in self._pairs[1]], 1 - decay)


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
        batches: Arguments for `loss_of`, one tuple a step; the phase ends early where they end.
        loss_of: The loss of a batch.
        validate: The loss of a model on validation text.
        compiled: Whether `loss_of` is compiled.
        keep_best: Whether the weights of the best reading are kept, and readings can end the phase; else the last.

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
    model.load_state_dict(best_state if keep_best else averaged.model.state_dict())
    model.eval()
    history.seconds = round(time.perf_counter() - start, 1)
    return history


def learn(model: Llama, recipe: Recipe, packer: Packer, validation: Tensor) -> History:
    """Teaches the target real text. `validation` is [rows, context + 1]."""

    def loss_of(rows: Tensor) -> Tensor:
        return next_token_loss(model, rows)

    batches = ((rows,) for rows in packer.batches(recipe.learn.batch, recipe.context + 1))
    return optimise(model, recipe.learn, batches, loss_of, _text_loss(validation), compiled=recipe.compiled)


def unloop(model: Llama, recipe: Recipe, packer: Packer, stream: Tensor, validation: Tensor) -> tuple[History, list[float]]:
    """Teaches the target not to run in circles, beside real text so that it forgets nothing else.

    The model continues training text greedily; where a token completes an 8-gram that stood in that continuation
    before, its probability is pushed down (unlikelihood training). Repeats that real text is full of are pushed
    back up by the loss on real text.

    Returns:
        What was done, and the shares of repeats in the greedy text, one for each time it was written.
    """
    shares: list[float] = []

    def loss_of(rows: Tensor, own: Tensor, repeats: Tensor) -> Tensor:
        with _autocast(own):
            logits = model(own[:, :-1])
        chance = F.log_softmax(logits.float(), -1).gather(2, own[:, 1:, None])[..., 0].exp()
        unlikelihood = -torch.log1p(-chance.clamp_max(1 - 1e-6)) * repeats[:, 1:]
        return next_token_loss(model, rows) + recipe.unloop_weight * unlikelihood.sum() / repeats.numel()

    batches = _looping_text(model, recipe, packer, stream, shares)
    validate = _text_loss(validation)
    history = optimise(model, recipe.unloop, batches, loss_of, validate, compiled=recipe.compiled, keep_best=False)
    return history, [round(share, 3) for share in shares]


def _looping_text(
    model: Llama, recipe: Recipe, packer: Packer, stream: Tensor, shares: list[float]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    real = packer.batches(recipe.unloop.batch, recipe.context + 1)
    minibatch = recipe.unloop_rows // recipe.unloop_refresh
    greedy = torch.zeros(recipe.unloop_rows, device=stream.device)
    for prompt_length in itertools.cycle(recipe.own_prompts):
        prompts = random_windows(stream, recipe.unloop_rows, prompt_length)
        writer = frozen_copy(model, _fast_dtype(stream))
        rows = write(writer, prompts, recipe.own_length - prompt_length, greedy)
        repeats = F.pad(closes_repeat(rows[:, prompt_length:]), (prompt_length, 0))
        shares.append(repeated_share(rows[:, prompt_length : prompt_length + recipe.new_tokens]).mean().item())
        LOGGER.info("greedy text after %d tokens: %.3f in repeats", prompt_length, shares[-1])
        if len(shares) > 2 and sum(shares[-2:]) / 2 <= recipe.unloop_goal:
            return
        for part, marks in zip(rows.split(minibatch), repeats.float().split(minibatch), strict=True):
            yield next(real), part, marks


def write_own_text(target: Llama, recipe: Recipe, stream: Tensor) -> Tensor:
    """Lets the target continue training text, greedily and sampled, for the draft to learn from.

    Returns:
        int32 [own_rows, own_length], in random order.
    """
    writer = frozen_copy(target, _fast_dtype(stream))
    temperatures = torch.tensor(recipe.own_temperatures, device=stream.device)
    written = []
    for prompt_length in itertools.islice(itertools.cycle(recipe.own_prompts), -(-recipe.own_rows // recipe.own_chunk)):
        prompts = random_windows(stream, recipe.own_chunk, prompt_length)
        mixed = temperatures[torch.randint(len(temperatures), (recipe.own_chunk,), device=stream.device)]
        written.append(write(writer, prompts, recipe.own_length - prompt_length, mixed).int())
    rows = torch.cat(written)
    return rows[torch.randperm(len(rows), device=rows.device)]


def distil(draft: Llama, target: Llama, recipe: Recipe, packer: Packer, own: Tensor, validation: Tensor) -> History:
    """Teaches the draft the target's law, on real text and on what the target wrote.

    Returns:
        What was done; the readings are of the draft's loss, not of its text loss.
    """
    teacher = frozen_copy(target, _fast_dtype(own))

    def loss_of(*texts: Tensor) -> Tensor:
        students, teachers = [], []
        for rows in texts:
            with torch.no_grad():
                teachers.append(teacher(rows[:, :-1]).flatten(0, 1))
            with _autocast(rows):
                students.append(draft(rows[:, :-1]).flatten(0, 1))
        return divergence(torch.cat(students), torch.cat(teachers), recipe)

    def validate(model: Llama) -> float:
        losses = []
        with torch.no_grad():
            for rows in validation.split(32):
                with _autocast(rows):
                    law = model(rows[:, :-1])
                losses.append(divergence(law.flatten(0, 1), teacher(rows[:, :-1]).flatten(0, 1), recipe).item())
        return sum(losses) / len(losses)

    real = packer.batches(recipe.distil.batch, recipe.context + 1)
    batches = ((rows, random_rows(own, recipe.own_batch)) for rows in real)
    return optimise(draft, recipe.distil, batches, loss_of, validate, compiled=recipe.compiled)


def divergence(student: Tensor, teacher: Tensor, recipe: Recipe) -> Tensor:
    """Returns how far the student's law is from the teacher's, both given as logits [tokens, vocab].

    The Kullback-Leibler divergence gives a signal everywhere; the overlap sum(min(p, q)) is the very chance that a
    drafted token is accepted, and minus its logarithm is what the text so far would cost in rejections.
    """
    student, teacher = student.float(), teacher.float()
    log_q, log_p = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    for temperature in recipe.overlap_temperatures:
        p, q = F.softmax(teacher / temperature, -1), F.softmax(student / temperature, -1)
        loss = loss - recipe.overlap_weight * torch.minimum(p, q).sum(-1).clamp_min(1e-6).log().mean()
    return loss


def next_token_loss(model: Llama, rows: Tensor) -> Tensor:
    """Returns the mean cross-entropy of rows [n, length + 1], each token given those before it."""
    with _autocast(rows):
        logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def text_loss(model: Llama, rows: Tensor) -> float:
    """Returns the mean cross-entropy over all rows [n, length + 1], a few at a time."""
    parts = [(next_token_loss(model, part).item(), len(part)) for part in rows.split(32)]
    return sum(loss * count for loss, count in parts) / len(rows)


def random_rows(rows: Tensor, count: int) -> Tensor:
    """Picks rows at random, with replacement: int64 [count, length]."""
    return rows[torch.randint(len(rows), (count,), device=rows.device)].long()


def _text_loss(rows: Tensor) -> Callable[[Llama], float]:
    return lambda model: text_loss(model, rows)


def _optimizer(model: Llama, phase: Phase) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": phase.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=phase.lr, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def _take_step(model: Llama, optimizer: torch.optim.Optimizer, loss: Tensor, phase: Phase, step: int) -> None:
    progress = step / phase.steps
    rate = phase.lr * min(1.0, step / phase.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, dtype=torch.bfloat16, enabled=tensor.is_cuda)


def _fast_dtype(tensor: Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_cuda else torch.float32
