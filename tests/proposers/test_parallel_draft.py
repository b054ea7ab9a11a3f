"""A PARD draft: drafts in the loop are those of the whole text with masks behind it, and no text changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastspec import FastSpecGenerator, SyntheticAcceptance, UnsupportedModel
from fastspec.engine.engine import Engine
from fastspec.errors import CheckpointError
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.pair import resolve_pair
from fastspec.proposers.draft_model import ParallelDraft
from fastspec.proposers.interface import reads_back_of
from fastspec.sampling.verify import Draws
from fastspec.shapes import FULL, GREEDY, StepShape
from fastspec.state import DecodeState
from tests.helpers.checkpoints import edit, make_checkpoint
from tests.helpers.heads import engine_with
from tests.helpers.hybrid import make_hybrid
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts, run, texts
from tests.step.test_step_static import NoHostReads, run_step, start_rows

MASK = 77
GIVEN, CAPS = [*prompts(4, seed=5), [7] * 65], [30, 15, 9, 24, 12]
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and a draft with its weights: the first draft of each step is right, the others by chance."""
    path = tmp_path_factory.mktemp("pair")
    target, draft = (make_checkpoint(path / name, "llama3") for name in ("target", "draft"))
    edit(draft / "config.json", pard_token=MASK)
    return target, draft


@dataclass
class Seen:
    """A row's text, and the drafts that count."""

    text: list[int]
    drafts: list[int]


def watched(engine: Engine, seen: list[Seen]) -> Engine:
    drafts: Any = engine.modules.proposer
    propose = drafts.propose

    def noting(state: DecodeState, shape: StepShape, draws: Draws, *lookup: Any) -> None:
        propose(state, shape, draws, *lookup)
        counts = torch.minimum(state.draft_counts, state.draft_limits)
        for row in range(state.batch):
            if state.running[row]:
                text = state.tokens[row, : state.lengths[row]].tolist()
                seen.append(Seen(text, state.draft_tokens[row, : counts[row]].tolist()))

    drafts.propose = noting
    return engine


@torch.no_grad()
def wrong_drafts(draft: Path, seen: list[Seen]) -> int:
    """How many of the noted drafts are not those of transformers, fed the text and masks; ties are nobody's fault."""
    model, wrong = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32), 0
    for each in seen:
        if each.drafts:
            fed = torch.tensor([[*each.text, *[MASK] * (len(each.drafts) - 1)]])
            logits: Tensor = model(fed).logits[0, len(each.text) - 1 :]
            best = logits.topk(2).values
            clear = best[:, 0] - best[:, 1] > 1e-3
            wrong += int(((logits.argmax(-1) != torch.tensor(each.drafts)) & clear).any())
    return wrong


def uneven(step: int) -> int:
    return (5, 1, 0, 3, 5, 0, 0, 2)[step % 8]


RULES = [None, SyntheticAcceptance(pattern=[5, 0, 2, 4, 1, 3])]


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "synthetic"])
def test_drafts_are_those_of_the_whole_text(rule: SyntheticAcceptance | None, pair: Pair) -> None:
    """Rows are admitted, moved and end; drafts are paused; steps accept all numbers of drafts."""
    seen: list[Seen] = []
    engine = watched(engine_with(*pair, k=5, **({} if rule is None else {"verification": rule})), seen)
    assert isinstance(engine.modules.proposer, ParallelDraft)
    found = run(engine, GIVEN, CAPS, k=uneven)
    assert len(seen) > 15
    assert wrong_drafts(pair[1], seen) == 0
    if rule is None:
        assert texts(found) == plain_texts(pair[0])


@cache
def plain_texts(target: Path) -> list[list[int]]:
    return texts(run(engine_with(target, None), GIVEN, CAPS, k=0))  # type: ignore[arg-type]


def as_if_drafts_were_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelDraft, "feeds_drafts", True)


def one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    block = ParallelDraft._block

    def shifted(self: ParallelDraft, state: DecodeState, shape: StepShape) -> Any:
        rows, first = block(self, state, shape)
        return replace(rows, positions=rows.positions + 1), first

    monkeypatch.setattr(ParallelDraft, "_block", shifted)


def last_token_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    block = ParallelDraft._block

    def shifted(self: ParallelDraft, state: DecodeState, shape: StepShape) -> Any:
        rows, first = block(self, state, shape)
        return rows, (first - 1).clamp_min(0)

    monkeypatch.setattr(ParallelDraft, "_block", shifted)


@pytest.mark.parametrize("plant", [as_if_drafts_were_fed, one_later, last_token_twice])
def test_a_planted_fault_is_seen_in_drafts_and_never_in_the_text(
    plant: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is what a commit records for other draft models: drafts that were accepted are in the cache."""
    plant(monkeypatch)
    seen: list[Seen] = []
    found = run(watched(engine_with(*pair, k=5), seen), GIVEN, CAPS, k=uneven)
    assert texts(found) == plain_texts(pair[0])
    assert wrong_drafts(pair[1], seen) > 2


def test_host_and_device_count_the_same_positions(pair: Pair) -> None:
    engine = engine_with(*pair, k=5, batch=1, verification=SyntheticAcceptance(pattern=[5, 0, 3]))
    assert reads_back_of(engine.modules.proposer) == engine.shapes.reads_back == 6
    start_rows(engine.state)
    before = engine.state.lengths.clone()
    with torch.inference_mode():
        run_step(engine, 5, GREEDY)
    assert torch.equal(engine.state.draft_lengths[:1], before[:1]), "the last token was read, and no draft"


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
        for k, sampler in ((2, FULL), (5, GREEDY), (5, FULL)):
            run_step(engine, k, sampler)
    assert engine.state.emitted[:2].min() >= 1


def test_a_generator_finds_it_by_its_config(pair: Pair, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_length": 80, "device": "cpu", "progress": False}
    with FastSpecGenerator(*pair, num_speculative_tokens=3, **options) as made:
        assert "all drafts in one pass (PARD)" in made.explain()
        found = made.generate([[5, 6, 7]], max_new_tokens=20, return_dict_in_generate=True)
        assert torch.equal(found.sequences, made.generate([[5, 6, 7]], max_new_tokens=20, num_speculative_tokens=0))
        assert found.stats.accepted > 0
    target, other = pair[0], make_checkpoint(tmp_path / "other", "llama3")
    assert resolve_pair(target, other, (None, None), (None, None))[1].mask_id is None  # type: ignore[union-attr]
    edit(other / "config.json", pard_token=101)
    with pytest.raises(CheckpointError, match=r"pard_token=101 in its config, wanted an id below vocab_size=101"):
        resolve_pair(target, other, (None, None), (None, None))


def test_recurrent_states_are_refused(pair: Pair, tmp_path: Path) -> None:
    make_hybrid("next").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", pard_token=5)
    with pytest.raises(UnsupportedModel, match="pard_token and recurrent states, which masks would change"):
        engine_with(tmp_path, tmp_path, k=2)
