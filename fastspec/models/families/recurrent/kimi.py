"""Kimi-Linear and Ling 3: delta rule with a decay for each element of a key, and latent attention in some layers.

Kimi-Linear has no rope, and computes decays and output gates by two matrix products each. In Ling 3, latent attention
has rope and a gate for each head, and decays have a lower limit. Both families have DeepSeek-V3's router, and a shared
expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fastspec.models.families.mixtures.experts import MAX_EXPERTS, width
from fastspec.models.families.mixtures.glm4_moe import grouped_routing
from fastspec.models.families.plan import ExpertsPlan, LatentPlan, LayerPlan, ModelFamily
from fastspec.models.fields import SIZE_LIMITS, ConfigFields
from fastspec.shapes import DeltaRule

_MAX_HEAD, _MAX_RANK, _MAX_LATENT = 256, 2**16, 512


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    fields.expect("mla_use_nope", True)
    fields.expect("moe_router_activation_func", "sigmoid")
    fields.expect("moe_layer_freq", 1)
    rule = _rule(fields)
    return _of_layers(fields, layers, rule._replace(rank=rule.key_dim), LayerPlan(rope=None))


def _ling_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    rule = _rule(fields)
    if fields.flag("kda_safe_gate"):
        floor = fields.get("kda_lower_bound")
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not -1e3 <= floor < 0:
            fields.refuse("kda_lower_bound", floor, "a negative number from -1000 on")
        rule = rule._replace(floor=float(floor))
    return _of_layers(fields, layers, rule, LayerPlan(head_gate=True))


def _rule(fields: ConfigFields) -> DeltaRule:
    heads = fields.count("linear_num_heads", SIZE_LIMITS["num_attention_heads"])
    dim = fields.count("linear_head_dim", _MAX_HEAD)
    taps = fields.count("linear_conv_kernel_dim", SIZE_LIMITS["linear_conv_kernel_dim"], minimum=2)
    return DeltaRule(heads, heads, dim, dim, taps, by_channel=True, gate="sigmoid")


def _of_layers(fields: ConfigFields, layers: int, rule: DeltaRule, attends: LayerPlan) -> tuple[LayerPlan, ...]:
    """Returns the plan of each layer.

    Args:
        fields: fields of the config.
        layers: number of layers.
        rule: sizes of the recurrent state of layers with the delta rule.
        attends: plan of layers with latent attention, without its sizes, which are added here.
    """
    if fields.flag("attention_bias"):
        fields.refuse("attention_bias", True, "false")
    types = fields.layer_types(layers, "full_attention", "linear_attention")
    if types is None:
        fields.refuse("layer_types", None, "'full_attention' or 'linear_attention' for each layer")
    mlps = fields.get("mlp_layer_types")  # "dense" or "sparse" for each layer, as the config's class checks
    latent = _latent(fields)
    attends = replace(attends, latent=latent, kv_heads=fields.size("num_attention_heads"), head_dim=latent.dim)
    recurs = LayerPlan(attends=False, rope=None, state=rule)
    experts = _experts(fields) if "sparse" in mlps else None
    return tuple(
        replace(attends if kind == "full_attention" else recurs, experts=experts if mlp == "sparse" else None)
        for kind, mlp in zip(types, mlps, strict=True)
    )


def _latent(fields: ConfigFields) -> LatentPlan:
    latent = LatentPlan(
        rank=fields.count("kv_lora_rank", _MAX_RANK),
        q_rank=0 if fields.get("q_lora_rank") is None else fields.count("q_lora_rank", _MAX_RANK),
        plain=fields.count("qk_nope_head_dim", _MAX_LATENT),
        shared=fields.count("qk_rope_head_dim", _MAX_LATENT),
        value=fields.count("v_head_dim", _MAX_LATENT),
    )
    if latent.plain % 2 or latent.shared % 2 or latent.dim > _MAX_LATENT:
        wanted = f"an even number, up to {_MAX_LATENT} with qk_rope_head_dim={latent.shared}, which is even"
        fields.refuse("qk_nope_head_dim", latent.plain, wanted)
    if latent.value > latent.dim:
        fields.refuse("v_head_dim", latent.value, f"at most qk_nope_head_dim + qk_rope_head_dim = {latent.dim}")
    heads, of_keys = fields.size("num_attention_heads"), fields.get("num_key_value_heads")
    if of_keys not in (None, heads):
        fields.refuse("num_key_value_heads", of_keys, f"num_attention_heads={heads}, as latent attention has")
    return latent


def _experts(fields: ConfigFields) -> ExpertsPlan:
    inner = width(fields, "moe_intermediate_size")
    count, routing = grouped_routing(fields, "num_local_experts")
    shared = inner * fields.count("n_shared_experts", MAX_EXPERTS)
    return ExpertsPlan(count, inner, routing, correction=True, shared=shared)


_SHARED: Final = {
    "shared_gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_down": ("mlp.shared_experts.down_proj",),
}
KIMI_LINEAR = ModelFamily(
    "KimiLinearForCausalLM",
    _plans,
    _SHARED,
    renamed={".self_attn.forget_gate.": ".self_attn."},
    other_names={"channel_conv": ("self_attn.conv1d",)},
    flat=("self_attn.A_log",),
    rope_kinds=(),
)
BAILING_HYBRID = replace(
    KIMI_LINEAR,
    architecture="BailingHybridForCausalLM",
    plans=_ling_plans,
    renamed={
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.": ".self_attn.",
        ".self_attn.dense.": ".self_attn.o_proj.",
        **KIMI_LINEAR.renamed,
        ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
    },
    rope_kinds=("default",),
    interleaved=True,
)
