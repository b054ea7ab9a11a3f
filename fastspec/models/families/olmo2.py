"""OLMo 2 and 3: norms after attention and MLP, none before. One norm is over all query heads, one over all KV heads."""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.plan import LayerPlan, ModelFamily, windows_by_layer_type, without_windows
from fastspec.models.fields import ConfigFields


def _plan(fields: ConfigFields) -> LayerPlan:
    bias = fields.flag("attention_bias")
    return LayerPlan(qkv_bias=bias, o_bias=bias, qk_norm="projection", norm="rms_fp32", pre_norm=False, post_norm=True)


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    without_windows(fields, layers)
    return (_plan(fields),) * layers


def _plans3(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    """Returns the layer plans of OLMo 3. Layers with a window have another rope than layers without one."""
    plan = _plan(fields)
    return tuple(
        replace(plan, window=window, rope=0 if window is None else 1)
        for window in windows_by_layer_type(fields, layers)
    )


OLMO2 = ModelFamily("Olmo2ForCausalLM", _plans)
OLMO3 = ModelFamily("Olmo3ForCausalLM", _plans3, rope_layers=("full_attention", "sliding_attention"))
