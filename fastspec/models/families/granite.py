"""Granite 3: Llama with factors on embedding, attention scores, and outputs of attention and MLP.

Logits are divided by a factor.

Granite 4: Granite 3 with other tensor names in its MLP, and with or without rope. Some or all of its layers may have
Mamba-2 in place of attention (4-H), and routed experts beside the MLP.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.mixtures.experts import counts, width
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelFamily, ModelScales, without_windows
from fastspec.models.families.recurrent.mamba import with_mamba
from fastspec.models.fields import ConfigFields
from fastspec.shapes import RoutingRule


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    bias = fields.flag("attention_bias")
    without_windows(fields, layers)
    plan = LayerPlan(
        attention_scale=fields.positive("attention_multiplier"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        residual_scale=fields.positive("residual_multiplier"),
    )
    return (plan,) * layers


def _plans4(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    # older versions of transformers write "attention" and "mamba"
    types = fields.layer_types(layers, "full_attention", "linear_attention", "attention", "mamba")
    if types is None:
        fields.refuse("layer_types", None, "'full_attention' or 'linear_attention' for each layer")
    experts = None
    if fields.get("num_local_experts"):
        count, chosen = counts(fields, "num_local_experts")
        shared = fields.size("shared_intermediate_size")
        experts = ExpertsPlan(count, width(fields, "intermediate_size"), RoutingRule(chosen, "logits"), shared=shared)
    bias, kind = fields.flag("attention_bias"), fields.get("position_embedding_type")
    if kind not in ("rope", "nope", None):
        fields.refuse("position_embedding_type", kind, "'rope', 'nope' or null")
    attends = LayerPlan(
        attention_scale=fields.positive("attention_multiplier"),
        qkv_bias=bias,
        o_bias=bias,
        rope=0 if kind == "rope" else None,
        residual_scale=fields.positive("residual_multiplier"),
        experts=experts,
    )
    if not {*types} & {"linear_attention", "mamba"}:
        return (attends,) * layers
    recurs = with_mamba(fields, LayerPlan(residual_scale=attends.residual_scale, experts=experts))
    return tuple(attends if kind in ("full_attention", "attention") else recurs for kind in types)


def _scales(fields: ConfigFields) -> ModelScales:
    return ModelScales(embed=fields.positive("embedding_multiplier"), logits=1.0 / fields.positive("logits_scaling"))


GRANITE = ModelFamily("GraniteForCausalLM", _plans, scales=_scales)
GRANITE4 = replace(
    GRANITE,
    architecture="GraniteMoeHybridForCausalLM",
    plans=_plans4,
    names={
        **{"gate_up": ("shared_mlp.input_linear",), "down": ("shared_mlp.output_linear",)},
        **{"shared_gate_up": ("shared_mlp.input_linear",), "shared_down": ("shared_mlp.output_linear",)},
        "experts.router": ("mlp.router",),
    },
    inner="shared_intermediate_size",
)
