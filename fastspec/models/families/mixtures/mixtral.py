"""Mixtral: Mistral with experts in every layer. The factors of a token's experts sum to 1."""

from __future__ import annotations

from fastspec.models.families.mixtures.experts import counts, width
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelFamily, one_window
from fastspec.models.fields import ConfigFields
from fastspec.shapes import RoutingRule


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    count, chosen = counts(fields, "num_local_experts")
    experts = ExpertsPlan(count, width(fields, "intermediate_size"), RoutingRule(chosen, normed=True))
    return (LayerPlan(window=one_window(fields, layers), experts=experts),) * layers


MIXTRAL = ModelFamily("MixtralForCausalLM", _plans)
