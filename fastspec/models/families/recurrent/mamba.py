"""Bamba: layers with Mamba-2, and attention in some. Falcon-H1: attention and Mamba-2 side by side in every layer.

Falcon-H1 has factors on the inputs and outputs of attention and of Mamba-2. It also has factors on parts of their input
projections, and in its MLP.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from fastspec.models.families.plan import BranchFactors, LayerPlan, ModelFamily, ModelScales
from fastspec.models.fields import ConfigFields
from fastspec.shapes import MambaRule

MAX_HEADS, MAX_STATE, MAX_WIDTH = 2**14, 2**10, 64
_PARTS = 5  # parts of the input projection: z, x, B, C and the time steps


def mamba_rule(fields: ConfigFields, norm: Literal["gate_first", "norm_first"] | None = "gate_first") -> MambaRule:
    """Returns the sizes of a Mamba-2 layer, read from the config fields that Bamba, Granite 4 and Falcon-H1 have.

    For `norm` see `MambaRule`.
    """
    least, highest = step_limits(fields)
    rule = MambaRule(
        heads=fields.count("mamba_n_heads", MAX_HEADS),
        head_dim=fields.count("mamba_d_head", MAX_STATE),
        groups=fields.count("mamba_n_groups", MAX_HEADS),
        state_dim=fields.count("mamba_d_state", MAX_STATE),
        width=fields.count("mamba_d_conv", MAX_WIDTH, minimum=2),
        least_step=least,
        most_step=highest,
        norm=norm,
    )
    return with_whole_groups(fields, rule, "mamba_n_groups", "mamba_n_heads")


def with_whole_groups(fields: ConfigFields, rule: MambaRule, groups: str, heads: str) -> MambaRule:
    """Returns `rule`. Refuses the config if the number of groups does not divide the number of heads.

    `groups` and `heads` are the config fields of these numbers, for the error.
    """
    if rule.heads % rule.groups:
        fields.refuse(groups, rule.groups, f"a divisor of {heads}={rule.heads}")
    return rule


def step_limits(fields: ConfigFields) -> tuple[float, float]:
    """Returns the lower and the upper limit of Mamba-2's time step after softplus. The upper limit may be infinite."""
    limits = fields.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    numbers = (
        isinstance(limits, list | tuple) and len(limits) == 2 and all(type(each) in (int, float) for each in limits)
    )
    if not numbers or not 0 <= limits[0] <= limits[1]:
        fields.refuse("time_step_limit", limits, "two ascending numbers from 0 on, or null")
    return float(limits[0]), float(limits[1])


def with_mamba(fields: ConfigFields, plan: LayerPlan) -> LayerPlan:
    """Returns `plan` with Mamba-2 in place of attention."""
    bias, conv_bias = fields.flag("mamba_proj_bias"), fields.flag("mamba_conv_bias")
    return replace(plan, attends=False, rope=None, state=mamba_rule(fields), state_bias=bias, conv_bias=conv_bias)


def _bamba_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    types = fields.layer_types(layers, "full_attention", "linear_attention", "attention", "mamba")
    if types is None:
        fields.refuse("layers_block_type", None, "'full_attention' or 'linear_attention' for each layer")
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    attends = LayerPlan(qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    recurs = with_mamba(fields, LayerPlan(mlp_bias=mlp_bias))
    return tuple(attends if kind in ("full_attention", "attention") else recurs for kind in types)


def _falcon_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    for name in ("attention_bias", "mamba_proj_bias", "projectors_bias"):
        if fields.flag(name):
            fields.refuse(name, True, "false: products with factors have no bias")
    norm: Literal["gate_first", "norm_first"] | None = None
    if fields.flag("mamba_rms_norm"):
        norm = "norm_first" if fields.flag("mamba_norm_before_gate") else "gate_first"
    gate, down = _factors(fields, "mlp_multipliers", 2)
    entering = fields.positive("ssm_in_multiplier")
    factors = BranchFactors(
        attention=fields.positive("attention_in_multiplier"),
        key=fields.positive("key_multiplier"),
        attended=fields.positive("attention_out_multiplier"),
        state=tuple(entering * each for each in _factors(fields, "ssm_multipliers", _PARTS)),
        stated=fields.positive("ssm_out_multiplier"),
        gate=gate,
        down=down,
    )
    plan = LayerPlan(
        state=mamba_rule(fields, norm),
        conv_bias=fields.flag("mamba_conv_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        factors=factors,
    )
    return (plan,) * layers


def _factors(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    values = fields.get(name)
    if not isinstance(values, list | tuple) or len(values) != count:
        fields.refuse(name, values, f"{count} positive numbers")
    return tuple(fields.check_positive(each, name) for each in values)


def _scales(fields: ConfigFields) -> ModelScales:
    return ModelScales(embed=fields.positive("embedding_multiplier"), logits=fields.positive("lm_head_multiplier"))


_MLP = tuple(f"feed_forward.{part}_proj" for part in ("gate", "up"))
BAMBA = ModelFamily(
    "BambaForCausalLM",
    _bamba_plans,
    {"gate_up": _MLP, "down": ("feed_forward.down_proj",), "post_norm": ("pre_ff_layernorm",)},
    renamed={"model.final_layernorm.": "model.norm."},
    rope_kinds=("default",),
    partial_rope=True,
)
FALCON_H1 = replace(
    BAMBA,
    architecture="FalconH1ForCausalLM",
    plans=_falcon_plans,
    scales=_scales,
    partial_rope=False,
    identities=("mamba.norm",),
)
