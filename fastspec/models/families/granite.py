"""Granite 3: Llama with factors on embedding, scores, and outputs of attention and MLP. Logits are divided by a factor.

Granite 4 without recurrent layers (350M, 1B, Micro): the same, with other names for its MLP, and with or without rope.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.plan import LayerPlan, ModelFamily, ModelScales, without_windows
from fastspec.models.fields import ConfigFields


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
    types = fields.get("layer_types")  # older versions of transformers write "attention"
    if not isinstance(types, list | tuple) or len(types) != layers or {*types} - {"full_attention", "attention"}:
        wanted = "attention in every layer: other layers have a state that a rejected draft would overwrite"
        fields.refuse("layer_types", types, wanted)
    if fields.get("num_local_experts"):
        fields.refuse("num_local_experts", fields.get("num_local_experts"), "0: no experts beside the shared MLP")
    bias, kind = fields.flag("attention_bias"), fields.get("position_embedding_type")
    plan = LayerPlan(
        attention_scale=fields.positive("attention_multiplier"),
        qkv_bias=bias,
        o_bias=bias,
        rope=0 if kind == "rope" else None,
        residual_scale=fields.positive("residual_multiplier"),
    )
    return (plan,) * layers


def _scales(fields: ConfigFields) -> ModelScales:
    return ModelScales(embed=fields.positive("embedding_multiplier"), logits=1.0 / fields.positive("logits_scaling"))


GRANITE = ModelFamily("GraniteForCausalLM", _plans, scales=_scales)
GRANITE4 = replace(
    GRANITE,
    architecture="GraniteMoeHybridForCausalLM",
    plans=_plans4,
    names={"gate_up": ("shared_mlp.input_linear",), "down": ("shared_mlp.output_linear",)},
    inner="shared_intermediate_size",
)
