"""Drafts of an MTP layer in the loop: those recomputed from the whole text, and text as without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeForCausalLM, PreTrainedModel, Qwen3_5ForCausalLM

from fastspec import FastSpecGenerator, NGram, SyntheticAcceptance, frequent_ids
from fastspec.kernels.ops import TORCH_OPS
from fastspec.proposers.mtp import MtpDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import FULL, GREEDY, StepShape
from fastspec.state import DecodeState
from fastspec.step import StepModules
from tests.helpers.heads import engine_with
from tests.helpers.heads_definition import learn
from tests.helpers.hybrid import make_hybrid
from tests.helpers.mtp import (
    LAYERS,
    MtpDefinition,
    add_to,
    mtp_of_transformers,
    random_mtp,
    stored_names,
    write_glm,
    write_ling,
    write_target,
)
from tests.proposers import test_eagle3
from tests.proposers.test_eagle3 import (
    CAPS,
    GIVEN,
    Seen,
    check_text_is_that_of_plain_decoding,
    uneven,
    watched,
    wrong_drafts,
)
from tests.proposers.test_head_law import TableHead, TableTarget
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts, run, texts
from tests.step import test_step_law
from tests.step.test_step_law import TOLERANCE, VOCAB, compare
from tests.step.test_step_static import NoHostReads, run_step, start_rows

MTP = "mtp"


class Truth:
    """Drafts out of whole texts: hidden states from transformers, the layer by its definition."""

    head: Any = None

    def __init__(self, live: PreTrainedModel, tensors: dict[str, Tensor], layout: str) -> None:
        self.model, self.head = live, MtpDefinition.of(live, tensors, layout)

    @torch.no_grad()
    def features(self, text: list[int]) -> Tensor:
        """[n - 1, 1, hidden], behind the final norm, or before it."""
        if getattr(self.head, "before_norms", False):
            before: list[Tensor] = []
            with self.model.get_decoder().norm.register_forward_pre_hook(lambda _, given: before.append(given[0])):
                self.model(torch.tensor([text]))
            return before[0][0, :-1, None]
        states = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        return states[-1][0, :-1, None]

    @torch.no_grad()
    def drafts(self, text: list[int], k: int) -> tuple[list[int], list[float]]:
        return self.head.drafts(self.features(text), torch.tensor(text), k)


class TheirTruth(Truth):
    """The same with transformers' own module for the layer."""

    def __init__(self, live: PreTrainedModel, mtp: Any) -> None:
        self.model, self.mtp = live, mtp

    @torch.no_grad()
    def drafts(self, text: list[int], k: int) -> tuple[list[int], list[float]]:
        g, following, drafted, margins = self.features(text)[None, :, 0], torch.tensor([text[1:]]), [], []
        for _ in range(k):
            places = torch.arange(g.shape[1])[None]
            x = self.mtp.forward_layer(0, g, places, None, input_ids=following)[:, -1:]
            best = self.mtp._project_to_logits(x)[0, 0].topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            drafted.append(int(best.indices[0]))
            g, following = torch.cat((g, x), 1), torch.cat((following, best.indices[None, :1]), 1)
        return drafted, margins


Made = tuple[Path, Truth]


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Made:
    target, live, tensors = write_target(tmp_path_factory.mktemp("mimo"), "mimo")
    return target, Truth(live, tensors, "mimo")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Made:
    kind = mtp_of_transformers()
    path = tmp_path_factory.mktemp("hybrid")
    live = make_hybrid("qwen3_5")
    live.config.num_mtp_layers, live.config.mtp_layer_types = 1, ["full_attention"]
    live.save_pretrained(path)
    add_to(path, stored_names("mtp", random_mtp(live, neutral=0.0), 0))
    main = Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32)
    return path, TheirTruth(main, kind.from_pretrained(main))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Made:
    target, mtp = write_glm(tmp_path_factory.mktemp("mixture"))
    return target, TheirTruth(Glm4MoeForCausalLM.from_pretrained(target, dtype=torch.float32), mtp)


@pytest.fixture(scope="module")
def ling(tmp_path_factory: pytest.TempPathFactory) -> Made:
    target, mtp = write_ling(tmp_path_factory.mktemp("ling"))
    return target, TheirTruth(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), mtp)


@pytest.fixture(params=["mimo", "nextn", "mtp", "hybrid", "mixture", "ling"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    if request.param in ("mimo", "hybrid", "mixture", "ling"):
        found: Made = request.getfixturevalue(request.param)
        return found
    target, live, tensors = write_target(tmp_path, request.param)
    return target, Truth(live, tensors, request.param)


def test_drafts_are_those_of_the_whole_text(made: Made) -> None:
    """Rows are admitted, moved and end; drafts are paused; chunks of prompts are whole, partial and absent."""
    target, truth = made
    seen: list[Seen] = []
    given, caps = [*prompts(4, seed=5), [7] * 65, list(range(90))], [14, 9, 3, 12, 7, 8]
    plain = run(engine_with(target, MTP), given, caps, k=0)
    found = run(watched(engine_with(target, MTP), seen), given, caps, k=uneven)
    assert texts(found) == texts(plain)
    assert len(seen) > 25
    assert wrong_drafts(truth, seen) == 0  # type: ignore[arg-type]


def test_drafts_behind_accepted_ones(made: Made) -> None:
    """Whatever was accepted, the layer goes on from true hidden states: place by place as at the start."""
    target, truth = made
    seen: list[Seen] = []
    engine = engine_with(target, MTP, k=4, verification=SyntheticAcceptance(pattern=[4, 0, 2, 3, 1]))
    run(watched(engine, seen), prompts(4, seed=5), [40, 25, 33, 17], k=lambda steps: (4, 4, 0, 3)[steps % 4])
    assert len(seen) > 25
    assert wrong_drafts(truth, seen) == 0  # type: ignore[arg-type]


def _before_the_norm(drafts: MtpDrafts) -> None:
    drafts.read((LAYERS,))


@pytest.mark.parametrize(
    "plant",
    [
        test_eagle3._shifted_features,
        test_eagle3._shifted_positions,
        test_eagle3._stale_cache,
        test_eagle3._wrong_pairing,
        test_eagle3._lost_in_plain_steps,
        test_eagle3._recycles_the_first,
        _before_the_norm,
    ],
)
def test_a_planted_fault_is_seen_in_drafts_and_never_in_the_text(plant: Callable[[Any], None], mimo: Made) -> None:
    seen: list[Seen] = []
    engine = engine_with(mimo[0], MTP)
    assert isinstance(engine.modules.proposer, MtpDrafts)
    plant(engine.modules.proposer)
    given = [*prompts(4, seed=5), [7] * 65]
    found = run(watched(engine, seen), given, [14, 9, 3, 12, 7], k=uneven)
    assert texts(found) == plain_texts(mimo[0])
    assert wrong_drafts(mimo[1], seen) > 2  # type: ignore[arg-type]


@cache
def plain_texts(target: Path) -> list[list[int]]:
    given = [*prompts(4, seed=5), [7] * 65]
    return texts(run(engine_with(target, MTP), given, [14, 9, 3, 12, 7], k=0))


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer that knows the greedy texts of the prompts, but for what it drafts further on."""
    target, live, tensors = write_target(tmp_path_factory.mktemp("learnt"), "mimo")
    truth, known = Truth(live, tensors, "mimo"), []
    for prompt, text in zip(GIVEN, texts(run(engine_with(target, MTP, batch=8), GIVEN, CAPS, k=0)), strict=True):
        whole = [*prompt, *text]
        if len(whole) > 2:
            known.append((truth.features(whole)[:-1], torch.tensor(whole[1:-1]), torch.tensor(whole[2:])))
    learn(truth.head, known, steps=40)
    return add_to(target, stored_names("mimo", truth.head.tensors, LAYERS))


@pytest.mark.parametrize(("k", "batch"), [(1, 8), (3, 1), (5, 8), (8, 1), (16, 8)])
def test_text_is_that_without_drafts(learnt: Path, k: int, batch: int) -> None:
    engine = engine_with(learnt, MTP, k=k, batch=batch, verification="coupled")
    check_text_is_that_of_plain_decoding(engine, k, batch)


class WholeHead(TableHead):
    """A table of logits over all of the target's ids."""

    vocab_size = VOCAB

    def __init__(self, logits: Tensor) -> None:
        self.table = logits


def mtp_modules(target: Tensor, draft: Tensor | None, shared: int | None = None, context: int = 1000) -> StepModules:
    assert draft is not None
    drafts = MtpDrafts(WholeHead(draft), TORCH_OPS)  # type: ignore[arg-type]
    return StepModules(TableTarget(target), drafts, features=torch.zeros(100000, 2, dtype=torch.float64))


def test_decodes_follow_the_targets_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_step_law, "table_modules", mtp_modules)
    assert compare(seed=22, k=2, limit=5, stop_ids=[3, 1], temperature=1.0, shared=VOCAB) < TOLERANCE
    original = MtpDrafts.propose

    def judged_by_another(
        self: MtpDrafts, state: DecodeState, shape: StepShape, draws: Draws, given: Any = None, *, features: Tensor
    ) -> None:
        original(self, state, shape, draws, given, features=features)
        state.draft_probs.copy_(state.draft_probs.roll(1, -1))

    monkeypatch.setattr(MtpDrafts, "propose", judged_by_another)
    assert compare(seed=22, k=1, limit=5, stop_ids=[], temperature=1.0, shared=VOCAB) > 1e-3


@pytest.mark.parametrize("sampler", [GREEDY, FULL])
def test_a_step_reads_nothing_back(sampler: str, mimo: Made) -> None:
    engine = engine_with(mimo[0], MTP, k=5, ops=TORCH_OPS)
    start_rows(engine.state)
    with NoHostReads(), torch.inference_mode():
        for k in (0, 5):
            run_step(engine, k, sampler)
    assert engine.state.emitted[:2].min() >= 1


def test_lookup_goes_before_the_layer(mimo: Made) -> None:
    seen: list[Seen] = []
    again = [[5, 6, 7, 8, 9] * 4, [11, 12, 13]]
    plain = texts(run(engine_with(mimo[0], MTP), again, 12, k=0))
    engine = watched(engine_with(mimo[0], MTP, proposer=NGram()), seen)
    assert texts(run(engine, again, 12, k=3)) == plain
    assert seen[0].drafts == [5, 6, 7], "the text repeats itself"


@pytest.mark.parametrize("layout", ["mimo", "mtp"])
def test_fewer_ids_may_be_drafted(layout: str, tmp_path: Path) -> None:
    """Of a head that is the embedding, and of one that is stored; drafts are those of its rows, and the text stays."""
    target, live, tensors = write_target(tmp_path, layout)
    given = [*prompts(4, seed=5), [7] * 65]
    plain = run(engine_with(target, MTP), given, 12, k=0)
    kept = frequent_ids([request.new_tokens for request in plain], 30)
    assert len(kept) < live.config.vocab_size // 2
    truth, ids = Truth(live, tensors, layout), torch.tensor(kept)
    assert truth.head.lm_head is not None
    truth.head.lm_head = truth.head.lm_head[ids]
    truth.head.tensors = {**tensors, "d2t": ids - torch.arange(len(ids))}
    seen: list[Seen] = []
    shuffled = [*kept[3:], *kept[:3]]
    engine = watched(engine_with(target, MTP, verification="coupled", draft_vocab=shuffled), seen)
    assert texts(run(engine, given, 12, k=uneven)) == texts(plain)
    assert len(seen) > 20
    assert wrong_drafts(truth, seen) == 0  # type: ignore[arg-type]
    options = [replace(GREEDY_ROW, temperature=0.9, seed=seed, top_p=0.9) for seed in range(5)]
    sampled = [texts(run(engine, given, 12, k=k, options=options)) for k in (0, 3)]
    assert sampled[0] == sampled[1]
    truth.head.tensors["d2t"] = truth.head.tensors["d2t"].roll(1)
    assert wrong_drafts(truth, seen) > 2, "other rows would be seen"  # type: ignore[arg-type]


def test_a_generator_offers_it_and_uses_it(mimo: Made) -> None:
    target, _ = mimo
    common: dict[str, Any] = {"max_batch_size": 2, "max_length": 120, "device": "cpu", "progress": False}
    given = [[5, 6, 7], [9, 8], [1, 2, 3, 4]]
    with FastSpecGenerator(target, **common) as plain:
        wanted = plain.generate(given, max_new_tokens=10)
        assert "the checkpoint has an MTP layer" in plain.explain()
        without = plain.memory_plan
    with FastSpecGenerator(target, "mtp", num_speculative_tokens="auto", **common) as made:
        assert torch.equal(made.generate(given, max_new_tokens=10), wanted)
        mixed = made.generate(given, max_new_tokens=10, num_speculative_tokens=[3, 0, 1])
        assert torch.equal(mixed, wanted)
        assert "by the checkpoint's own MTP head (layout of MiMo)" in made.explain()
        planned, spec = made.memory_plan, made._draft.spec  # type: ignore[union-attr]
        assert planned.draft_weights == spec.weight_bytes(torch.float32)
        assert planned.target_weights == without.target_weights
    few = {"draft_vocab": frequent_ids([[5, 6], [6, 7, 9, 9]], 3), "num_speculative_tokens": 2}
    with FastSpecGenerator(target, "mtp", **few, **common) as made:
        assert torch.equal(made.generate(given, max_new_tokens=10), wanted)
        assert "which drafts 3 of 113 ids" in made.explain()
        assert made.memory_plan.draft_weights == planned.draft_weights + 4 * 3 * 64 + 8 * (3 + 113)
    assert FastSpecGenerator.plan(target, "mtp", **{key: common[key] for key in list(common)[:3]}).draft_weights
