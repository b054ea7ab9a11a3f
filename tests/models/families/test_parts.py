"""Logits of every family are those of transformers, no part of a layer can be left out, and bad configs are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from fastspec.errors import UnsupportedModel
from fastspec.kernels.common.experts import ExpertWeights
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.compiled_ops import CompiledOps
from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.checkpoints.decoder_weights import load_weights
from fastspec.models.checkpoints.resolve import resolve
from fastspec.models.compiled import CompiledDecoder
from fastspec.models.config import spec_from_config
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelScales
from fastspec.models.layer_table import LayerWeights
from fastspec.shapes import ClampedGate, RoutingRule, Tiling
from tests.helpers import hybrid
from tests.helpers.families import FAMILIES, MIXTURES, VOCAB, YARN, config_of, decoder, logits_of, make_family
from tests.helpers.parts import Case, Changed, case_of, none_is_idle, turned, with_layer

TOKENS = 40  # beyond every window


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(make_family(request.param), VOCAB, TOKENS)


def test_a_live_model_gives_the_logits_of_transformers(case: Case) -> None:
    found = logits_of(decoder(case.spec, case.weights), case.ids)
    # fp32 sums in another order: some units in the last place of logits around 10
    torch.testing.assert_close(found, case.logits, rtol=2e-4, atol=2e-4)
    assert case.weights.nbytes() == case.spec.weight_bytes(torch.float32)


@pytest.mark.parametrize(
    ("family", "width"),
    [
        *(("gemma2", 100), ("gemma3", 100), ("starcoder2", 100), ("olmo2", 96)),
        *(("granite", 96), ("hunyuan", 96), ("ministral3", 96), ("cohere2", 96)),
        *(("qwen3_moe", 96), ("qwen2_moe", 96), ("olmoe", 100), ("mixtral", 100), ("glm4_moe", 96), ("gpt_oss", 100)),
    ],
)
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(family: str, width: int) -> None:
    """Of gelu also where the MLP is no multiple of the vectors that a CPU computes with."""
    checkpoint = resolve(make_family(family, intermediate_size=width), role="target")
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    model, tiling = decoder(checkpoint.spec, weights), Tiling(rows=8, queries=8)
    ids = torch.randint(VOCAB, (1, 29), generator=torch.Generator().manual_seed(2))
    logits_of(model, ids[:, :24], 0, tiling)
    together = logits_of(model, ids[:, 24:], 24, tiling)
    alone = [logits_of(model, ids[:, at : at + 1], at, tiling) for at in range(24, 29)]
    assert torch.equal(together, torch.cat(alone, dim=1))


PLAIN = LayerPlan()
COMPUTED = ("window", "attention_scale", "softcap", "qk_norm", "rope", "parallel", "activation", "residual_scale",
            "value_norm")  # fmt: skip


def changes(case: Case) -> Iterator[Changed]:
    """Every part of the model once left out, or exchanged for what Llama has there."""
    spec, weights = case.spec, case.weights
    for name in COMPUTED:
        if name == "activation" and not spec.plans[0].gated:
            continue  # a plan of its own for that is refused: see below
        if name == "rope" and any(plan.head_dim for plan in spec.plans):
            continue  # rope of another layer is for heads of another size: see test_gemma4.py
        if any(getattr(plan, name) != getattr(PLAIN, name) for plan in spec.plans):
            plans = tuple(replace(plan, **{name: getattr(PLAIN, name)}) for plan in spec.plans)
            yield name, replace(spec, plans=plans), weights
    if spec.plans[0].norm == "layer":
        yield (
            "norm",
            replace(spec, plans=tuple(replace(plan, norm="rms_fp32", norm_bias=False) for plan in spec.plans)),
            weights,
        )
    for field in dataclasses.fields(ModelScales):
        if getattr(spec.scales, field.name) != field.default:
            scales = replace(spec.scales, **{field.name: field.default})
            yield f"scale {field.name}", replace(spec, scales=scales), weights
    for name, change in expert_changes(spec.plans[1].experts):
        yield name, replace(spec, plans=tuple(with_experts(plan, change) for plan in spec.plans)), weights
    for at, rope in enumerate(spec.ropes):
        for name, other in rope_changes(rope):
            yield f"rope {at} {name}", replace(spec, ropes=(*spec.ropes[:at], other, *spec.ropes[at + 1 :])), weights
    experts = weights.layers[1].experts
    tensors = [field for field in dataclasses.fields(ExpertWeights) if field.name != "joined"]
    for field in tensors if experts is not None else ():
        if getattr(experts, field.name) is not None:
            other = replace(experts, **{field.name: flipped(getattr(experts, field.name))})
            yield field.name, spec, with_layer(weights, 1, experts=other)
    for field in dataclasses.fields(LayerWeights):
        if getattr(weights.layers[1], field.name) is not None and field.name != "experts":
            value = getattr(weights.layers[1], field.name)
            value = value - 30.0 if field.name == "sinks" else turned(value)  # sinks that weigh nothing
            yield field.name, spec, with_layer(weights, 1, **{field.name: value})
    if weights.norm_bias is not None:
        yield "norm_bias", spec, replace(weights, norm_bias=torch.zeros_like(weights.norm_bias))


def with_experts(plan: LayerPlan, change: dict[str, Any]) -> LayerPlan:
    return plan if plan.experts is None else replace(plan, experts=replace(plan.experts, **change))


def expert_changes(plan: ExpertsPlan | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is computed of a mixture, each part once without what the family has there."""
    if plan is None:
        return
    routing, plain = plan.routing, RoutingRule(plan.routing.chosen)
    for name in RoutingRule._fields:
        if name != "kept_groups" and getattr(routing, name) != getattr(plain, name):
            yield name, {"routing": routing._replace(**{name: getattr(plain, name)})}
    yield "chosen", {"routing": routing._replace(chosen=1)}
    if isinstance(gate := plan.activation, ClampedGate):
        yield "clamp", {"activation": None}
        yield "alpha", {"activation": gate._replace(alpha=1.0)}
        yield "limit", {"activation": gate._replace(limit=7.0)}


def rope_changes(rope: Any) -> Iterator[tuple[str, Any]]:
    yield "frequencies", replace(rope, inv_freq=tuple(2 * each for each in rope.inv_freq))
    if rope.scaling != 1.0:
        yield "scaling", replace(rope, scaling=1.0)
    if rope.query_beta:
        yield "query_beta", replace(rope, query_beta=0.0)


def flipped(value: Any) -> Any:
    """The last axis turned round, which the order of experts has no part in; one row is taken with the other sign."""
    if isinstance(value, Weight) and value.shape[0] == 1:
        return replace(value, data=-value.data)
    return value.flip(-1) if isinstance(value, Tensor) else replace(value, data=value.data.flip(-1))


def test_no_part_can_be_left_out(case: Case) -> None:
    others = ((name, decoder(spec, weights)) for name, spec, weights in changes(case))
    names = none_is_idle(decoder(case.spec, case.weights), case, others)
    assert len(names) >= 7
    assert set(names) >= {"qkv", "o", "gate_up", "down", "rope 0 frequencies"}
    assert case.weights.layers[1].experts is None or "router" in names


@pytest.mark.parametrize(
    "fields",
    [
        {"gated": False},
        {"parallel": True, "post_norm": True},
        {"parallel": True, "pre_norm": False},
        {"norm_bias": True},
    ],
)
def test_a_plan_that_no_decoder_computes_is_no_plan(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        LayerPlan(**fields)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."], ids=["old", "new"])
def test_of_a_model_that_reads_images_the_text_model_is_read(prefix: str, tmp_path: Path) -> None:
    text = make_family("gemma3")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config={**vision, "image_size": 28, "patch_size": 14}
    )
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    tensors = {name.replace("model.", prefix, 1): value.contiguous() for name, value in text.state_dict().items()}
    del tensors["lm_head.weight"]  # tied
    save_file({**tensors, "vision_tower.some.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match=r"1 tensor\(s\) \(vision_tower.some.weight\) not used: they are for images"):
        checkpoint = resolve(tmp_path, role="target")
    expected = resolve(text, role="target").spec
    assert checkpoint.spec == replace(expected, family="gemma3", dtype=torch.bfloat16)
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(decoder(checkpoint.spec, weights), ids), text(ids).logits)
    with pytest.raises(UnsupportedModel, match="a live Gemma3ForConditionalGeneration is not supported; save it"):
        resolve(transformers.Gemma3ForConditionalGeneration(config), role="target")


def test_every_field_of_a_plan_is_one_that_some_family_needs() -> None:
    specs = [spec_from_config(config_of(family)) for family in FAMILIES]
    specs += [spec_from_config(hybrid.config_of(kind)) for kind in ("next", *hybrid.STATES)]
    for field in dataclasses.fields(LayerPlan):
        values = {getattr(plan, field.name) for spec in specs for plan in spec.plans}
        assert len(values) > 1, field.name


@pytest.mark.parametrize(
    "family", ["gemma3", "gemma2", "hunyuan", "ministral3", "starcoder2", "cohere2", "qwen2_moe", "gpt_oss"]
)
def test_a_compiled_pass_has_the_logits_of_the_plain_one(family: str) -> None:
    """One graph: fullgraph=True raises at a break. The backend runs the traced operations one by one."""
    checkpoint = resolve(make_family(family), role="target")
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    ids = torch.arange(10, 22)[None]
    traced = decoder(checkpoint.spec, weights, CompiledDecoder, ops=CompiledOps(TORCH_OPS), backend="eager")
    found, expected = logits_of(traced, ids), logits_of(decoder(checkpoint.spec, weights), ids)
    # the same operations in the same order; experts are multiplied by pairs there, and by blocks of rows here
    bound = 2e-4 if family in MIXTURES else 0.0
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


OLD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "glm4": (
        "glm4",
        {"rope_theta": 5e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    ),
    "phi3": (
        "phi3-long",
        {
            **{"rope_theta": 1e4, "original_max_position_embeddings": 64},
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        },
        {
            **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
            **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "partial_rotary_factor": 1.0},
        },
    ),
    "hunyuan": (
        "hunyuan",
        {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
        {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4},
    ),
    "smollm3": (
        "smollm3",
        {"rope_theta": 2e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e6},
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_old_and_new_spellings_of_rope_mean_the_same(name: str) -> None:
    family, old, new = OLD[name]
    given = config_of(family).to_dict()
    del given["rope_parameters"]
    given["original_max_position_embeddings"] = 64
    kind = type(config_of(family))
    found = spec_from_config(kind.from_dict({**given, **old}))
    assert found == spec_from_config(kind.from_dict({**given, "rope_parameters": new}))
    assert found.ropes != spec_from_config(config_of(family)).ropes


def test_long_factors_are_those_of_the_room_a_generator_has() -> None:
    spec = spec_from_config(config_of("phi3-long"))
    assert spec.for_length(256) == spec
    long = spec.for_length(257).rope
    assert long.inv_freq == spec.rope.long_inv_freq != spec.rope.inv_freq
    assert spec_from_config(config_of("phi3")).for_length(512) == spec_from_config(config_of("phi3"))


def test_dynamic_frequencies_are_those_within_the_context() -> None:
    for family in ("seed_oss", "phi3"):
        config = config_of(family)
        plain = spec_from_config(config)
        config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}  # type: ignore[dict-item]
        assert spec_from_config(config) == plain


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported, wanted 'gelu_pytorch_tanh'"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
    ("gemma3", {"final_logit_softcapping": float("nan")}, "final_logit_softcapping=nan"),
    ("gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers=4 is not supported, wanted a layer with keys of"),
    ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers=6"),
    ("gemma4", {"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input=64"),
    ("gemma4", {"layer_types": ["chunked_attention"] * 6}, "layer_types='chunked_attention'"),
    ("phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2"),
    ("olmo2", {"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
    ("olmo3", {"sliding_window": 0}, "sliding_window=0"),
    ("glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
    ("glm", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, wanted 'silu'"),
    ("phi3-long", {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling=0.0"),
    ("granite", {"residual_multiplier": -1.0}, "residual_multiplier=-1.0"),
    ("granite4", {"layer_types": ["sliding_attention", "attention"]}, "layer_types='sliding_attention'"),
    ("granite4", {"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5"),
    ("ernie4_5", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("helium", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers=[1, 2]"),
    ("exaone4", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("ministral", {"layer_types": ["chunked_attention"] * 2}, "layer_types='chunked_attention'"),
    ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type='default'"),
    (
        "ministral3",
        {"rope_parameters": {**YARN, "attention_factor": "8"}},
        "wanted 12 frequencies and a positive scaling",
    ),
    (
        "seed_oss",
        {"rope_parameters": {"rope_type": "proportional", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type='proportional'",
    ),
    (
        "hunyuan",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 0.0, "rope_theta": 1e4}},
        "parameters.factor=0.0",
    ),
    ("starcoder2", {"norm_epsilon": -1.0}, "norm_epsilon=-1.0"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("cohere2", {"logit_scale": 0.0}, "logit_scale=0.0"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is not supported, wanted at most num_experts=8"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("qwen3_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size=-1"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
    ("glm4_moe", {"n_group": 3}, "n_group=3"),
    ("glm4_moe", {"topk_group": 1}, "topk_group=1 is not supported, wanted at most n_group=4, with room for"),
    ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0"),
    ("gpt_oss", {"num_local_experts": 4000}, "num_local_experts=4000"),
    ("gpt_oss", {"swiglu_limit": -7.0}, "swiglu_limit=-7.0"),
]


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED, ids=[f"{row[0]} {row[2][:30]}" for row in REFUSED])
def test_a_bad_config_is_refused_in_words(family: str, fields: dict[str, Any], message: str) -> None:
    config = config_of(family)
    for name, value in fields.items():
        setattr(config, name, value)
    if "partial_rotary_factor" in fields:
        config.rope_parameters["partial_rotary_factor"] = fields["partial_rotary_factor"]  # type: ignore[index]
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config(config)
    assert message in str(caught.value)
    assert "wanted" in str(caught.value)


def test_every_family_is_refused_something() -> None:
    assert {row[0] for row in REFUSED} >= set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("phi3", lambda model: setattr(model.train().model.layers[0].resid_mlp_dropout, "p", 0.5), "p=0.5 in training"),
        ("seed_oss", lambda model: model.train(), "dropout=0.1 in training"),
        ("gemma3", lambda model: setattr(model.model.layers[1].self_attn, "scaling", 1.0), "scaling=1.0"),
        ("granite", lambda model: setattr(model.model.layers[1], "residual_multiplier", 2.0), "multiplier=2.0"),
    ],
)
def test_a_live_model_that_was_changed_is_refused(family: str, change: Callable[[Any], object], message: str) -> None:
    model = make_family(family)
    change(model)
    with pytest.raises(UnsupportedModel, match=message):
        resolve(model, role="target")
