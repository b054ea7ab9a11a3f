"""Planted pairs: their agreement follows the knob, in every family, and every engine gets the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastspec import FastSpecGenerator
from fastspec.output import GenerateOutput
from perf import __main__ as cli
from perf import peers
from perf.pairs import SUCCESSORS, Language, PlantedPair, plant
from perf.peers import Setting, transformers_peers
from perf.workloads import WORKLOADS

TINY = WORKLOADS["tiny"]
PROMPT, NEW = 24, 40
LEVELS = (0.5, 0.78, 0.9)
# The agreement planted is measured on 480 places of other text, and tested on 480 more: both are off by up to
# 2 * sqrt(0.25 / 480) = 0.05, and greedy text visits other tokens than drawn text does.
TOLERANCE = 0.12


@pytest.fixture(scope="module")
def pairs() -> dict[float, PlantedPair]:
    return {level: plant(TINY, acceptance=level) for level in LEVELS}


def greedy(pair: PlantedPair, rows: int = 12) -> Tensor:
    prompts = torch.tensor(pair.prompts(rows, PROMPT))
    found: Tensor = pair.target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW)
    return found


def agreement(pair: PlantedPair, text: Tensor) -> float:
    with torch.no_grad():
        picks = [model(text).logits[:, PROMPT - 1 : -1].argmax(-1) for model in (pair.target, pair.draft)]
    return float((picks[0] == picks[1]).float().mean())


def overlap(pair: PlantedPair, text: Tensor) -> float:
    """Acceptance of sampled drafts: the mass that both laws share."""
    with torch.no_grad():
        laws = [model(text).logits[:, PROMPT - 1 : -1].softmax(-1) for model in (pair.target, pair.draft)]
    return float(torch.minimum(*laws).sum(-1).mean())


def test_acceptance_follows_the_knob(pairs: dict[float, PlantedPair]) -> None:
    texts = {level: greedy(pair) for level, pair in pairs.items()}
    found = [agreement(pairs[level], texts[level]) for level in LEVELS]
    assert found == sorted(found)
    assert found == pytest.approx(list(LEVELS), abs=TOLERANCE)
    shared = [overlap(pairs[level], texts[level]) for level in LEVELS]
    assert shared == sorted(shared)
    assert 0.4 < shared[0] < shared[-1] < 0.98


@pytest.mark.filterwarnings("ignore:the tokenizers:UserWarning")
def test_the_generator_accepts_as_many_first_drafts(pairs: dict[float, PlantedPair]) -> None:
    pair = pairs[0.78]
    with FastSpecGenerator(pair.target, pair.draft, max_length=PROMPT + NEW, progress=False) as generator:
        output = generator.generate(pair.prompts(8, PROMPT), max_new_tokens=NEW, return_dict_in_generate=True)
        assert isinstance(output, GenerateOutput)
        assert output.stats.accepted_per_position is not None
        assert output.stats.accepted_per_position[0] == pytest.approx(0.78, abs=TOLERANCE)
        assert torch.equal(output.sequences, greedy(pair, 8))


def test_text_is_no_loop_and_follows_the_plan(pairs: dict[float, PlantedPair]) -> None:
    pair = pairs[0.78]
    text = greedy(pair)[:, PROMPT - 1 :]
    grams = [tuple(row[start : start + 8]) for row in text.tolist() for start in range(NEW - 7)]
    assert len(set(grams)) > 0.75 * len(grams)  # 2048 ids: prompts do meet
    planned = (pair.language.successors[:, text[:, :-1]] == text[:, 1:]).any(0)
    assert planned.float().mean() > 0.95
    best = pair.language.successors.gather(0, pair.language.gaps.argmax(0, keepdim=True))[0]
    assert (best[text[:, :-1]] != text[:, 1:]).float().mean() > 0.1  # and contexts matter


def test_contexts_decide_among_successors(pairs: dict[float, PlantedPair]) -> None:
    pair = pairs[0.5]
    text = torch.tensor(pair.prompts(16, PROMPT))
    same_end = text.clone()
    same_end[:, -1] = text[0, -1]
    with torch.no_grad():
        picks = pair.target(same_end).logits[:, -1].argmax(-1)
    assert len(set(picks.tolist())) > 1


def test_the_language_has_no_loops_of_one_and_no_doubles() -> None:
    language = Language.draw(50, seed=3)
    ids = torch.arange(50)
    assert not (language.successors == ids).any()
    for table in (language.successors, language.predecessors):
        assert [sorted(row) for row in table.tolist()] == [ids.tolist()] * SUCCESSORS
        assert all(len(set(column)) == SUCCESSORS for column in table.T.tolist())
    assert torch.equal(language.predecessors.gather(1, language.successors), ids.expand(SUCCESSORS, -1))
    assert bool((language.gaps <= 0).all())
    assert torch.equal(language.gaps.amax(0), torch.zeros(50))
    again = Language.draw(50, seed=3)
    assert torch.equal(again.successors, language.successors)


def test_the_seed_decides_the_weights(pairs: dict[float, PlantedPair]) -> None:
    first, again, other = pairs[0.78], plant(TINY), plant(TINY, seed=1)
    mine, same = first.target.state_dict(), again.target.state_dict()
    assert all(torch.equal(mine[name], same[name]) for name in mine)
    assert again.report["spread"] == first.report["spread"]
    assert not torch.equal(mine["lm_head.weight"], other.target.state_dict()["lm_head.weight"])


FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "qwen2": lambda fields: {**fields, "model_type": "qwen2", "vocab_size": fields["vocab_size"] + 64},
    "qwen3": lambda fields: {**fields, "model_type": "qwen3", "head_dim": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_reach_the_same_agreement(family: str) -> None:
    change = FAMILIES[family]
    pair = plant(replace(TINY, target=change(dict(TINY.target)), draft=dict(TINY.draft)))
    assert pair.target.config.model_type == family
    assert pair.report["agreement"] == pytest.approx(0.78, abs=0.03)
    assert agreement(pair, greedy(pair)) == pytest.approx(0.78, abs=TOLERANCE)


def test_no_weight_is_zero_or_neutral(pairs: dict[float, PlantedPair]) -> None:
    for model in (pairs[0.78].target, pairs[0.78].draft):
        for name, weight in model.named_parameters():
            assert float((weight == 0).float().mean()) < 0.01, name
            assert float(weight.float().std()) > 0, name
            assert bool(weight.isfinite().all()), name


def test_saved_shards_give_the_live_models_logits(pairs: dict[float, PlantedPair], tmp_path: Path) -> None:
    pair = pairs[0.78]
    places = pair.save(tmp_path, max_shard_size="5MB")
    assert len(list(places[0].glob("*.safetensors"))) > 1
    ids = torch.tensor(pair.prompts(1, 8))
    for live, place in zip((pair.target, pair.draft), places, strict=True):
        read = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        with torch.no_grad():
            assert torch.equal(read(ids).logits, live(ids).logits)
        assert read.generation_config.eos_token_id is None


def test_what_cannot_be_planted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wanted 0\.3 to 0\.98"):
        plant(TINY, acceptance=0.99)
    with pytest.raises(ValueError, match="less than twice"):
        plant(replace(TINY, target={**TINY.target, "intermediate_size": 512}))
    with pytest.raises(ValueError, match="out of reach"):
        plant(replace(TINY, draft={**TINY.draft, "hidden_size": 32, "head_dim": 8}), acceptance=0.95)


def test_the_pair_command_writes_checkpoints(tmp_path: Path) -> None:
    (row,) = cli.main(["pair", "--workload", "tiny", "--to", str(tmp_path), "--device", "cpu"])
    assert row["agreement"] == pytest.approx(0.78, abs=0.03)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "draft").config.hidden_size == TINY.draft["hidden_size"]


def test_assisted_generation_gives_the_plain_text_in_fewer_passes(pairs: dict[float, PlantedPair]) -> None:
    pair = pairs[0.78]
    setting = Setting([[prompt] for prompt in pair.prompts(2, PROMPT)], NEW, k=3)
    rows, calls = transformers_peers(pair.target, pair.draft, setting)
    plain, static, assisted = calls.values()
    assert [call.text for call in assisted] == [call.text for call in plain] == [call.text for call in static]
    assert [row["tokens_per_pass"] for row in rows[:2]] == [1, 1]
    assert 2 < rows[2]["tokens_per_pass"] <= 4
    assert rows[2]["k"] == 3
    assert all(call.first is not None and 0 < call.first < call.seconds for call in plain)


def test_an_engine_that_breaks_keeps_its_row(pairs: dict[float, PlantedPair], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs[0.78]
    whole = peers.transformers_call

    def breaks(*given: Any, **options: Any) -> Any:
        if "cache_implementation" in options:
            raise RuntimeError("at /some/where/else")
        return whole(*given, **options)

    monkeypatch.setattr(peers, "transformers_call", breaks)
    said: list[str] = []
    setting = Setting([pair.prompts(1, PROMPT)], 4, k=2)
    rows, calls = transformers_peers(pair.target, pair.draft, setting, say=said.append)
    assert [row["status"] for row in rows] == ["ok", "failed: RuntimeError", "ok"]
    assert len(calls) == 2
    assert any("at /some/where/else" in line for line in said)


def test_sampled_peers_repeat_with_their_seed(pairs: dict[float, PlantedPair]) -> None:
    pair = pairs[0.78]
    setting = Setting([pair.prompts(1, PROMPT)], 12, k=0, sampled=True)
    calls = [peers.transformers_call(pair.target, setting.batches[0], setting) for _ in range(2)]
    assert calls[0].text == calls[1].text
    rows, _ = transformers_peers(pair.target, None, setting, engines=("assisted",))
    assert rows == [{"engine": "transformers assisted", "k": 0, "status": "needs a draft and k > 0"}]


class FakeEngine:
    """Stands for vLLM's and SGLang's engines: remembers what it was made with, and answers with zeros."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        FakeEngine.made.append(options)

    def generate(self, prompts: Any = None, params: Any = None, *, input_ids: Any = None, **options: Any) -> Any:
        if input_ids is not None:
            return [{"output_ids": [0] * options["sampling_params"]["max_new_tokens"]} for _ in input_ids]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * params.max_tokens)]) for _ in prompts]

    def shutdown(self) -> None:
        FakeEngine.made.append({"closed": True})


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_external_engines_run_plain_and_with_the_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(LLM=FakeEngine, Engine=FakeEngine, SamplingParams=SimpleNamespace, __version__="0")
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: fake)
    monkeypatch.setattr(FakeEngine, "made", [])
    setting = Setting([[[1, 2]], [[3, 4]]], 5, k=3)
    rows = peers.external_peers([name], Path("t"), Path("d"), setting)
    assert [(row["engine"], row["k"], row["new_tokens"]) for row in rows] == [
        (f"{name} plain", 0, 10),
        (f"{name} draft model", 3, 10),
    ]
    plain, speculative = (made for made in FakeEngine.made if "closed" not in made)
    assert "d" not in plain.values()
    assert speculative.get("speculative_config", speculative).items() >= (
        {"method": "draft_model", "model": "d", "num_speculative_tokens": 3}.items()
        if name == "vllm"
        else {"speculative_draft_model_path": "d", "speculative_num_steps": 3}.items()
    )
    (row,) = peers.external_peers([name], None, None, setting)
    assert "needs checkpoints" in row["status"]
