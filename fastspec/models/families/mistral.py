"""Mistral: no biases. If there is a sliding_window, every layer has it.

Ministral: windows in the layers named in layer_types. Ministral 3: yarn, and queries scaled by their position.
"""

from __future__ import annotations

from fastspec.models.families.plan import LayerPlan, ModelFamily, one_window, windows_by_layer_type
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    return (LayerPlan(window=one_window(fields, layers)),) * layers


def _ministral_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan(window=window) for window in windows_by_layer_type(fields, layers))


MISTRAL = ModelFamily("MistralForCausalLM", _plans)
MINISTRAL = ModelFamily("MinistralForCausalLM", _ministral_plans)
MINISTRAL3 = ModelFamily("Ministral3ForCausalLM", _plans, rope_kinds=("yarn",))
