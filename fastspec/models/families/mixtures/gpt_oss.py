"""gpt-oss: attention sinks, a sliding window in every second layer, experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.mixtures.experts import counts, width
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelFamily, windows_by_layer_type
from fastspec.models.fields import ConfigFields
from fastspec.shapes import ClampedGate, RoutingRule

ALPHA, LIMIT = 1.702, 7.0  # constants of the gate if a config omits them, as in transformers' GptOssExperts


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    count, chosen = counts(fields, "num_local_experts")
    gate = ClampedGate(
        fields.optional_positive("swiglu_alpha") or ALPHA, fields.optional_positive("swiglu_limit") or LIMIT
    )
    routing = RoutingRule(chosen, "logits")
    experts = ExpertsPlan(
        count, width(fields, "intermediate_size"), routing, activation=gate, router_bias=True, bias=True
    )
    bias = fields.flag("attention_bias")
    plan = LayerPlan(qkv_bias=bias, o_bias=bias, norm="rms_fp32", sinks=True, experts=experts)
    return tuple(replace(plan, window=window) for window in windows_by_layer_type(fields, layers))


GPT_OSS = ModelFamily("GptOssForCausalLM", _plans, {"experts.router": ("mlp.router",)})
