"""Drafts of an EAGLE-3 head in the loop: those recomputed from the whole text, and text as without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastspec import FastSpecGenerator, NGram, SyntheticAcceptance
from fastspec.engine.engine import Engine
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.heads.passes import Eagle3
from fastspec.proposers.heads import Eagle3Drafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import FULL, GREEDY, ForwardBatch, StepShape
from fastspec.state import DecodeState
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.heads import LAYERS, VOCAB, eagle3_tensors, engine_with, write_eagle3, write_speculators
from tests.helpers.heads_definition import Definition, learn
from tests.helpers.hybrid import make_hybrid
from tests.scheduling.test_scheduler import GREEDY_ROW, prompts, run, texts
from tests.step.test_step_static import NoHostReads, run_step, start_rows

BOUNDARIES = [2, 4, 5]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("pair")
    target = make_checkpoint(path / "target", "llama3", num_hidden_layers=LAYERS)
    return target, write_speculators(path / "head", eagle3_tensors(std=0.5), boundaries=BOUNDARIES)


@dataclass
class Seen:
    """What a row had, and what was drafted for it."""

    text: list[int]
    drafts: list[int]


def watched(engine: Engine, seen: list[Seen]) -> Engine:
    """The engine, noting every draft."""
    drafts = engine.modules.proposer
    assert drafts is not None
    propose = drafts.propose

    def noting(state: DecodeState, shape: StepShape, draws: Draws, **features: Tensor) -> None:
        propose(state, shape, draws, **features)
        for row in range(state.batch):
            if state.running[row]:
                text = state.tokens[row, : state.lengths[row]].tolist()
                seen.append(Seen(text, state.draft_tokens[row, : state.draft_counts[row]].tolist()))

    drafts.propose = noting  # type: ignore[method-assign]
    return engine


class Truth:
    """Drafts out of whole texts: hidden states from transformers, the head by its definition."""

    def __init__(self, target: Path, head: Path, boundaries: list[int], **flags: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        stored = load_file(head / "model.safetensors")
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored.items()}
        self.head, self.boundaries = Definition(tensors, **flags), boundaries

    @torch.no_grad()
    def features(self, text: list[int]) -> Tensor:
        """[n - 1, read, hidden]."""
        states = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.stack([states[boundary][0, :-1] for boundary in self.boundaries], 1)

    @torch.no_grad()
    def drafts(self, text: list[int], k: int) -> tuple[list[int], list[float]]:
        return self.head.drafts(self.features(text), torch.tensor(text), k)


def wrong_drafts(truth: Truth, seen: list[Seen]) -> int:
    """How many of the noted drafts are not those of the truth; ties are nobody's fault."""
    wrong = 0
    for each in seen:
        if len(each.text) < 2:
            assert each.drafts == [], "there is no hidden state yet"
            continue
        wanted, margins = truth.drafts(each.text, len(each.drafts))
        for got, want, margin in zip(each.drafts, wanted, margins, strict=True):
            if got != want and margin > 1e-3:
                wrong += 1
                break
            if got != want:
                break
    return wrong


def uneven(steps: int) -> int:
    """Drafts that stop and go on."""
    return (3, 0, 2, 1, 0, 0, 3)[steps % 7]


def test_drafts_are_those_of_the_whole_text(pair: tuple[Path, Path]) -> None:
    """Rows are admitted, moved and end; drafts are paused; chunks of prompts are whole, partial and absent."""
    seen: list[Seen] = []
    engine = watched(engine_with(*pair), seen)
    given = [*prompts(4, seed=5), [7] * 65, list(range(90))]
    plain = run(engine_with(*pair), given, [14, 9, 3, 12, 7, 8], k=0)
    found = run(engine, given, [14, 9, 3, 12, 7, 8], k=uneven)
    assert texts(found) == texts(plain)
    assert len(seen) > 25
    assert wrong_drafts(Truth(*pair, BOUNDARIES), seen) == 0


def test_drafts_behind_accepted_ones(pair: tuple[Path, Path]) -> None:
    """Whatever was accepted, the head goes on from true hidden states: place by place as at the start."""
    seen: list[Seen] = []
    engine = engine_with(*pair, k=4, verification=SyntheticAcceptance(pattern=[4, 0, 2, 3, 1]))
    run(watched(engine, seen), prompts(4, seed=5), [40, 25, 33, 17], k=lambda steps: (4, 4, 0, 3)[steps % 4])
    assert len(seen) > 25
    assert wrong_drafts(Truth(*pair, BOUNDARIES), seen) == 0


def test_drafts_for_a_hybrid_are_those_of_the_whole_text(tmp_path: Path) -> None:
    """Hidden states of recurrent layers; the rows' states are those of the tokens that were accepted."""
    live = make_hybrid("qwen3_5")
    live.save_pretrained(tmp_path / "target")
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2], "layer_ids": [1, 3]}
    tensors = eagle3_tensors(target_hidden=live.config.hidden_size, vocab=live.config.vocab_size, read=2, std=0.5)
    head = write_eagle3(tmp_path / "head", tensors, vocab=live.config.vocab_size, eagle_config=ids)
    seen: list[Seen] = []
    engine = watched(engine_with(tmp_path / "target", head), seen)
    given, caps = [*prompts(3, seed=5), [7] * 65], [14, 9, 12, 7]
    plain = run(engine_with(tmp_path / "target", head), given, caps, k=0)
    assert texts(run(engine, given, caps, k=uneven)) == texts(plain)
    assert len(seen) > 10
    assert wrong_drafts(Truth(tmp_path / "target", head, [1, 3]), seen) == 0


def test_drafts_of_two_layers_and_all_flags(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = eagle3_tensors(layers=2, qk_norm=True, fc_norm=True, fc_bias=True)
    flags = {"norm_before_residual": True, "norm_output": True}
    ids = [boundary - 1 for boundary in BOUNDARIES]
    head = write_eagle3(tmp_path, tensors, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}, **flags)
    seen: list[Seen] = []
    run(watched(engine_with(pair[0], head), seen), prompts(4, seed=6), 9, k=uneven)
    assert len(seen) > 10
    truth = Truth(pair[0], head, BOUNDARIES, **flags)
    assert wrong_drafts(truth, seen) == 0


def _shifted_features(drafts: Eagle3Drafts) -> None:
    take_features = drafts.take_features

    def wrong(state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        return take_features(state, shape, features.roll(1, dims=1), rows)

    drafts.take_features = wrong  # type: ignore[method-assign]


def _shifted_positions(drafts: Eagle3Drafts) -> None:
    fed = drafts._inputs

    def wrong(state: DecodeState, shape: StepShape, j: int, positions: Tensor, known: Tensor) -> ForwardBatch:
        return fed(state, shape, j, positions + 1, known)

    drafts._inputs = wrong  # type: ignore[method-assign]


def _stale_cache(drafts: Eagle3Drafts) -> None:
    absorb = drafts.model.absorb

    def wrong(g: Tensor, rows: ForwardBatch) -> Tensor:
        in_prompt = g.shape[1] > 8  # what drafting left in steps stays
        return absorb(g, rows if in_prompt else replace(rows, write_mask=torch.zeros_like(rows.write_mask)))

    drafts.model.absorb = wrong  # type: ignore[method-assign]


def _wrong_pairing(drafts: Eagle3Drafts) -> None:
    take_features = drafts.take_features

    def wrong(state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        return take_features(state, shape, features, replace(rows, ids=state.tokens.gather(1, rows.positions)))

    drafts.take_features = wrong  # type: ignore[method-assign]


def _lost_in_plain_steps(drafts: Eagle3Drafts) -> None:
    take_features = drafts.take_features

    def wrong(state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        if features.shape[1] == 1:
            rows = replace(rows, write_mask=torch.zeros_like(rows.write_mask))
        return take_features(state, shape, features, rows)

    drafts.take_features = wrong  # type: ignore[method-assign]


def _recycles_the_first(drafts: Eagle3Drafts) -> None:
    model: Eagle3 = drafts.model
    model.feature = lambda x: x * 0 + model.weights.norm  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "plant",
    [
        _shifted_features,
        _shifted_positions,
        _stale_cache,
        _wrong_pairing,
        _lost_in_plain_steps,
        _recycles_the_first,
    ],
)
def test_a_planted_fault_is_seen_in_drafts_and_never_in_the_text(
    plant: Callable[[Eagle3Drafts], None], pair: tuple[Path, Path]
) -> None:
    seen: list[Seen] = []
    engine = engine_with(*pair)
    assert isinstance(engine.modules.proposer, Eagle3Drafts)
    plant(engine.modules.proposer)
    given = [*prompts(4, seed=5), [7] * 65]
    found = run(watched(engine, seen), given, [14, 9, 3, 12, 7], k=uneven)
    assert texts(found) == plain_texts(*pair)
    assert wrong_drafts(Truth(*pair, BOUNDARIES), seen) > 2


@cache
def plain_texts(target: Path, head: Path) -> list[list[int]]:
    given = [*prompts(4, seed=5), [7] * 65]
    return texts(run(engine_with(target, head), given, [14, 9, 3, 12, 7], k=0))


GIVEN, CAPS = prompts(10, seed=8, longest=30), [12, 20, 7, 16, 9, 14, 3, 11, 18, 5]


@pytest.fixture(scope="module")
def learnt(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A head that knows the greedy texts of the prompts, but for what it drafts further on."""
    target = pair[0]
    truth = Truth(*pair, BOUNDARIES)
    truth.head = Definition(eagle3_tensors(drafted=VOCAB, hidden=48, seed=1))
    known = []
    for prompt, text in zip(GIVEN, texts(run(engine_with(*pair, batch=8), GIVEN, CAPS, k=0)), strict=True):
        whole = [*prompt, *text]
        if len(whole) > 2:
            known.append((truth.features(whole)[:-1], torch.tensor(whole[1:-1]), torch.tensor(whole[2:])))
    learn(truth.head, known, steps=40)
    head = tmp_path_factory.mktemp("learnt")
    return target, write_speculators(head, truth.head.tensors, boundaries=BOUNDARIES)


def check_text_is_that_of_plain_decoding(engine: Engine, k: int, batch: int) -> None:
    """Rows are admitted while others run; greedy ones, and sampled ones under the rule that promises it."""
    count = 10 if batch > 1 else 3
    given, caps = GIVEN[:count], CAPS[:count]
    drafted = run(engine, given, caps, k=k)
    assert texts(drafted) == texts(run(engine, given, caps, k=0))
    assert sum(request.accepted for request in drafted) > sum(caps) // 4
    options = [replace(GREEDY_ROW, temperature=0.9, seed=seed, top_p=0.9) for seed in range(count)]
    sampled = [texts(run(engine, given, caps, k=each, options=options)) for each in (0, k)]
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize(("k", "batch"), [(1, 8), (3, 1), (5, 8), (8, 1), (15, 8)])
def test_text_is_that_without_a_head(learnt: tuple[Path, Path], k: int, batch: int) -> None:
    check_text_is_that_of_plain_decoding(engine_with(*learnt, k=k, batch=batch, verification="coupled"), k, batch)


def test_lookup_goes_before_the_head(pair: tuple[Path, Path]) -> None:
    seen: list[Seen] = []
    again = [[5, 6, 7, 8, 9] * 4, [11, 12, 13]]
    engine = watched(engine_with(*pair, proposer=NGram()), seen)
    plain = texts(run(engine_with(*pair), again, 12, k=0))
    assert texts(run(engine, again, 12, k=3)) == plain
    assert seen[0].drafts == [5, 6, 7], "the text repeats itself"
    alone = [each for each in seen if len(set(each.text)) == len(each.text) > 1]
    assert alone
    assert wrong_drafts(Truth(*pair, BOUNDARIES), alone) == 0


@pytest.mark.parametrize("sampler", [GREEDY, FULL])
def test_a_step_reads_nothing_back(sampler: str, pair: tuple[Path, Path]) -> None:
    engine = engine_with(*pair, k=5, ops=TORCH_OPS)
    start_rows(engine.state)
    with NoHostReads(), torch.inference_mode():
        for k in (0, 5):
            run_step(engine, k, sampler)
    assert engine.state.emitted[:2].min() >= 1


def test_everything_else_that_a_call_may_ask_for(pair: tuple[Path, Path]) -> None:
    """Auto, streams, log-probabilities, rows that opt out; and what the plan and `explain` say."""
    target, head = pair
    common: dict[str, Any] = {"max_batch_size": 2, "max_length": 120, "device": "cpu", "progress": False}
    given = [[5, 6, 7], [9, 8], [1, 2, 3, 4]]
    with FastSpecGenerator(target, **common) as plain:
        wanted = plain.generate(given, max_new_tokens=10)
        scores = plain.generate(given, max_new_tokens=10, logprobs=2, return_dict_in_generate=True).logprobs
        without = plain.memory_plan
    with FastSpecGenerator(target, head, num_speculative_tokens="auto", **common) as made:
        assert torch.equal(made.generate(given, max_new_tokens=10), wanted)
        mixed = made.generate(given, max_new_tokens=10, num_speculative_tokens=[3, 0, 1])
        assert torch.equal(mixed, wanted)
        assert "reads boundaries 2, 4, 5 of the target" in made.explain()
        assert "drafts 40 of 101 ids" in made.explain()
        assert "auto chooses among 0, 1, 2, 4, 6, 8, 12, 16" in made.explain()
        tried = made.calibrate(given[:1], max_new_tokens=6, eos_token_id=None)
        assert [trial.k for trial in tried.trials] == [0, 1, 2, 4, 6, 8, 12, 16]
        planned, spec = made.memory_plan, made._draft.spec  # type: ignore[union-attr]
        pages = 1 + 2 * -(-(120 + made._settings.layout.max_drafts + 1) // 64)
        assert planned.draft_cache == pages * 64 * 2 * 4 * spec.num_kv_heads * spec.head_dim
        assert planned.draft_weights > spec.weight_bytes(torch.float32)
        assert planned.buffers > without.buffers
        drafted = made.generate(given, max_new_tokens=10, logprobs=2, return_dict_in_generate=True)
        assert torch.equal(drafted.sequences, wanted)
        for got, want in zip(drafted.logprobs, scores, strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want))
        streamed: dict[int, list[int]] = {0: []}
        for emitted in made.stream([given[0]], max_new_tokens=10):
            streamed[0] += emitted[0]
        assert streamed[0] == wanted[0, 4:].tolist(), "behind the longest prompt"


def test_drafts_stay_ids_of_the_target_while_kernels_only_compile(tmp_path: Path) -> None:
    """Nothing is picked then, and the next pass reads what lies in the drafts: never ids of the head's own."""
    target = make_checkpoint(tmp_path / "target", "llama3", num_hidden_layers=LAYERS)
    head = write_speculators(tmp_path / "head", eagle3_tensors(drafted=16), boundaries=BOUNDARIES)
    engine = engine_with(target, head)
    drafts = engine.modules.proposer
    assert isinstance(drafts, Eagle3Drafts)
    drafts.model.argmax = lambda *given, **options: None  # type: ignore[method-assign]
    engine.state.draft_tokens.fill_(VOCAB - 1)
    shape = engine.shapes.typical(3, GREEDY, None)
    with torch.inference_mode():
        drafts.propose(engine.state, shape, None, features=engine.modules.features)  # type: ignore[arg-type]
    assert (engine.state.draft_tokens == VOCAB - 1).all()
