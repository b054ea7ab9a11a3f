"""LFM2: gated short convolutions, and attention in some layers. LFM2-MoE also has experts, except in the first layers.

Each head of queries and keys is normed. The router of LFM2-MoE uses sigmoids as scores, and adds a correction to them
only to choose experts. LFM3 also has norms after attention and MLP, and a gate for each head. Some of its layers have
windows and a rope of their own.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.mixtures.experts import counts, width
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelFamily
from fastspec.models.fields import SIZE_LIMITS, ConfigFields
from fastspec.shapes import ConvRule, RoutingRule

# number that is added to the sum of a token's factors; configs have no field for it, transformers has this constant
_SUM_EPS = 1e-6
_MAX_WIDTH = 64
_ROPES = ("full_attention", "sliding_attention")


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    types = fields.layer_types(layers, "full_attention", "conv")
    if types is None:
        fields.refuse("layer_types", None, "'full_attention' or 'conv' for each layer")
    attends, convolves = LayerPlan(qk_norm="head"), _convolves(fields)
    return tuple(attends if kind == "full_attention" else convolves for kind in types)


def _convolves(fields: ConfigFields) -> LayerPlan:
    """Returns the plan of a layer with a short convolution."""
    bias = fields.flag("conv_bias")
    rule = ConvRule(fields.size("hidden_size"), fields.count("conv_L_cache", _MAX_WIDTH, minimum=2))
    return LayerPlan(rope=None, attends=False, state=rule, state_bias=bias, conv_bias=bias)


def _moe_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    count, chosen = counts(fields)
    normed, scale = fields.flag("norm_topk_prob"), fields.positive("routed_scaling_factor")
    routing = RoutingRule(chosen, "sigmoid", normed, scale, eps=_SUM_EPS)
    inner, correction = width(fields, "moe_intermediate_size"), fields.flag("use_expert_bias")
    experts = ExpertsPlan(count, inner, routing, correction=correction)
    dense = fields.count("num_dense_layers", SIZE_LIMITS["num_hidden_layers"], minimum=0)
    return tuple(
        plan if at < dense else replace(plan, experts=experts) for at, plan in enumerate(_plans(fields, layers))
    )


def _plans3(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    types = fields.layer_types(layers, *_ROPES, "conv")
    if types is None:
        fields.refuse("layer_types", None, "'full_attention', 'sliding_attention' or 'conv' for each layer")
    bias, sandwich = fields.flag("attention_bias"), fields.flag("use_sandwich_norm")
    attends = LayerPlan(
        qkv_bias=bias, o_bias=bias, qk_norm="head", post_norm=sandwich, head_gate=fields.flag("use_attention_gate")
    )
    window = fields.size("sliding_window") if "sliding_attention" in types else None
    of_kind = {
        "full_attention": attends,
        "sliding_attention": replace(attends, window=window, rope=1),
        "conv": replace(_convolves(fields), post_norm=sandwich),
    }
    return tuple(of_kind[kind] for kind in types)


def _inner(fields: ConfigFields) -> int:
    """Returns the intermediate size of LFM2's MLP, as transformers' Lfm2MLP computes it."""
    size = fields.size("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(2 * size / 3)
    if (factor := fields.optional_positive("block_ffn_dim_multiplier")) is None:
        return size
    unit = fields.count("block_multiple_of", SIZE_LIMITS["intermediate_size"])
    return -(-int(factor * size) // unit) * unit


LFM2 = ModelFamily(
    "Lfm2ForCausalLM",
    _plans,
    {
        "o": ("self_attn.out_proj",),
        "q_norm": ("self_attn.q_layernorm",),
        "k_norm": ("self_attn.k_layernorm",),
        "gate_up": ("feed_forward.w1", "feed_forward.w3"),
        "down": ("feed_forward.w2",),
        "experts.router": ("feed_forward.gate",),
        "experts.correction": ("feed_forward.expert_bias",),
        "input_norm": ("operator_norm",),
        "post_norm": ("ffn_norm",),
    },
    renamed={"model.embedding_norm.": "model.norm."},
    eps="norm_eps",
    inner=_inner,
    act=None,
    rope_kinds=("default",),
)
LFM2_MOE = replace(
    LFM2,
    architecture="Lfm2MoeForCausalLM",
    plans=_moe_plans,
    inner="intermediate_size",
    rotary="model.pos_emb",
)
LFM3 = replace(
    LFM2,
    architecture="Lfm3ForCausalLM",
    plans=_plans3,
    names={
        **{"gate_up": LFM2.names["gate_up"], "down": LFM2.names["down"]},
        **{"input_norm": ("operator_norm",), "post_norm": ("ffn_norm",)},
        **{"attended_norm": ("post_operator_norm",), "mlp_norm": ("post_ffn_norm",)},
    },
    renamed={**LFM2.renamed, ".self_attn.gate_proj.": ".self_attn.g_proj."},
    inner="intermediate_size",
    rope_kinds=("default", "proportional"),
    identities=("post_operator_norm", "post_ffn_norm"),
    rope_layers=_ROPES,
)
