"""The third phase: the draft learns the target's law."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Llama, frozen_copy, write
from .recipe import Recipe
from .tokens import Packer, random_windows
from .train import History, autocast, fast_dtype, optimise


def write_own_text(target: Llama, recipe: Recipe, stream: Tensor) -> Tensor:
    """Lets the target continue training text, greedily and sampled, for the draft to learn from.

    Returns:
        int32 [own_rows, own_length].
    """
    writer = frozen_copy(target, fast_dtype(stream))
    temperatures = torch.tensor(recipe.own_temperatures, device=stream.device)
    chunks = -(-recipe.own_rows // recipe.own_chunk)
    written = []
    for prompt_length in itertools.islice(itertools.cycle(recipe.own_prompts), chunks):
        prompts = random_windows(stream, recipe.own_chunk, prompt_length)
        mixed = temperatures[torch.randint(len(temperatures), (recipe.own_chunk,), device=stream.device)]
        written.append(write(writer, prompts, recipe.own_length - prompt_length, mixed).int())
    return torch.cat(written)


def distil(draft: Llama, target: Llama, recipe: Recipe, packer: Packer, own: Tensor, validation: Tensor) -> History:
    """Trains the draft on real text and on what the target wrote, towards the target's logits on both.

    While drafts are accepted, the text a draft continues is the target's: no text of the draft's own is needed.

    Args:
        draft: Trained in place.
        target: The teacher.
        recipe: Batches, rates and the weights of the loss.
        packer: Real rows.
        own: int32 [rows, own_length], written by the target.
        validation: [rows, context + 1].

    Returns:
        What was done; its readings are `divergence` on validation text.
    """
    teacher = frozen_copy(target, fast_dtype(own))

    def loss_of(*texts: Tensor) -> Tensor:
        students, teachers = [], []
        for rows in texts:
            with torch.no_grad():
                teachers.append(teacher(rows[:, :-1]).flatten(0, 1))
            with autocast(rows):
                students.append(draft(rows[:, :-1]).flatten(0, 1))
        return divergence(torch.cat(students), torch.cat(teachers), recipe)

    def validate(model: Llama) -> float:
        parts = [_divergence_on(model, teacher, rows, recipe) * len(rows) for rows in validation.split(32)]
        return sum(parts) / len(validation)

    batches = _mixed_text(recipe, packer, own)
    return optimise(draft, recipe.distil, batches, loss_of, validate, compiled=recipe.compiled)


def divergence(student: Tensor, teacher: Tensor, recipe: Recipe) -> Tensor:
    """Returns how far the student's law is from the teacher's, both given as logits [tokens, vocab].

    The Kullback-Leibler divergence gives a signal everywhere. The overlap sum(min(p, q)) is the very chance that a
    drafted token is accepted; minus its logarithm joins the loss, at each of the recipe's temperatures.
    """
    student, teacher = student.float(), teacher.float()
    log_q, log_p = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    for temperature in recipe.overlap_temperatures:
        p, q = F.softmax(teacher / temperature, -1), F.softmax(student / temperature, -1)
        overlap = torch.minimum(p, q).sum(-1).clamp_min(1e-6)
        loss = loss - recipe.overlap_weight * overlap.log().mean()
    return loss


def _mixed_text(recipe: Recipe, packer: Packer, own: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for rows in packer.batches(recipe.distil.batch, recipe.context + 1):
        picked = torch.randint(len(own), (recipe.own_batch,), device=own.device)
        yield rows, own[picked].long()


@torch.no_grad()
def _divergence_on(student: Llama, teacher: Llama, rows: Tensor, recipe: Recipe) -> float:
    with autocast(rows):
        logits = student(rows[:, :-1]).flatten(0, 1)
    return divergence(logits, teacher(rows[:, :-1]).flatten(0, 1), recipe).item()
