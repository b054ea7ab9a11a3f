"""Answers of the target to prompts, written by fastspec in large batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastspec import FastSpecGenerator

from .recipe import Recipe
from .rows import Rows

LOGGER = logging.getLogger(__name__)
LOGGED_SECONDS = 5.0


def answer_rows(target: str | Path, prompts: Sequence[Tensor], recipe: Recipe, device: str, dtype: torch.dtype) -> Rows:
    """Lets the target answer whole prompts, all of them once at each temperature of the recipe in turn.

    A prompt and an answer have half of a row's length each at most; longer prompts are left out. After `own_seconds`
    the answers end where they are.

    Args:
        target: a folder or a name on the Hub.
        prompts: ids of each prompt, int64 [tokens].
        recipe: gives `own_rows`, `own_length`, `own_batch`, `own_temperatures` and `own_seconds`.
        device, dtype: of the target.

    Returns:
        Rows, prompts included, of which only the answers teach.

    Raises:
        ValueError: every prompt is longer than half of a row.
    """
    half = recipe.own_length // 2
    fitting = [prompt for prompt in prompts if len(prompt) <= half]
    if not fitting:
        shortest = min(map(len, prompts))
        raise ValueError(
            f"The shortest prompt has {shortest} tokens, more than half of a row of {recipe.own_length}: ask for "
            "longer rows with --own-length."
        )
    asked = [(fitting[index % len(fitting)], temperature) for index, temperature in _turns(recipe, len(fitting))]
    with FastSpecGenerator(
        target, num_speculative_tokens=0, max_batch_size=recipe.own_batch, max_length=recipe.own_length,
        dtype=dtype, device=device, progress=False,
    ) as generator:  # fmt: skip
        answers = _stream(generator, asked, recipe)
    rows = [
        torch.cat((prompt, torch.tensor(answer, dtype=torch.int64)))
        for (prompt, _), answer in zip(asked, answers, strict=True)
        if answer
    ]
    begins = [len(prompt) for (prompt, _), answer in zip(asked, answers, strict=True) if answer]
    ids = torch.zeros(len(rows), recipe.own_length, dtype=torch.int64)
    padded = pad_sequence(rows, batch_first=True)
    ids[:, : padded.shape[1]] = padded
    return Rows(ids, torch.tensor([len(row) for row in rows]), torch.tensor(begins))


def _turns(recipe: Recipe, prompts: int) -> list[tuple[int, float]]:
    """(number of a row, its temperature): neighbours have different ones, and so has a prompt that comes again."""
    temperatures = recipe.own_temperatures
    return [(index, temperatures[(index + index // prompts) % len(temperatures)]) for index in range(recipe.own_rows)]


def _stream(generator: FastSpecGenerator, asked: Sequence[tuple[Tensor, float]], recipe: Recipe) -> list[list[int]]:
    """The answers, each as far as it came in time."""
    answers: list[list[int]] = [[] for _ in asked]
    start = told = time.perf_counter()
    running = generator.stream(
        [prompt.tolist() for prompt, _ in asked],
        max_new_tokens=recipe.own_length // 2,
        do_sample=True,
        temperature=[temperature for _, temperature in asked],
        top_k=0,
        top_p=1.0,
        seed=1,
    )
    for emitted in running:
        for index, tokens in emitted.items():
            answers[index] += tokens
        now = time.perf_counter()
        if now - told > LOGGED_SECONDS:
            told = now
            LOGGER.info("the target has written %d tokens of answers", sum(map(len, answers)))
        if recipe.own_seconds is not None and now - start > recipe.own_seconds:
            break
    running.close()  # type: ignore[attr-defined]
    return answers
