"""Qwen2: biases on q, k and v; a window in the layers that layer_types names. MiMo has the same layers."""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.plan import LayerPlan, ModelFamily, windows_by_layer_type
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan(window=window, qkv_bias=True) for window in windows_by_layer_type(fields, layers))


QWEN2 = ModelFamily("Qwen2ForCausalLM", _plans)
MIMO = replace(QWEN2, architecture="MiMoForCausalLM", read_as="qwen2")
