"""Granite 3: Llama with factors on embedding, scores and what each part adds; logits are divided."""

from __future__ import annotations

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


def _scales(fields: ConfigFields) -> ModelScales:
    return ModelScales(embed=fields.positive("embedding_multiplier"), logits=1.0 / fields.positive("logits_scaling"))


GRANITE = ModelFamily("GraniteForCausalLM", _plans, scales=_scales)
