"""Passes over tokens of several prompts: each prompt's K/V and first logits are those of passes over it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator
from fastspec.engine import build, pass_sizes
from fastspec.engine.engine import Engine
from fastspec.engine.pass_sizes import PassSizes
from fastspec.engine.prompt_passes import PrefillSlot, PromptPart, PromptPasses
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.prompt_groups import admit, caches, check, pool

pytestmark = pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning")

ROWS, LONGEST, MOST = 6, 230, 512


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_a_prompt_has_the_bits_of_its_own_passes_in_every_group(groups: int, dtype: str, tmp_path: Path) -> None:
    with engine_of(tmp_path, dtype) as engine:
        check(engine, pool(LONGEST), groups, seed=groups)


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
        check(engine, pool(LONGEST), 3, seed=1)


def test_a_row_that_has_ended_is_not_written_to(tmp_path: Path) -> None:
    """A draft that catches up reads running rows alone; the host learns later which have ended."""
    prompts = pool(LONGEST)[6:9]
    with engine_of(tmp_path, "float32") as engine:
        admit(engine, prompts)
        engine.state.finish[:3] = torch.tensor([0, 1, 0])
        parts = [PromptPart(row, 0, len(prompt) - 2) for row, prompt in enumerate(prompts)]
        engine.prompts.feed_rows(parts, draft=True)
        cache = caches(engine)[1]
        for row, runs in enumerate((True, False, True)):
            assert bool((cache.keys[:, list(engine.pages.pages_of(row))] != 3.0).any()) == runs


class Captures:
    """A runner that would replay passes: records which of them it is asked to capture."""

    static = True

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def ready(self, key: Any) -> bool:
        return False

    def capture(self, key: Any, body: Any, idle: Any, *, warm: bool = False) -> None:
        self.keys.append((key.tokens, warm))


@pytest.mark.parametrize("all_captured", [False, True])
def test_large_passes_are_captured_only_if_all_are(
    all_captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_sizes, "_LARGEST_CAPTURED", 64)
    with engine_of(tmp_path, "float32") as engine:
        admit(engine, pool(LONGEST)[6:7])
        runner: Any = Captures()
        sizes = replace(engine.sizes, all_captured=all_captured)
        passes = replace(engine.prompts, runner=runner, sizes=sizes)
        passes.feed_row(0, 0, [64, 128], draft=False)
        assert runner.keys == [(64, True)] + [(128, True)] * all_captured
        runner.keys.clear()
        passes.capture()
        assert {tokens for tokens, _ in runner.keys} == ({*sizes.chunks} if all_captured else {64})


@pytest.mark.parametrize(("of_target", "of_draft"), [("packed", "packed"), ("codes", "packed"), ("packed", "codes")])
def test_all_passes_with_quantised_weights_are_captured(of_target: str, of_draft: str) -> None:
    layout = SimpleNamespace(chunks_for=lambda length: (64, 128), batch=2)
    settings: Any = SimpleNamespace(
        layout=layout, max_length=99, exact=True, config=SimpleNamespace(prefill_budget=None)
    )
    weights = {"matrices": [SimpleNamespace(format=of_target)], "of_draft_model": [SimpleNamespace(format=of_draft)]}
    made: Any = SimpleNamespace(**weights)
    modules: Any = SimpleNamespace(ops=SimpleNamespace(name="cpu"))
    assert build._pass_sizes(settings, made, modules).captured(2048) == ("codes" in (of_target, of_draft))


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
