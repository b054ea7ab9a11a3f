"""Hybrid models, dense and with experts: logits are transformers', no part can be left out, bad configs are refused."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastspec.config import Config
from fastspec.engine.build import build
from fastspec.engine.settings import settings_of
from fastspec.errors import UnsupportedModel
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.config import spec_from_config
from fastspec.models.families.plan import LayerPlan
from fastspec.models.layer_table import LayerWeights
from fastspec.models.vocab import SharedVocab
from fastspec.shapes import DeltaRule, Tiling
from tests.helpers.hybrid import KINDS, VOCAB, config_of, decoder, logits_of, make_hybrid, save_published
from tests.helpers.parts import Case, Changed, case_of, none_is_idle, turned, with_layer
from tests.helpers.quantised import fp8_blocks, write

TOKENS = 40
LAYER, ATTENDS = 1, 3  # a recurrent layer, and the one that attends


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(make_hybrid(request.param), VOCAB, TOKENS)


def test_a_live_model_gives_the_logits_of_transformers(case: Case) -> None:
    found = logits_of(decoder(case.spec, case.weights), case.ids)
    # fp32 sums in another order, and chunks of tokens there: some units in the last place of logits around 10
    torch.testing.assert_close(found, case.logits, rtol=2e-4, atol=2e-4)
    assert case.weights.nbytes() == case.spec.weight_bytes(torch.float32)
    assert [plan.state is None for plan in case.spec.plans] == [False, False, False, True]
    assert case.spec.attention_shapes == ((4, 2, 32),)


def test_a_prompt_and_steps_are_one_pass(case: Case) -> None:
    model, tiling = decoder(case.spec, case.weights), Tiling(rows=8, queries=8)
    whole = logits_of(decoder(case.spec, case.weights), case.ids, 0, tiling)
    pieces = [logits_of(model, case.ids[:, :20], 0, tiling)]
    pieces += [logits_of(model, case.ids[:, at : at + 4], at, tiling) for at in range(20, TOKENS, 4)]
    assert torch.equal(torch.cat(pieces, dim=1), whole)


def test_bits_of_a_row_do_not_depend_on_what_runs_beside_it(case: Case) -> None:
    """In a step of five tokens of three rows, of one, and token by token; heads and values are no multiples of 8."""
    tiling = Tiling(rows=8, queries=8)
    ids = torch.randint(VOCAB, (3, 29), generator=torch.Generator().manual_seed(2))
    model, apart = (decoder(case.spec, case.weights, rows=3) for _ in range(2))
    for each in (model, apart):
        logits_of(each, ids[:, :24], 0, tiling)
    together = logits_of(model, ids[:, 24:], 24, tiling)
    steps = [logits_of(apart, ids[:, at : at + 1], at, tiling) for at in range(24, 29)]
    assert torch.equal(together, torch.cat(steps, dim=1))
    for row in range(3):
        alone = decoder(case.spec, case.weights)
        logits_of(alone, ids[row : row + 1, :24], 0, tiling)
        assert torch.equal(logits_of(alone, ids[row : row + 1, 24:], 24, tiling)[0], together[row])


def changes(case: Case) -> Iterator[Changed]:
    """Every part of the model once left out, or turned around."""
    spec, weights = case.spec, case.weights
    for name in ("qk_norm", "rope"):
        plans = tuple(replace(plan, **{name: None}) for plan in spec.plans)
        yield name, replace(spec, plans=plans), weights
    yield (
        "rope of the whole head",
        replace(spec, ropes=(replace(spec.rope, inv_freq=spec.rope.inv_freq * 4),)),
        weights,
    )
    for at in (LAYER, ATTENDS):
        layer = weights.layers[at]
        for field in dataclasses.fields(LayerWeights):
            value = getattr(layer, field.name)
            if value is not None and field.name not in ("state", "experts"):
                yield f"{field.name} {at}", spec, with_layer(weights, at, **{field.name: turned(value)})
    delta = weights.layers[LAYER].state
    assert delta is not None
    for field in (each for each in dataclasses.fields(delta) if getattr(delta, each.name) is not None):
        other = replace(delta, **{field.name: turned(getattr(delta, field.name))})
        yield f"delta.{field.name}", spec, with_layer(weights, LAYER, state=other)
    rule = spec.state_rules[0]
    assert isinstance(rule, DeltaRule)
    parts = {"q": rule.keys, "k": rule.keys, "v": rule.values, "z": rule.values, "b": 4, "a": 4}
    yield from pieces(case, LAYER, parts)
    yield from pieces(case, ATTENDS, {"query": 128, "key": 64, "value": 64, "gate": 128})


def pieces(case: Case, at: int, parts: dict[str, int]) -> Iterator[Changed]:
    """Rows of one part of a fused matrix, turned around."""
    held, start = case.weights.layers[at].qkv, 0
    for name, rows in parts.items():
        data = held.data.clone()
        data[start : start + rows] = data[start : start + rows].flip(0)
        yield name, case.spec, with_layer(case.weights, at, qkv=replace(held, data=data))
        start += rows
    assert start == held.shape[0]


def test_no_part_can_be_left_out(case: Case) -> None:
    others = ((name, decoder(spec, weights)) for name, spec, weights in changes(case))
    names = none_is_idle(decoder(case.spec, case.weights), case, others)
    assert len(names) == len(set(names)) == 31


def test_what_is_published_beside_the_text_model_is_left_out_with_a_word(tmp_path: Path) -> None:
    directory = save_published(make_hybrid("qwen3_5"), tmp_path)
    with pytest.warns(UserWarning, match="not used") as said:
        checkpoint = resolve(directory, role="target")
    told = " ".join(str(each.message) for each in said)
    assert "visual.blocks.0.norm1.weight) not used: they are for images" in told
    assert "mtp" not in told, "which may draft: `explain` says so"
    assert checkpoint.mtp
    assert checkpoint.native.family == "qwen3_5"
    assert replace(checkpoint.native, family="qwen3_5_text") == spec_from_config(config_of("qwen3_5"))


@pytest.mark.parametrize("kind", ["qwen3_5", "next"])
def test_projections_that_alone_are_not_quantised_lie_apart(kind: str, tmp_path: Path) -> None:
    """As FP8 checkpoints are published; of a layer whose projections are quantised alike they are one matrix."""
    source = tmp_path / "plain"
    make_hybrid(kind, **({"num_experts": 0} if kind == "next" else {})).save_pretrained(source)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    device, ids = torch.device("cpu"), torch.randint(VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))
    for keep, apart in (("in_proj_b", "in_proj_a"), True), ((), False):
        path = tmp_path / f"fp8 {apart}"
        meant = write(source, path, settings, fp8_blocks, keep=keep)
        plain = tmp_path / f"meant {apart}"
        shutil.copytree(source, plain)
        save_file(meant, plain / "model.safetensors", {"format": "pt"})
        found, wanted = (
            load_weights(resolve(each, role="target"), dtype=torch.float32, device=device, progress=False)
            for each in (path, plain)
        )
        delta = found.layers[LAYER].state
        assert delta is not None
        assert (delta.gates is not None) == apart
        spec = resolve(path, role="target").native
        # products of another number of rows
        torch.testing.assert_close(
            logits_of(decoder(spec, found), ids), logits_of(decoder(spec, wanted), ids), rtol=1e-4, atol=1e-4
        )


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("next", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 is not supported, wanted at most num_experts=6"),
    ("qwen3_5_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
    ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, "layer_types='sliding_attention'"),
    ("qwen3_5", {"linear_num_key_heads": 3}, "linear_num_key_heads=3"),
    ("qwen3_5", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0"),
    ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED, ids=[row[2][:30] for row in REFUSED])
def test_a_bad_config_is_refused_in_words(kind: str, fields: dict[str, Any], message: str) -> None:
    config = config_of(kind)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match="wanted") as caught:
        spec_from_config(config)
    assert message in str(caught.value)


def test_layers_without_experts_need_none() -> None:
    for dense in ({"mlp_only_layers": [0, 1, 2, 3]}, {"decoder_sparse_step": 5}, {"num_experts": 0}):
        assert not any(plan.experts for plan in spec_from_config(config_of("next", **dense)).plans)
    assert [plan.experts is None for plan in spec_from_config(config_of("next")).plans] == [False, True, False, False]


def test_a_layer_with_an_output_gate_and_a_fused_tail_is_no_plan() -> None:
    with pytest.raises(ValueError, match="wanted norm='rms_plus_one'"):
        LayerPlan(output_gate=True)


def test_the_memory_plan_has_the_states(case: Case) -> None:
    checkpoint = resolve(case.model, role="target")
    config = Config(num_speculative_tokens=3, max_batch_size=2, max_length=64, device="cpu", progress=False)
    settings = settings_of(checkpoint, checkpoint, config)
    engine, pending = build(settings, checkpoint, checkpoint, shared_vocab=SharedVocab(VOCAB))
    for each in pending:
        each.cancel()
    proposer: Any = engine.modules.proposer
    for model, planned in ((engine.modules.target, "target_cache"), (proposer.model, "draft_cache")):
        cache = model.cache  # type: ignore[union-attr]
        assert cache.states is not None
        assert cache.states.kept is not None
        kept = cache.states.kept.rows
        held = (cache.keys, cache.values, cache.states.states, cache.states.inputs, kept.states, kept.inputs)
        assert sum(each.nbytes for each in held) == getattr(settings.memory, planned)
    without = settings_of(checkpoint, checkpoint, replace(config, prefix_cache=False))
    assert without.layout.kept_states == 0
