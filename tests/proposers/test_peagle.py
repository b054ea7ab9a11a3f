"""Drafts of a P-EAGLE head in the loop: those recomputed from the whole text, and text as without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec import FastSpecGenerator, UnsupportedModel
from fastspec.errors import CheckpointError
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.proposers.heads import PEagleDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import FULL, GREEDY, ForwardBatch, StepShape
from fastspec.state import DecodeState
from fastspec.step import StepModules
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.heads import LAYERS, VOCAB, engine_with, peagle_tensors, write_eagle3, write_speculators
from tests.helpers.heads_definition import ParallelDefinition
from tests.proposers import test_eagle3
from tests.proposers.test_eagle3 import Seen, Truth, uneven, watched, wrong_drafts
from tests.proposers.test_head_law import TableHead, TableTarget
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts, run, texts
from tests.step import test_step_law
from tests.step.test_step_static import NoHostReads, run_step, start_rows

BOUNDARIES, MASK = [2, 4, 5], 7
GIVEN, CAPS = [*prompts(4, seed=5), [7] * 65], [14, 9, 3, 12, 7]
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("pair")
    target = make_checkpoint(path / "target", "llama3", num_hidden_layers=LAYERS)
    return target, written(path / "head", peagle_tensors(std=0.4))


def written(path: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """As speculators publishes them."""
    said = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": MASK}
    return write_speculators(path, tensors, boundaries=BOUNDARIES, **{**said, "embed_requires_grad": True, **fields})


def truth_of(pair: Pair, **flags: Any) -> Truth:
    truth = Truth(*pair, BOUNDARIES, **flags)
    truth.head = ParallelDefinition(truth.head.tensors, mask_id=MASK, **flags)
    return truth


@pytest.mark.parametrize("layout", ["speculators", "eagle"])
def test_drafts_are_those_of_the_whole_text(layout: str, pair: Pair, tmp_path: Path) -> None:
    target, head = pair
    flags: dict[str, Any] = {}
    if layout == "eagle":
        flags = {"norm_before_residual": True}
        ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "layer_ids": BOUNDARIES}
        more = {"ptd_token_id": MASK, "parallel_drafting": True, "eagle_config": ids, **flags}
        head = write_eagle3(tmp_path, peagle_tensors(fc_norm=True, layers=3), **more)
    seen: list[Seen] = []
    engine = watched(engine_with(target, head, k=5), seen)
    assert isinstance(engine.modules.proposer, PEagleDrafts)
    found = run(engine, GIVEN, CAPS, k=lambda step: (5, 0, 2, 1, 0, 3)[step % 6])
    assert texts(found) == plain_texts(target)
    assert len(seen) > 15
    assert wrong_drafts(truth_of((target, head), **flags), seen) == 0


@cache
def plain_texts(target: Path) -> list[list[int]]:
    return texts(run(engine_with(target, None), GIVEN, CAPS, k=0))  # type: ignore[arg-type]


def _shifted_masks(drafts: PEagleDrafts) -> None:
    fed = drafts._block

    def wrong(state: DecodeState, shape: StepShape, known: Tensor) -> ForwardBatch:
        rows = fed(state, shape, known)
        return replace(rows, positions=rows.positions + 1)

    drafts._block = wrong  # type: ignore[method-assign]


def _masks_without_hidden(drafts: PEagleDrafts) -> None:
    drafts._head._own.others["mask_hidden"].zero_()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "plant",
    [
        _shifted_masks,
        _masks_without_hidden,
        test_eagle3._stale_cache,
    ],
)
def test_a_planted_fault_is_seen_in_drafts_and_never_in_the_text(plant: Callable[[Any], None], pair: Pair) -> None:
    seen: list[Seen] = []
    engine = engine_with(*pair)
    plant(engine.modules.proposer)
    assert texts(run(watched(engine, seen), GIVEN, CAPS, k=uneven)) == plain_texts(pair[0])
    assert wrong_drafts(truth_of(pair), seen) > 2


def test_text_is_that_without_drafts(pair: Pair) -> None:
    engine, given, caps = engine_with(*pair, k=15, verification="coupled"), GIVEN[:3], [7, 5, 6]
    options = [replace(GREEDY_ROW, temperature=0.9, seed=seed, top_p=0.9) for seed in range(3)]
    for each in (None, options):
        plain, *found = (texts(run(engine, given, caps, k=k, options=each)) for k in (0, 1, 3, 5, 8, 15))
        assert found == [plain] * 5


def test_a_step_reads_nothing_back(pair: Pair) -> None:
    engine = engine_with(*pair, k=5, ops=TORCH_OPS)
    start_rows(engine.state)
    with NoHostReads(), torch.inference_mode():
        for k, sampler in ((0, GREEDY), (5, GREEDY), (5, FULL)):
            run_step(engine, k, sampler)
    assert engine.state.emitted[:2].min() >= 1


class BlockHead(TableHead):
    """A head whose law of each place is a table of (place, last token), over all of the target's ids."""

    vocab_size = test_step_law.VOCAB

    def __init__(self, logits: Tensor) -> None:
        self.table = logits
        self.head = SimpleNamespace(**vars(TableHead.head), mask_id=0)

    def block(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        assert (rows.ids[:, 1:] == 0).all()
        return torch.stack((rows.positions + 1, rows.ids[:, :1].expand_as(rows.ids)), dim=-1)


class JudgedByAnother(PEagleDrafts):
    """The laws of places are exchanged after the drafts were drawn."""

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws, lookup: Any = None, **features: Any) -> None:
        super().propose(state, shape, draws, lookup, **features)
        state.draft_probs.copy_(state.draft_probs.roll(1, 1))


@pytest.mark.parametrize("kind", [PEagleDrafts, JudgedByAnother])
def test_decodes_follow_the_targets_law(kind: type[PEagleDrafts], monkeypatch: pytest.MonkeyPatch) -> None:
    def modules(target: Tensor, draft: Tensor | None, shared: int | None = None, context: int = 1000) -> StepModules:
        assert draft is not None
        drafts = kind(BlockHead(draft), TORCH_OPS)  # type: ignore[arg-type]
        return StepModules(TableTarget(target), drafts, features=torch.zeros(100000, 2, dtype=torch.float64))

    monkeypatch.setattr(test_step_law, "table_modules", modules)
    found = test_step_law.compare(seed=22, k=2, limit=5, stop_ids=[3, 1], temperature=1.0, shared=test_step_law.VOCAB)
    assert (found < test_step_law.TOLERANCE) == (kind is PEagleDrafts)


def test_what_is_said_and_what_is_refused(pair: Pair, tmp_path: Path) -> None:
    common: dict[str, Any] = {"max_batch_size": 2, "max_length": 120, "device": "cpu", "progress": False}
    with FastSpecGenerator(*pair, num_speculative_tokens=4, **common) as made:
        assert "a P-EAGLE head (layout of speculators) that reads boundaries 2, 4, 5" in made.explain()
        prompt = [[5, 6, 7], [9, 8]]
        wanted = made.generate(prompt, max_new_tokens=5, num_speculative_tokens=0)
        assert torch.equal(made.generate(prompt, max_new_tokens=5), wanted)

    def refused(kind: type[Exception], match: str, **fields: Any) -> None:
        head = written(tmp_path / "head", peagle_tensors())
        edit(head / "config.json", **fields)
        with pytest.raises(kind, match=match):
            resolve_pair(pair[0], head, (None, None), (None, None))

    refused(CheckpointError, r"mask_token_id=None .* wanted an id of .*, for masks", mask_token_id=None)
    refused(CheckpointError, f"mask_token_id={VOCAB} ", mask_token_id=VOCAB)
    refused(UnsupportedModel, r"mask_gate='gru' in the config of this P-EAGLE head is not known", mask_gate="gru")
    refused(UnsupportedModel, r"eagle_config.beams=4 .* is not known", eagle_config={"beams": 4})
    tensors = {**peagle_tensors(), "mask_hidden": torch.zeros(1, 1, 5)}
    with pytest.raises(CheckpointError, match=r"mask_hidden .* has shape \[1, 1, 5\], wanted \[1, 1, 192\]"):
        resolve_pair(pair[0], written(tmp_path / "shape", tensors), (None, None), (None, None))
