"""The spec says what the transformers model does, and refuses by name what the decoder cannot do."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import transformers

from fastspec.errors import UnsupportedModel
from fastspec.models.config import ModelSpec, spec_from_config
from tests.helpers.checkpoints import FAMILIES, make_model

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def spec_of(kind: str = "Llama", **fields: Any) -> ModelSpec:
    return spec_from_config(getattr(transformers, f"{kind}Config")(**{**SIZES, **fields}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_its_transformers_model(family: str) -> None:
    model = make_model(family)
    spec = spec_from_config(model.config)
    state = model.state_dict()
    attention = model.model.layers[0].self_attn
    assert type(model).__name__.lower().startswith(spec.family)
    assert state["model.layers.0.self_attn.q_proj.weight"].shape[0] == spec.num_heads * spec.head_dim
    assert state["model.layers.0.self_attn.k_proj.weight"].shape[0] == spec.num_kv_heads * spec.head_dim
    assert spec.qkv_bias == ("model.layers.0.self_attn.q_proj.bias" in state)
    assert spec.o_bias == ("model.layers.0.self_attn.o_proj.bias" in state)
    assert spec.mlp_bias == ("model.layers.0.mlp.up_proj.bias" in state)
    assert spec.qk_norm == hasattr(attention, "q_norm")
    assert spec.tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert torch.equal(torch.tensor(spec.rope.inv_freq, dtype=torch.float32), model.model.rotary_emb.inv_freq)
    assert spec.rope.scaling == model.model.rotary_emb.attention_scaling
    assert len(spec.windows) == spec.num_layers == len(model.model.layers)
    assert spec.rms_eps == model.model.norm.variance_epsilon


def test_the_helper_covers_both_kinds_of_each_feature() -> None:
    specs = [spec_from_config(make_model(family).config) for family in FAMILIES]
    assert {spec.tied for spec in specs} == {True, False}
    assert {spec.rope.kind for spec in specs} == {"default", "llama3"}
    assert any(spec.num_kv_heads == 1 for spec in specs)
    assert any(1 < spec.num_kv_heads < spec.num_heads for spec in specs)
    assert any(spec.num_kv_heads == spec.num_heads for spec in specs)
    assert any(spec.head_dim * spec.num_heads != spec.hidden_size for spec in specs)
    assert {spec.family for spec in specs} == {"llama", "mistral", "qwen2", "qwen3"}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("family", ["llama2", "qwen3"])
def test_attention_bias_is_on_all_four_projections(family: str, bias: bool) -> None:
    model = make_model(family, attention_bias=bias)
    spec = spec_from_config(model.config)
    assert (spec.qkv_bias, spec.o_bias) == (bias, bias)
    assert ("model.layers.0.self_attn.o_proj.bias" in model.state_dict()) == bias


def test_mlp_bias_of_llama() -> None:
    assert spec_of(mlp_bias=True).mlp_bias
    assert not spec_of("Qwen2", mlp_bias=True).mlp_bias, "Qwen2 of transformers has no such setting"


def test_old_and_new_rope_spellings_mean_the_same() -> None:
    old = spec_of(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = spec_of(rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    assert old == new
    assert old.rope.kind == "llama3"
    assert old.rope != spec_of(rope_theta=500000.0).rope
    assert spec_of(rope_theta=500000.0).rope != spec_of(rope_theta=10000.0).rope


ROPE_NULLS = ["partial_rotary_factor", "factor", "attention_factor", "beta_fast", "mscale", "rope_type", "alpha"]


@pytest.mark.parametrize("field", ROPE_NULLS)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_a_rope_setting_that_is_null_counts_as_absent(kind: str, field: str) -> None:
    absent = {"rope_theta": 500000.0, "rope_type": "default"}
    assert spec_of(kind, rope_parameters={**absent, field: None}) == spec_of(kind, rope_parameters=absent)
    if field not in LLAMA3 and field != "partial_rotary_factor":  # with which transformers fails, too
        scaled = {**LLAMA3, "rope_theta": 500000.0}
        assert spec_of("Llama", rope_parameters={**scaled, field: None}) == spec_of("Llama", rope_parameters=scaled)


def test_llama3_factor_changes_the_low_frequencies_only() -> None:
    plain = spec_of(rope_theta=500000.0).rope.inv_freq
    scaled = spec_of(rope_theta=500000.0, rope_scaling=LLAMA3).rope.inv_freq
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8.0)


def test_windows_of_mistral() -> None:
    assert spec_of("Mistral", sliding_window=8).windows == (8, 8, 8)
    assert spec_of("Mistral", sliding_window=None).windows == (None, None, None)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_windows_of_qwen_follow_layer_types(kind: str) -> None:
    assert spec_of(kind, sliding_window=8).windows == (None, None, None), "use_sliding_window is off by default"
    some = spec_of(kind, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert some.windows == (None, 8, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert spec_of(kind, use_sliding_window=True, sliding_window=5, layer_types=types).windows == (5, None, 5)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_windows_agree_with_the_attention_modules(family: str) -> None:
    layers = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    model = make_model(family, **layers)
    seen = [getattr(layer.self_attn, "sliding_window", model.config.sliding_window) for layer in model.model.layers]
    assert spec_from_config(model.config).windows == tuple(seen)


def test_llama_ignores_a_window_as_transformers_does() -> None:
    assert spec_of(sliding_window=8).windows == (None, None, None)


def test_kv_heads_and_head_dim_fall_back() -> None:
    spec = spec_of("Qwen2", num_key_value_heads=None)
    assert (spec.num_kv_heads, spec.head_dim) == (4, 16)


@pytest.mark.parametrize("head_dim", [2, 8, 80, 512])
def test_head_dims_that_are_accepted(head_dim: int) -> None:
    assert spec_of(head_dim=head_dim).head_dim == head_dim


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32), (None, torch.float32)],
    ids=str,
)
def test_the_dtype_of_a_config_in_all_spellings(stored: Any, wanted: torch.dtype) -> None:
    assert spec_of(dtype=stored).dtype is wanted


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Gemma", {}, "model_type='gemma'"),
    ("Phimoe", {}, "model_type='phimoe'"),
    ("Mamba", {}, "model_type='mamba'"),
    ("Llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures=['LlamaForSequence"),
    ("Llama", {"architectures": ["LlamaModel"]}, "architectures=['LlamaModel']"),
    ("Llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("Llama", {"head_dim": 3}, "head_dim=3"),
    ("Llama", {"head_dim": 514}, "head_dim=514"),
    ("Llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("Llama", {"vocab_size": 2**25}, "vocab_size=33554432"),
    ("Llama", {"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    ("Llama", {"rms_norm_eps": 0.0}, "rms_norm_eps=0.0"),
    ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ("Llama", {"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope_parameters.factor=0.0"),
    ("Llama", {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_type='proportional'"),
    ("Qwen2", {"rope_scaling": {"type": "yarn", "factor": 0.0}}, "rope_parameters.factor=0.0"),
    ("Llama", {"rope_theta": -1.0}, "rope_theta=-1.0"),
    ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("Llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor=4.0"),
    ("Llama", {"rope_scaling": {**LLAMA3, "factor": 0.0}}, "rope_parameters.factor=0.0"),
    ("Qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types='linear_attention'"),
    ("Llama", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types='sliding_attention'"),
    ("Qwen2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types='sliding_attention'"),
    ("Mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, "layer_types='full_attention'"),
    ("Mistral", {"sliding_window": 0}, "sliding_window=0"),
    ("Llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ("Llama", {"per_layer_config": {0: {"intermediate_size": 32}}}, "per_layer_config"),
    ("Llama", {"dtype": "float64"}, "dtype=torch.float64"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_is_refused_is_named_and_the_supported_is_listed(kind: str, fields: dict[str, Any], message: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**({**SIZES, **fields} if kind != "Mamba" else {}))
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config(config)
    assert message in str(caught.value)
    for part in ("llama, ", "qwen3, ", "llama3", "silu", "bfloat16", "docs/models.md"):
        assert part in str(caught.value)


def test_a_refusal_is_the_settings_doing() -> None:
    """Control for the refusals: each of their configs, without the refused field, is accepted."""
    for kind in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        assert spec_of(kind).num_layers == 3


def test_the_spec_is_frozen_and_the_config_untouched() -> None:
    config = transformers.LlamaConfig(**SIZES, rope_scaling=LLAMA3)
    before = copy.deepcopy(config.to_dict())
    spec = spec_from_config(config)
    assert config.to_dict() == before
    with pytest.raises(FrozenInstanceError):
        spec.vocab_size = 1  # type: ignore[misc]
    assert hash(spec) == hash(spec_from_config(config))
