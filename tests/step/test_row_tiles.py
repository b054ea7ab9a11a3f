"""Steps whose logits are computed for a few rows at a time: the same bits, in bounded memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.engine.engine import Engine
from fastspec.engine.memory import Layout
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.sampling.rules import BLOCK, COUPLED, SyntheticAcceptance, Verification
from fastspec.shapes import FULL, GRAMMARS, GREEDY, ROW_TILE, StepShape, logit_words, row_tiles
from fastspec.state import BUFFERS, RUNNING
from fastspec.step import first_token_step, step
from tests.helpers.tiny import STEP_TILING, VOCAB, tiny_engine, tiny_spec

ROWS, K = 40, 3
WORDS = 15


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(k=K, batch=ROWS, max_length=60)


def begin(engine: Engine) -> None:
    """Rows in the middle of their texts, which differ in every option; every third follows a grammar."""
    state, generator = engine.state, torch.Generator().manual_seed(5)
    state.reset()

    def drawn(like: Tensor, high: int) -> Tensor:
        return torch.randint(high, like.shape, generator=generator).to(like.dtype)

    for name in ("tokens", "grammar_drafts"):
        getattr(state, name).copy_(drawn(getattr(state, name), VOCAB))
    for name in ("draft_probs", "output_counts", "draft_tokens"):
        getattr(state, name).zero_()
    state.lengths.copy_(5 + drawn(state.lengths, 20))
    state.limits.fill_(50)
    state.finish.fill_(RUNNING)
    state.block_table.copy_(1 + torch.arange(state.block_table.numel()).view_as(state.block_table))
    state.temperature.copy_(drawn(state.temperature, 3) * 0.5)
    state.repetition.fill_(1.2)
    state.seeds.copy_(drawn(state.seeds, 2**31))
    state.draft_limits.fill_(K)
    state.constrained.copy_(torch.arange(ROWS) % 3 == 0)
    state.grammar_counts.fill_(2)
    state.masks.copy_(torch.where(state.constrained[:, None, None], drawn(state.masks, 2**31) | 2, -1))
    engine.ring.outbox.counter.zero_()


def after(engine: Engine, shape: StepShape, limit: int | None) -> dict[str, Tensor]:
    """Everything that a step has written."""
    begin(engine)
    modules = engine.modules
    modules = replace(modules, ops=modules.ops.replaced() if limit is None else modules.ops.replaced(logit_bytes=limit))
    with torch.inference_mode():
        for _ in range(2):
            step(modules, engine.state, shape, PhiloxDraws(engine.state.seeds))
    outbox = engine.ring.outbox
    found = {name: getattr(engine.state, name).clone() for name in BUFFERS}
    return found | {name: getattr(outbox, name).clone() for name in ("entries", "details", "counter")}


RULES: tuple[Verification, ...] = (BLOCK, COUPLED, SyntheticAcceptance(pattern=(2, 1, 3)))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("sampler", [GREEDY, FULL])
@pytest.mark.parametrize("k", [0, K])
def test_parts_of_the_rows_leave_what_all_rows_leave(engine: Engine, k: int, sampler: str, rule: Verification) -> None:
    for top, grammars in itertools.product((None, 3), (None, *GRAMMARS) if k else (None,)):
        shape = StepShape(k, sampler, 1, STEP_TILING, top, rule, grammars=grammars)
        line = (k + 1) * 4 * VOCAB * WORDS
        assert len(row_tiles(ROWS, line, ROW_TILE * line)) == 3
        whole, parts = (after(engine, shape, limit) for limit in (None, ROW_TILE * line))
        assert whole["emitted"][1::3].min() >= 1, "rows without a grammar run"
        assert whole["counter"] == 2
        for name, value in whole.items():
            assert torch.equal(value, parts[name]), (name, top, grammars)


def test_logits_of_few_rows_are_in_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    target = engine.modules.target
    original = type(target).logits

    def logits(self: Any, hidden: Tensor, tiling: Any) -> Tensor:
        sizes.append(len(hidden))
        return original(self, hidden, tiling)

    monkeypatch.setattr(type(target), "logits", logits)
    shape = StepShape(0, GREEDY, 1, STEP_TILING)
    after(engine, shape, 2 * ROW_TILE * 4 * VOCAB * WORDS)
    assert sizes == [32, 8] * 2


def test_a_first_token_step_is_whole() -> None:
    """It has one place a row."""
    assert "row_tiles" not in first_token_step.__code__.co_names


@pytest.mark.parametrize("batch", [1, 15, 16, 17, 64, 100, 256, 1024])
@pytest.mark.parametrize("line", [1, 1000, 10**6])
@pytest.mark.parametrize("limit", [None, 1, 20_000, 10**7])
def test_parts_cover_all_rows_in_order_and_fit(batch: int, line: int, limit: int | None) -> None:
    parts = row_tiles(batch, line, limit)
    assert [row for first, last in parts for row in range(first, last)] == list(range(batch))
    assert all(first % ROW_TILE == 0 for first, _ in parts), "the alignment for which kernels are compiled"
    if limit is None or batch * line <= limit:
        assert len(parts) == 1
        return
    assert all(last - first <= max(ROW_TILE, limit // line) for first, last in parts)


def test_words_of_each_kind_of_step() -> None:
    plain = StepShape(K, FULL, 1, STEP_TILING)
    rule = SyntheticAcceptance(rate=0.5)
    assert logit_words(plain) == 1
    assert logit_words(replace(plain, grammars=GRAMMARS[0])) == 3
    assert logit_words(replace(plain, verification=rule, sampler=GREEDY)) == 1
    assert logit_words(replace(plain, verification=rule)) == WORDS


@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_large_batch_with_a_draft_plans_a_workspace_below_one_gib(rows: int, k: int) -> None:
    """Shapes of Llama-3.1-8B and Llama-3.2-1B: 128,256 ids, 32 query heads."""
    triton_ops = pytest.importorskip("fastspec.kernels.triton_ops", reason="Triton ships for Linux only")
    target = replace(tiny_spec(layers=32, hidden=4096, heads=32, kv_heads=8, dim=128), intermediate_size=14_336)
    draft = replace(tiny_spec(layers=16, hidden=2048, heads=32, kv_heads=8, dim=64), intermediate_size=8192)
    target, draft = (replace(each, vocab_size=128_256) for each in (target, draft))
    dtype = torch.bfloat16
    layout = Layout(rows, k, 64, target, dtype, draft, dtype, (512, 1024, 2048), triton_ops.TRITON_OPS)
    plan = layout.plan(256, 0)
    logits = rows * (k + 1) * 4 * 128_256
    assert plan.workspace < 2**30
    assert plan.workspace > min(logits, 384 * 2**20)
    assert layout.with_batch(rows - 1).plan(256, 0).workspace <= plan.workspace
