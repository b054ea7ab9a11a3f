"""Cohere (Command R, Cohere 2): attention and MLP in parallel, LayerNorm, interleaved rope, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.plan import LayerPlan, ModelFamily, ModelScales, windows_by_layer_type, without_windows
from fastspec.models.fields import ConfigFields


def _plan(fields: ConfigFields) -> LayerPlan:
    bias = fields.flag("attention_bias")
    return LayerPlan(qkv_bias=bias, o_bias=bias, norm="layer", parallel=True)


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    if fields.flag("use_qk_norm"):
        fields.refuse("use_qk_norm", True, "false")
    without_windows(fields, layers)
    return (_plan(fields),) * layers


def _plans2(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    """Returns the layer plans of Cohere 2. Only layers with a window have rope."""
    plan = _plan(fields)
    return tuple(
        replace(plan, window=window, rope=None if window is None else 0)
        for window in windows_by_layer_type(fields, layers)
    )


def _scales(fields: ConfigFields) -> ModelScales:
    return ModelScales(logits=fields.positive("logit_scale"))


COHERE = ModelFamily("CohereForCausalLM", _plans, scales=_scales, eps="layer_norm_eps", interleaved=True)
COHERE2 = ModelFamily("Cohere2ForCausalLM", _plans2, scales=_scales, eps="layer_norm_eps", interleaved=True)
