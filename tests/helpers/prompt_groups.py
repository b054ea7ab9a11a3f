"""Random groups of prompts in shared passes, against passes over each prompt alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastspec.engine.engine import Engine
from fastspec.engine.prompt_passes import PromptPart
from fastspec.scheduling import admission


def pool(longest: int, count: int = 24) -> list[list[int]]:
    """Prompts of which groups are made: of lengths around whole blocks, and others."""
    rng = random.Random(11)
    lengths = [2, 3, 63, 64, 65, 66, 127, 128, 129, 192, longest]
    lengths += [rng.randint(2, longest) for _ in range(count - len(lengths))]
    return [rng.choices(range(97), k=length) for length in lengths]


def admit(engine: Engine, prompts: Sequence[list[int]]) -> None:
    """Gives each prompt a row. What was in the caches before must not matter."""
    engine.state.reset()
    engine.pages.release_all()
    for cache in caches(engine):
        cache.keys.fill_(3.0)
        cache.values.fill_(-3.0)
    for row, prompt in enumerate(prompts):
        admission.fill_prompt(engine.state, row, prompt, engine.pages.reserve(row, len(prompt) + 8), ())


def caches(engine: Engine) -> list[Any]:
    """The caches of target and draft."""
    return [engine.modules.target.cache, engine.modules.proposer.model.cache]  # type: ignore[attr-defined, union-attr]


def left(engine: Engine, row: int, prompt: list[int]) -> list[Tensor]:
    """K/V of a row's target and draft, its first logits, and how far its draft has read."""
    ends = engine.prompts.modules.prompt_ends
    assert ends is not None
    pages = torch.tensor(engine.pages.pages_of(row), device=engine.state.lengths.device)
    found = []
    for cache, tokens in zip(caches(engine), (len(prompt), len(prompt) - 2), strict=True):
        found += [each[:, pages].flatten(1, 2)[:, :tokens].clone() for each in (cache.keys, cache.values)]
    logits = engine.modules.target.logits(ends.hidden[row : row + 1, None], engine.shapes.tiling)
    return [*found, logits, engine.state.draft_lengths[row].clone()]


def alone(engine: Engine, prompt: list[int]) -> list[Tensor]:
    """What passes over a prompt alone leave, see `left`."""
    admit(engine, [prompt])
    for draft, stop in ((False, len(prompt)), (True, len(prompt) - 2)):
        engine.prompts.feed_row(0, 0, engine.sizes.passes(stop, draft=draft), draft=draft, running=False)
    return left(engine, 0, prompt)


def grouped(engine: Engine, prompts: list[list[int]], rng: random.Random) -> list[list[Tensor]]:
    """Reads these prompts in shared passes. Some have a beginning that was read before, in passes of their own."""
    admit(engine, prompts)
    for draft, kept in ((False, 0), (True, 2)):
        parts: list[PromptPart] = []
        for row, prompt in rng.sample(list(enumerate(prompts)), len(prompts)):
            unit, stop = engine.sizes.grid_unit, len(prompt) - kept
            start = unit * rng.randint(0, max(0, len(prompt) - 3) // unit) if rng.random() < 0.3 else 0
            before = engine.sizes.passes(start, draft=draft)
            if sum(before) != start:  # a padded pass would feed a draft tokens behind `start`, too
                start, before = 0, []
            if start:
                engine.prompts.feed_row(row, 0, before, draft=draft, running=False)
            if stop == start:
                continue
            part = PromptPart(row, start, stop - start)
            if not engine.sizes.shares(engine.sizes.passes(stop, start, draft=draft), part.tokens, draft=draft):
                engine.prompts.feed_row(
                    row, start, engine.sizes.passes(stop, start, draft=draft), draft=draft, running=False
                )
                continue
            if sum(engine.sizes.blocks_of(each.tokens) for each in (*parts, part)) > engine.sizes.most_blocks:
                engine.prompts.feed_rows(parts, draft=draft, running=False)
                parts = []
            parts.append(part)
        if parts:
            engine.prompts.feed_rows(parts, draft=draft, running=False)
    return [left(engine, row, prompt) for row, prompt in enumerate(prompts)]


def check(engine: Engine, prompts: list[list[int]], groups: int, seed: int) -> None:
    """Compares random groups of these prompts with each prompt alone, bit for bit."""
    rng = random.Random(seed)
    expected = [alone(engine, prompt) for prompt in prompts]
    for _ in range(groups):
        chosen = rng.sample(range(len(prompts)), rng.randint(2, engine.state.batch))
        found = grouped(engine, [prompts[index] for index in chosen], rng)
        for index, tensors in zip(chosen, found, strict=True):
            for ours, theirs in zip(tensors, expected[index], strict=True):
                assert torch.equal(ours, theirs), (chosen, index)
