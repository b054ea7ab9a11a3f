"""Qwen3-Next, Qwen3.5 and 3.6 with experts: the layers of Qwen3.5, with routed experts and a gated shared expert.

Qwen3-Next stores the projections of its recurrent layers grouped by key head. Some of its layers may be dense.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.mixtures.experts import sparse_layers
from fastspec.models.families.mixtures.qwen_moe import with_shared_expert
from fastspec.models.families.plan import LayerPlan, ModelFamily
from fastspec.models.families.qwen3 import hybrid_plans
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    experts = with_shared_expert(fields, normed=True)
    return tuple(replace(plan, experts=experts) for plan in hybrid_plans(fields, layers))


def _next_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    plans, sparse = hybrid_plans(fields, layers), sparse_layers(fields, layers)
    if fields.get("num_experts") == 0 or not any(sparse):
        return plans
    experts = with_shared_expert(fields, normed=fields.flag("norm_topk_prob"))
    return tuple(replace(plan, experts=experts if has else None) for plan, has in zip(plans, sparse, strict=True))


QWEN3_NEXT = ModelFamily(
    "Qwen3NextForCausalLM",
    _next_plans,
    {"delta": (), "delta_grouped": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")},
    rope_kinds=("default",),
    partial_rope=True,
)
QWEN3_5_MOE_TEXT = ModelFamily(
    "Qwen3_5MoeForCausalLM",
    _plans,
    inner="shared_expert_intermediate_size",
    rope_kinds=("default",),
    partial_rope=True,
)
QWEN3_5_MOE = replace(QWEN3_5_MOE_TEXT, architecture="Qwen3_5MoeForConditionalGeneration", text_part=True)
