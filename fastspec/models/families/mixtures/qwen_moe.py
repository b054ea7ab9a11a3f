"""Qwen2-MoE and Qwen3-MoE: the router is a softmax over all experts. Qwen2-MoE also has a gated shared expert.

The text model of Qwen3-VL with experts is Qwen3-MoE. Its checkpoints store the experts' matrices transposed.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.mixtures.experts import counts, sparse_layers, width
from fastspec.models.families.plan import (
    ExpertsPlan,
    LayerPlan,
    ModelFamily,
    one_window,
    windows_by_layer_type,
    without_windows,
)
from fastspec.models.fields import ConfigFields
from fastspec.shapes import RoutingRule


def experts_of(fields: ConfigFields, *, normed: bool) -> ExpertsPlan:
    """Returns the plan of a layer's experts, for Qwen3-MoE and related families. For `normed` see `RoutingRule`."""
    count, chosen = counts(fields)
    return ExpertsPlan(count, width(fields, "moe_intermediate_size"), RoutingRule(chosen, normed=normed))


def with_shared_expert(fields: ConfigFields, *, normed: bool) -> ExpertsPlan:
    """Returns the result of `experts_of`, with a gated shared expert added."""
    shared = width(fields, "shared_expert_intermediate_size")
    return replace(experts_of(fields, normed=normed), shared=shared, shared_gate=True)


def _plans3(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    bias, experts = fields.flag("attention_bias"), experts_of(fields, normed=fields.flag("norm_topk_prob"))
    plan = LayerPlan(window=one_window(fields, layers), qkv_bias=bias, o_bias=bias, qk_norm="head")
    return tuple(replace(plan, experts=experts if sparse else None) for sparse in sparse_layers(fields, layers))


def _vl_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    experts = experts_of(fields, normed=True)  # this family ignores norm_topk_prob
    bias = fields.flag("attention_bias")
    plan = LayerPlan(qkv_bias=bias, o_bias=bias, qk_norm="head")
    return tuple(replace(plan, experts=experts if sparse else None) for sparse in sparse_layers(fields, layers))


def _plans2(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    experts = with_shared_expert(fields, normed=fields.flag("norm_topk_prob"))
    windows: tuple[int | None, ...] = (None,) * layers
    if fields.flag("use_sliding_window"):
        windows = windows_by_layer_type(fields, layers)
    else:
        without_windows(fields, layers)
    bias = fields.get("qkv_bias") is None or fields.flag("qkv_bias")
    return tuple(
        LayerPlan(window=window, qkv_bias=bias, experts=experts if sparse else None)
        for window, sparse in zip(windows, sparse_layers(fields, layers), strict=True)
    )


QWEN2_MOE = ModelFamily("Qwen2MoeForCausalLM", _plans2)
QWEN3_MOE = ModelFamily("Qwen3MoeForCausalLM", _plans3)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    architecture="Qwen3VLMoeForConditionalGeneration",
    plans=_vl_plans,
    text_part=True,
    transposed_experts=True,
)
