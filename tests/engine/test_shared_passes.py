"""Passes over tokens of several prompts: each prompt's K/V and first logits are those of passes over it alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator
from fastspec.engine.engine import Engine
from fastspec.engine.pass_sizes import PassSizes
from fastspec.engine.prompt_passes import Part, PrefillSlot, PromptPasses
from fastspec.scheduling import admission
from tests.helpers.checkpoints import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning")

ROWS, LONGEST, MOST = 6, 230, 512
POOL = 24  # prompts of which groups are made


def pool() -> list[list[int]]:
    rng = random.Random(11)
    lengths = [2, 3, 63, 64, 65, 66, 127, 128, 129, 192, LONGEST] + [rng.randint(2, LONGEST) for _ in range(POOL - 11)]
    return [rng.choices(range(97), k=length) for length in lengths]


@contextmanager
def engine_of(place: Path, dtype: str) -> Iterator[Engine]:
    """An engine of the CPU's own kernels, in which prompts share passes and the prompts' last tokens are fed, too."""
    target = make_checkpoint(place / "target", "llama2")
    draft = make_checkpoint(place / "draft", "llama2", seed=1)
    options: dict[str, Any] = {"max_batch_size": ROWS, "max_length": 300, "device": "cpu", "progress": False}
    with FastSpecGenerator(target, draft, dtype=dtype, **options) as generator:
        engine = generator._open().engine
        with engine.on_device():
            ends = engine.modules.prompt_ends
            assert ends is not None
            modules = replace(engine.modules, prompt_ends=replace(ends, threshold=1))
            engine.sizes = replace(engine.sizes, batch_tokens=MOST)
            engine.prompts = PromptPasses.allocate(modules, engine.state, engine.runner, engine.sizes, engine.shapes)
            yield engine


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
    return [engine.modules.target.cache, engine.modules.proposer.model.cache]  # type: ignore[attr-defined, union-attr]


def left(engine: Engine, row: int, prompt: list[int]) -> list[Tensor]:
    """K/V of a row's target and draft, its first logits, and how far its draft has read."""
    ends = engine.prompts.modules.prompt_ends
    assert ends is not None
    pages = torch.tensor(engine.pages.pages_of(row))
    found = []
    for cache, tokens in zip(caches(engine), (len(prompt), len(prompt) - 2), strict=True):
        found += [each[:, pages].flatten(1, 2)[:, :tokens].clone() for each in (cache.keys, cache.values)]
    logits = engine.modules.target.logits(ends.hidden[row : row + 1, None], engine.shapes.tiling)
    return [*found, logits, engine.state.draft_lengths[row].clone()]


def alone(engine: Engine, prompt: list[int]) -> list[Tensor]:
    admit(engine, [prompt])
    for draft, stop in ((False, len(prompt)), (True, len(prompt) - 2)):
        engine.prompts.feed_row(0, 0, engine.sizes.passes(stop), draft=draft, running=False)
    return left(engine, 0, prompt)


def grouped(engine: Engine, prompts: list[list[int]], rng: random.Random) -> list[list[Tensor]]:
    """Reads these prompts in shared passes. Some have a beginning that was read before, in passes of their own."""
    admit(engine, prompts)
    for draft, kept in ((False, 0), (True, 2)):
        parts: list[Part] = []
        for row, prompt in rng.sample(list(enumerate(prompts)), len(prompts)):
            stop, start = len(prompt) - kept, 64 * rng.randint(0, max(0, len(prompt) - 3) // 64)
            if rng.random() < 0.7:
                start = 0
            if start:
                engine.prompts.feed_row(row, 0, [64] * (start // 64), draft=draft, running=False)
            if stop == start:
                continue
            part = Part(row, start, stop - start)
            if sum(engine.sizes.blocks_of(each.tokens) for each in (*parts, part)) > engine.sizes.most_blocks:
                engine.prompts.feed_rows(parts, draft=draft, running=False)
                parts = []
            parts.append(part)
        if parts:
            engine.prompts.feed_rows(parts, draft=draft, running=False)
    return [left(engine, row, prompt) for row, prompt in enumerate(prompts)]


def check(engine: Engine, groups: int, seed: int) -> None:
    rng, prompts = random.Random(seed), pool()
    expected = [alone(engine, prompt) for prompt in prompts]
    for _ in range(groups):
        chosen = rng.sample(range(POOL), rng.randint(2, ROWS))
        found = grouped(engine, [prompts[index] for index in chosen], rng)
        for index, tensors in zip(chosen, found, strict=True):
            for ours, theirs in zip(tensors, expected[index], strict=True):
                assert torch.equal(ours, theirs), (chosen, index)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_a_prompt_has_the_bits_of_its_own_passes_in_every_group(groups: int, dtype: str, tmp_path: Path) -> None:
    with engine_of(tmp_path, dtype) as engine:
        check(engine, groups, seed=groups)


def wrong_table(self: PrefillSlot, state: Any, rows: Tensor, starts: Tensor, *, running: bool = True) -> None:
    ENTER(self, state, rows, starts, running=running)
    self.state.block_table[: len(rows)] = self.state.block_table[: len(rows)].flip(0)


def wrong_start(self: PrefillSlot, state: Any, rows: Tensor, starts: Tensor, *, running: bool = True) -> None:
    ENTER(self, state, rows, starts // 128 * 128, running=running)


ENTER = PrefillSlot.enter_blocks


@pytest.mark.parametrize("bug", [wrong_table, wrong_start])
def test_the_check_sees_blocks_that_are_mixed_up(bug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillSlot, "enter_blocks", bug)
    with engine_of(tmp_path, "float32") as engine, pytest.raises(AssertionError):
        check(engine, 3, seed=1)


def test_a_row_that_has_ended_is_not_written_to(tmp_path: Path) -> None:
    """A draft that catches up reads running rows alone; the host learns later which have ended."""
    prompts = pool()[6:9]
    with engine_of(tmp_path, "float32") as engine:
        admit(engine, prompts)
        engine.state.finish[:3] = torch.tensor([0, 1, 0])
        parts = [Part(row, 0, len(prompt) - 2) for row, prompt in enumerate(prompts)]
        engine.prompts.feed_rows(parts, draft=True)
        cache = caches(engine)[1]
        for row, runs in enumerate((True, False, True)):
            assert bool((cache.keys[:, list(engine.pages.pages_of(row))] != 3.0).any()) == runs


SIZES = PassSizes(8, True, (64, 128, 256, 512), (64, 128, 256, 512), batch_tokens=2048)


def test_sizes_of_shared_passes() -> None:
    assert SIZES.shared == (4, 8, 12, 16, 20, 24, 28, 32)
    assert [SIZES.shared_blocks(blocks) for blocks in (2, 4, 5, 29, 32)] == [4, 4, 8, 32, 32]
    assert SIZES.shares([64], 1)
    assert SIZES.shares([512, 512, 64], 1030)
    assert not SIZES.shares([512] * 4, 2048), "it fills a pass"
    codes = replace(SIZES, same_bits=(128, 256, 512))
    assert not codes.shares([64], 60), "another kernel multiplies so few rows"
    assert codes.shares([128], 70)
    draft = replace(SIZES, draft_chunks=(512,))
    assert (draft.shared_blocks(2), draft.shared_blocks(2, draft=True)) == (4, 8)
    assert not draft.shares([64], 60, draft=True)
    assert replace(SIZES, batch=1).shared == replace(SIZES, batch_tokens=0).shared == ()
    assert not replace(SIZES, batch=1).shares([64], 60)
    assert replace(SIZES, exact=False, same_bits=None).shares([64], 60)
