"""Drafts of several MTP layers in the loop: those recomputed from the whole text, and text as without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator, SyntheticAcceptance
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.models.heads.mtp_spec import MtpSpec
from fastspec.proposers import features as features_module
from fastspec.proposers.interface import reads_ahead
from fastspec.proposers.mtp import MtpLayersDrafts
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import FULL, GREEDY, ForwardBatch
from fastspec.state import DecodeState
from fastspec.step import step
from tests.helpers.heads import engine_with
from tests.helpers.mtp import LayersDefinition, MtpDefinition, write_layers
from tests.proposers.test_eagle3 import Seen, uneven, watched, wrong_drafts
from tests.proposers.test_kept_heads import HEAD, drafted
from tests.proposers.test_mtp import Truth
from tests.scheduling.test_prefix import Turn, together
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts, run, texts
from tests.step.test_step_static import NoHostReads, run_step, start_rows

GIVEN, CAPS = [*prompts(4, seed=5), [7] * 65, [3, 4]], [14, 9, 3, 12, 7, 11]
Made = tuple[Path, Truth]


def made_with(path: Path, layout: str, depth: int) -> Made:
    target, live, tensors = write_layers(path, layout, depth)
    truth = Truth(live, tensors[0], layout)
    truth.head = LayersDefinition([MtpDefinition.of(live, each, layout) for each in tensors])  # type: ignore[assignment]
    return target, truth


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_with(tmp_path_factory.mktemp("three"), "mimo-v2", 3)


@pytest.mark.parametrize(("layout", "depth"), [("mimo-v2", 3), ("mtp", 2), ("step", 3), ("step", 1)])
def test_drafts_are_those_of_the_whole_text(layout: str, depth: int, three: Made, tmp_path: Path) -> None:
    """Rows are admitted, moved and end; drafts are paused; there are more drafts than layers, and fewer."""
    target, truth = three if layout == "mimo-v2" else made_with(tmp_path, layout, depth)
    seen: list[Seen] = []
    found = run(
        watched(engine_with(target, "mtp", k=5), seen), GIVEN, CAPS, k=lambda step: (5, 0, 2, 1, 0, 3)[step % 6]
    )
    assert texts(found) == plain_texts(target)
    assert len(seen) > 15
    assert wrong_drafts(truth, seen) == 0  # type: ignore[arg-type]


def test_drafts_behind_accepted_ones(three: Made) -> None:
    target, truth = three
    seen: list[Seen] = []
    engine = engine_with(target, "mtp", k=4, verification=SyntheticAcceptance(pattern=[4, 0, 2, 3, 1]))
    run(watched(engine, seen), prompts(4, seed=5), [30, 15, 23, 7], k=lambda steps: (4, 4, 0, 3)[steps % 4])
    assert len(seen) > 15
    assert wrong_drafts(truth, seen) == 0  # type: ignore[arg-type]


def _not_computed_again(drafts: MtpLayersDrafts, monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafting left at the newest positions stays."""
    original = features_module._with_older

    def wrong(state: DecodeState, fed: ForwardBatch, older: int) -> ForwardBatch:
        rows = original(state, fed, older)
        rows.write_mask[:, :older] = False
        return rows

    monkeypatch.setattr(features_module, "_with_older", wrong)


def _older_by_one(drafts: MtpLayersDrafts, monkeypatch: pytest.MonkeyPatch) -> None:
    original = features_module._keep_window
    monkeypatch.setattr(
        features_module, "_keep_window", lambda joined, count, kept: original(joined, (count - 1).clamp_min(0), kept)
    )


def _shifted_tokens(drafts: MtpLayersDrafts, monkeypatch: pytest.MonkeyPatch) -> None:
    original = drafts.model.drafted

    def wrong(g: Tensor, rows: ForwardBatch, index: int = 0) -> Tensor:
        return original(g, replace(rows, ids=rows.ids.roll(1, 1)) if index else rows, index)

    drafts.model.drafted = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [_not_computed_again, _older_by_one, _shifted_tokens])
def test_a_planted_fault_is_seen_in_drafts_and_never_in_the_text(
    plant: Callable[[Any, pytest.MonkeyPatch], None], three: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Seen] = []
    engine = engine_with(three[0], "mtp", k=5)
    assert isinstance(engine.modules.proposer, MtpLayersDrafts)
    plant(engine.modules.proposer, monkeypatch)
    found = run(watched(engine, seen), GIVEN, CAPS, k=5)
    assert texts(found) == plain_texts(three[0])
    assert wrong_drafts(three[1], seen) > 2  # type: ignore[arg-type]


@cache
def plain_texts(target: Path) -> list[list[int]]:
    return texts(run(engine_with(target, "mtp"), GIVEN, CAPS, k=0))


def test_shared_prompts_have_the_keys_of_their_followers(three: Made) -> None:
    """K/V of a position depend on three later tokens: a piece of the prefix cache ends three tokens before the text."""
    assert reads_ahead(engine_with(three[0], "mtp").modules.proposer) == 3
    turns = [Turn(HEAD[:80], 9, seed=1), Turn((*HEAD[:66], *HEAD[:9]), 9, seed=1), Turn(HEAD[:67], 6)]
    engine = engine_with(three[0], "mtp")
    kept = drafted(engine, turns, [0, 0, 64])
    assert kept == drafted(replace(engine, prefix=None), turns, [0, 0, 0])
    seen: list[Seen] = []
    together(Scheduler(watched(engine, seen)), [Turn((*HEAD[:64], *HEAD[64:70], 1), 12)])
    assert seen
    assert wrong_drafts(three[1], seen) == 0  # type: ignore[arg-type]


def test_older_positions_may_be_in_an_earlier_block(three: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that feeds no position before a block leaves out the attention kernels of earlier ones."""
    engine = engine_with(three[0], "mtp", k=3)
    drafts, fed = engine.modules.proposer, list[ForwardBatch]()
    assert isinstance(drafts, MtpLayersDrafts)
    original = drafts.model.drafted
    drafts.model.drafted = (  # type: ignore[method-assign]
        lambda g, rows, index=0: (fed.append(rows), original(g, rows, index))[1]
    )
    start_rows(engine.state)
    shape = replace(engine.shapes.step(3, GREEDY, None, 64), first_block=17)
    with torch.inference_mode():
        step(engine.modules, engine.state, shape, PhiloxDraws(engine.state.seeds))
    assert len(fed) == 3 + 2, "drafts, then all layers but the last, which stores K and V alone"
    assert {rows.first_block for rows in fed} == {0}


def test_text_is_that_without_drafts(three: Made) -> None:
    engine, given, caps = engine_with(three[0], "mtp", k=15, verification="coupled"), GIVEN[:3], [7, 5, 6]
    options = [replace(GREEDY_ROW, temperature=0.9, seed=seed, top_p=0.9) for seed in range(3)]
    for each in (None, options):
        plain, *found = (texts(run(engine, given, caps, k=k, options=each)) for k in (0, 1, 3, 5, 8, 15))
        assert found == [plain] * 5


def test_a_step_reads_nothing_back(three: Made) -> None:
    engine = engine_with(three[0], "mtp", k=5, ops=TORCH_OPS)
    start_rows(engine.state)
    with NoHostReads(), torch.inference_mode():
        for k, sampler in ((0, GREEDY), (2, FULL), (5, GREEDY), (5, FULL)):
            run_step(engine, k, sampler)
    assert engine.state.emitted[:2].min() >= 1


def test_a_generator_says_how_many_there_are_and_draws_fewer_ids(three: Made) -> None:
    target, _ = three
    common: dict[str, Any] = {"max_batch_size": 2, "max_length": 120, "device": "cpu", "progress": False}
    given = [[5, 6, 7], [9, 8], [1, 2, 3, 4]]
    _, head = resolve_pair(target, "mtp", (None, None), (None, None))
    assert head is not None
    assert isinstance(head.spec, MtpSpec)
    assert head.spec.kept == (2, 1, 64)
    with FastSpecGenerator(target, "mtp", num_speculative_tokens=3, **common) as made:
        wanted = made.generate(given, max_new_tokens=6, num_speculative_tokens=0)
        assert torch.equal(made.generate(given, max_new_tokens=6), wanted)
        assert "the 3 layers of the checkpoint's own MTP head (layout of MiMo-V2)" in made.explain()
        assert made.memory_plan.draft_weights == head.spec.weight_bytes(torch.float32)
    few = {"draft_vocab": [5, 3, 8, 60], "num_speculative_tokens": 3}
    with FastSpecGenerator(target, "mtp", **few, **common) as made:
        assert torch.equal(made.generate(given, max_new_tokens=6), wanted)
        assert "which draft 4 of 113 ids" in made.explain()
    seen: list[Seen] = []
    run(watched(engine_with(target, "mtp", draft_vocab=[5, 3, 8, 60]), seen), GIVEN[:3], CAPS[:3], k=uneven)
    assert {draft for each in seen for draft in each.drafts} <= {5, 3, 8, 60}
