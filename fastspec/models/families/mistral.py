"""Mistral: no biases; with a sliding_window every layer has it."""

from __future__ import annotations

from fastspec.models.families.plan import Family, LayerPlan, without_windows
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    return (LayerPlan(window=_window(fields, layers)),) * layers


def _window(fields: ConfigFields, layers: int) -> int | None:
    types = fields.layer_types(layers)
    if fields.get("sliding_window") is None:
        without_windows(fields, layers)
        return None
    window = fields.size("sliding_window")
    if types is not None and "full_attention" in types:
        fields.refuse("layer_types", "full_attention", f"'sliding_attention' here: sliding_window={window}")
    return window


MISTRAL = Family("MistralForCausalLM", _plans)
