"""Scoring k drafts in one pass against its oracle: every prefix of the drafts as a sequence of its own, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.engine.engine import Engine
from fastspec.kernels import reference
from fastspec.shapes import GREEDY, StepShape, Tiling
from fastspec.step import prefill, score
from tests.helpers.devices import devices
from tests.helpers.tiny import VOCAB, tiny_engine
from tests.models.test_bits import fill

PROMPTS, LENGTH = [2, 5], 37
DRAFTS = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))


def expanded(engine: Engine, k: int, *, fed_as_prompt: bool) -> Tensor:
    """Logits [prompts, k+1, V]: row j of a prompt is a sequence of the prompt and its first j drafts.

    Args:
        engine: with k + 1 rows, one for every prefix.
        k: drafts.
        fed_as_prompt: everything but the last token goes in as a prompt would; else the drafts go in one at a time.
    """
    out = []
    for row, drafts in zip(PROMPTS, DRAFTS, strict=True):
        fill(engine, [row] * (k + 1), LENGTH)
        logits = []
        for j in range(k + 1):
            view = engine.state.rows(j, j + 1)
            view.tokens[0, LENGTH : LENGTH + j] = drafts[:j].to(view.tokens.device)
            for length in range(LENGTH + j if fed_as_prompt else LENGTH, LENGTH + j + 1):
                view.lengths.fill_(length)
                if fed_as_prompt and j:
                    prompt_again(engine, j, length)
                found = score(engine.modules, view, StepShape(0, GREEDY, 1, engine.shapes.tiling))
            logits.append(found[0, 0])
        out.append(torch.stack(logits))
    return torch.stack(out)


def prompt_again(engine: Engine, place: int, length: int) -> None:
    (chunk,) = engine.sizes.chunks
    for start in range(0, length - 1, chunk):
        shape = StepShape(0, GREEDY, 1, Tiling(chunk, chunk))
        prefill(engine.modules, engine.state.rows(place, place + 1), shape, start, chunk)


def at_once(engine: Engine, k: int) -> Tensor:
    """Logits [prompts, k+1, V] of one pass over k+1 tokens a row."""
    fill(engine, PROMPTS, LENGTH)
    state = engine.state.rows(0, len(PROMPTS))
    state.draft_tokens[:, :k] = DRAFTS[:, :k].to(state.lengths.device)
    return score(engine.modules, state, StepShape(k, GREEDY, 1, engine.shapes.tiling))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("k", [1, 4, 7])
def test_one_pass_is_batch_expansion_to_the_bit(k: int, device: str) -> None:
    engine = tiny_engine(k=k, batch=k + 1, max_length=120, device=device)
    assert torch.equal(at_once(engine, k), expanded(engine, k, fed_as_prompt=False))


@pytest.mark.parametrize("device", devices())
def test_one_pass_is_batch_expansion_of_whole_prompts(device: str) -> None:
    """Fed as prompts the same tokens go through products of another shape: equal up to fp32 rounding."""
    engine = tiny_engine(k=4, batch=5, max_length=120, device=device)
    together, apart = at_once(engine, 4), expanded(engine, 4, fed_as_prompt=True)
    assert float((together - apart).abs().max()) < 1e-4 * float(apart.abs().max())


def sees_later_drafts(*rows: Tensor, **shape: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A planted bug: every token of the pass attends as far as the last one."""
    ids, positions, write_mask = reference.feed_rows(*rows, **shape)
    return ids, positions[:, -1:].expand_as(positions).contiguous(), write_mask


def shifted(*rows: Tensor, **shape: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A planted bug: the drafts in another order."""
    ids, positions, write_mask = reference.feed_rows(*rows, **shape)
    return ids.roll(1, dims=1), positions, write_mask


@pytest.mark.parametrize("bug", [sees_later_drafts, shifted])
def test_the_oracle_sees_a_planted_bug(bug: Any) -> None:
    engine = tiny_engine(k=4, batch=5, max_length=120)
    expected = expanded(engine, 4, fed_as_prompt=True)
    modules = replace(engine.modules, ops=engine.modules.ops.replaced(feed_rows=bug))
    found = at_once(replace(engine, modules=modules), 4)
    assert float((found - expected).abs().max()) > 0.01 * float(expected.abs().max())
