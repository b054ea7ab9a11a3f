"""Qwen3: norms on queries and keys; biases where the config asks for them; a window in the layers of layer_types."""

from __future__ import annotations

from fastspec.models.families.plan import Family, LayerPlan, windows_by_layer_type
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    bias = fields.flag("attention_bias")
    return tuple(
        LayerPlan(window=window, qkv_bias=bias, o_bias=bias, qk_norm="head")
        for window in windows_by_layer_type(fields, layers)
    )


QWEN3 = Family("Qwen3ForCausalLM", _plans)
