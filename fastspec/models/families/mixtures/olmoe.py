"""OLMoE: Llama with experts in every layer, one norm over all query heads, and one over all KV heads."""

from __future__ import annotations

from fastspec.models.families.mixtures.experts import counts, width
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelFamily, one_window
from fastspec.models.fields import ConfigFields
from fastspec.shapes import RoutingRule


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    if fields.get("clip_qkv") is not None:
        fields.refuse("clip_qkv", fields.get("clip_qkv"), "null: queries, keys and values are not clipped")
    count, chosen = counts(fields)
    routing = RoutingRule(chosen, normed=fields.flag("norm_topk_prob"))
    experts = ExpertsPlan(count, width(fields, "intermediate_size"), routing)
    bias, window = fields.flag("attention_bias"), one_window(fields, layers)
    return (LayerPlan(window=window, qkv_bias=bias, o_bias=bias, qk_norm="projection", experts=experts),) * layers


OLMOE = ModelFamily("OlmoeForCausalLM", _plans)
