"""Jamba: Mamba-1 in most layers, attention without rope in the others. Every second layer has a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.mixtures.experts import counts, width
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelFamily
from fastspec.models.families.recurrent.mamba import MAX_STATE, MAX_WIDTH
from fastspec.models.fields import SIZE_LIMITS, ConfigFields
from fastspec.shapes import RoutingRule, SelectiveRule

_MAX_EXPAND = 64


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    types = fields.layer_types(layers, "full_attention", "linear_attention")
    assert types is not None, "transformers' config class computes them from attn_layer_period"
    hidden = fields.size("hidden_size")
    rule = SelectiveRule(
        channels=hidden * fields.count("mamba_expand", _MAX_EXPAND),
        state_dim=fields.count("mamba_d_state", MAX_STATE),
        width=fields.count("mamba_d_conv", MAX_WIDTH, minimum=2),
        rank=fields.count("mamba_dt_rank", SIZE_LIMITS["hidden_size"]),
    )
    attends, bias = LayerPlan(rope=None), fields.flag("mamba_proj_bias")
    recurs = replace(attends, attends=False, state=rule, state_bias=bias, conv_bias=fields.flag("mamba_conv_bias"))
    experts = _experts(fields)
    return tuple(
        replace(attends if kind == "full_attention" else recurs, experts=experts if count > 1 else None)
        for kind, count in zip(types, fields.get("layers_num_experts"), strict=True)
    )


def _experts(fields: ConfigFields) -> ExpertsPlan | None:
    if fields.get("num_experts") == 1:
        return None
    count, chosen = counts(fields)
    return ExpertsPlan(count, width(fields, "intermediate_size"), RoutingRule(chosen))


JAMBA = ModelFamily(
    "JambaForCausalLM",
    _plans,
    {
        "gate_up": tuple(f"feed_forward.{part}_proj" for part in ("gate", "up")),
        "down": ("feed_forward.down_proj",),
        "experts.router": ("feed_forward.router",),
        "post_norm": ("pre_ff_layernorm",),
    },
    renamed={"model.final_layernorm.": "model.norm."},
    rope_kinds=(),
)
