"""Gemma 4: text of transformers, from files as Google writes them; every part counts; drafts change nothing."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fastspec import FastSpecGenerator
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.config import ModelSpec
from fastspec.models.decoder import Decoder
from fastspec.models.hosted.info import HostedInfo
from fastspec.models.layer_table import InputWeights
from tests.helpers.families import decoder, logits_of
from tests.helpers.gemma4 import SIZES, greedy_text, known_version, make_gemma4, write_gemma4
from tests.helpers.parts import Case, case_of, turned, with_layer

pytestmark = [
    pytest.mark.skipif(not hasattr(transformers, "Gemma4ForCausalLM"), reason=known_version()),
    pytest.mark.filterwarnings("ignore:.*not used. they are for images or sound"),
]
PROMPT = list(range(5, 40))


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "max_length": 300, "progress": False, "max_batch_size": 3, **more}


@pytest.mark.parametrize(("size", "new"), [("small", 16), ("large", 16), ("every part", 200)])
def test_text_is_that_of_transformers(size: str, new: int, tmp_path: Path) -> None:
    model = make_gemma4(size)
    path, wanted = write_gemma4(tmp_path, model), greedy_text(model, PROMPT, new)
    assert len(set(wanted)) > 5, "a text that says something"
    with FastSpecGenerator(path, **options()) as made:
        ids = made.generate([PROMPT], max_new_tokens=new, eos_token_id=None)
        assert ids[0, len(PROMPT) :].tolist() == wanted


def test_drafts_change_no_text(tmp_path: Path) -> None:
    """Of a draft that is often wrong, in a batch with admissions, greedy and coupled."""
    path = write_gemma4(tmp_path / "target", make_gemma4("small"))
    draft = write_gemma4(tmp_path / "draft", noisy(make_gemma4("small")))
    prompts = [PROMPT[:length] for length in (5, 33, 1)]
    with FastSpecGenerator(path, draft, verification="coupled", **options(max_length=120)) as made:
        for law in ({}, {"do_sample": True, "seed": 5}):
            common: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0, **law}
            wanted = made.generate(prompts, num_speculative_tokens=0, **common)
            found = made.generate(prompts, num_speculative_tokens=4, return_dict_in_generate=True, **common)
            assert torch.equal(found.sequences, wanted)
            assert 0 < found.stats.accepted < found.stats.drafted


def noisy(model: Any) -> Any:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02 * parameter.std())
    return model


@pytest.mark.parametrize("size", SIZES)
def test_files_and_a_live_model_are_one_model(size: str, tmp_path: Path) -> None:
    model = make_gemma4(size)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        spec = resolve(write_gemma4(tmp_path, model), role="target").spec
    assert isinstance(spec, ModelSpec)
    assert spec == resolve(model, role="target").spec
    assert [str(each.message).count("vision_tower") for each in said] == [1], "keys that no layer reads are no news"
    shapes = {(4, 4, 16), (4, 2, 32)} if size == "large" or size == "every part" else {(4, 4, 16), (4, 4, 32)}
    assert set(spec.attention_shapes) == shapes
    assert len(spec.attention_shapes) == (6 if size == "large" else 4)


def test_sizes_with_experts_run_by_transformers_own_module() -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    model = make_gemma4("large", **experts)
    assert isinstance(resolve(model, role="target").spec, HostedInfo)


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of(make_gemma4("every part"), 128, 24)


def test_every_part_counts(case: Case) -> None:
    """Each is once another one's, in a layer that has it: one with keys as values, one that shares keys, the inputs."""
    whole = logits_of(decoder(case.spec, case.weights), case.ids)
    torch.testing.assert_close(whole, case.logits, rtol=1e-4, atol=1e-4)  # sums of up to 96 products in fp32
    plans, changed = case.spec.plans, list[tuple[str, Any, Any]]()
    for layer, fields_of in ((4, {"shares": 1}), (5, {"rope": None}), (2, {"value_norm": False}), (4, {"window": 5})):
        other = (*plans[:layer], replace(plans[layer], **fields_of), *plans[layer + 1 :])
        changed.append((str(fields_of), replace(case.spec, plans=other), case.weights))
    for layer in (2, 4):
        for field in fields(case.weights.layers[layer]):
            value = getattr(case.weights.layers[layer], field.name)
            if value is not None:
                made = with_layer(case.weights, layer, **{field.name: turned(value)})
                changed.append((f"{layer} {field.name}", case.spec, made))
    assert case.weights.inputs is not None
    for field in fields(InputWeights):
        inputs = replace(case.weights.inputs, **{field.name: turned(getattr(case.weights.inputs, field.name))})
        changed.append((f"inputs {field.name}", case.spec, replace(case.weights, inputs=inputs)))
    assert len(changed) > 30
    for name, spec, weights in changed:
        found = logits_of(decoder(spec, weights), case.ids)
        assert (found - whole).abs().max() > 1e-2, name


def test_keys_of_a_layer_are_never_those_of_one_that_reads_them(case: Case) -> None:
    model: Decoder = decoder(case.spec, case.weights)
    logits_of(model, case.ids[:, :20])
    assert len(model.cache.others) == 1
    assert [model.cache.layer(place)[0].shape[-1] for place in range(4)] == [16, 16, 32, 16]
    assert [model._places[layer] for layer in (4, 5)] == [3, 2]
    before = [part.clone() for part in model.cache.layer(3)]
    for layer in (4, 5):  # keys made or normed by such a layer would be others
        other = with_layer(case.weights, layer, q_norm=turned(case.weights.layers[layer].q_norm))
        again = decoder(case.spec, other)
        logits_of(again, case.ids[:, :20])
        assert all(torch.equal(*pair) for pair in zip(again.cache.layer(3), before, strict=True))
