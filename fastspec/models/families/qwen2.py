"""Qwen2: biases on q, k and v, and a window in the layers named in layer_types. MiMo has the same layers.

The text models of Qwen2-VL and 2.5-VL have these layers, too. Their rope has three positions per token, which are equal
if all tokens are text.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.plan import LayerPlan, ModelFamily, windows_by_layer_type
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan(window=window, qkv_bias=True) for window in windows_by_layer_type(fields, layers))


QWEN2 = ModelFamily("Qwen2ForCausalLM", _plans)
MIMO = replace(QWEN2, architecture="MiMoForCausalLM", read_as="qwen2")
QWEN2_VL = replace(QWEN2, architecture="Qwen2VLForConditionalGeneration", text_part=True)
QWEN2_5_VL = replace(QWEN2, architecture="Qwen2_5_VLForConditionalGeneration", text_part=True)
