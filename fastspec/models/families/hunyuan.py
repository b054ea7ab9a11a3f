"""Hunyuan dense: queries and keys are normed after rope. A config with `alpha` increases the base of rope."""

from __future__ import annotations

from fastspec.models.families.plan import LayerPlan, ModelFamily, without_windows
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    bias = fields.flag("attention_bias")
    without_windows(fields, layers)
    return (LayerPlan(qkv_bias=bias, o_bias=bias, qk_norm="head_after_rope"),) * layers


HUNYUAN = ModelFamily(
    "HunYuanDenseV1ForCausalLM",
    _plans,
    {"q_norm": ("self_attn.query_layernorm",), "k_norm": ("self_attn.key_layernorm",)},
    rope_kinds=("default", "ntk_alpha"),
)
