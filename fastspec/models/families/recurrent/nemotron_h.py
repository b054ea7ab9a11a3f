"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without rope, an MLP, or a mixture of experts.

MLPs and experts have no gate, and their activation is relu squared. The router is DeepSeek-V3's, with a shared expert
beside the routed ones. In Nemotron 3 Super and Ultra, inputs and outputs of routed experts are smaller than the hidden
size.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.mixtures.experts import width
from fastspec.models.families.mixtures.glm4_moe import grouped_routing
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelFamily
from fastspec.models.families.recurrent.mamba import MAX_HEADS, MAX_STATE, MAX_WIDTH, step_limits, with_whole_groups
from fastspec.models.fields import SIZE_LIMITS, ConfigFields
from fastspec.shapes import MambaRule, SquaredRelu

_OPEN = 1e9  # no time step is as large: JSON has no infinity, and such a limit stands for it


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    kinds = "linear_attention", "full_attention", "mlp", "moe"
    types = fields.layer_types(layers, *kinds)
    if types is None:
        fields.refuse("layers_block_type", None, " or ".join(map(repr, kinds)) + " for each layer")
    _refuse_unread(fields)
    if fields.flag("mlp_bias"):
        fields.refuse("mlp_bias", True, "false")
    if fields.get("mamba_hidden_act") != "silu":
        fields.refuse("mamba_hidden_act", fields.get("mamba_hidden_act"), "'silu'")
    plan = LayerPlan(norm="rms_fp32", gated=False, activation="relu2", rope=None)
    of_kind = {"full_attention": replace(plan, feeds=False), "mlp": replace(plan, attends=False)}
    if "linear_attention" in types:
        of_kind["linear_attention"] = replace(
            plan,
            attends=False,
            feeds=False,
            state=_rule(fields),
            state_bias=fields.flag("use_bias"),
            conv_bias=fields.flag("use_conv_bias"),
        )
    if "moe" in types:
        of_kind["moe"] = replace(plan, attends=False, experts=_experts(fields))
    return tuple(of_kind[kind] for kind in types)


def _refuse_unread(fields: ConfigFields) -> None:
    """Refuses settings that the config class has, and that transformers' module ignores."""
    for name in ("attention_bias", "mamba_proj_bias", "residual_in_fp32"):
        fields.expect(name, False)
    if (window := fields.get("sliding_window")) is not None:
        fields.refuse("sliding_window", window, "null")
    lowest, highest = step_limits(fields)
    if lowest > fields.positive("time_step_min") or highest < _OPEN:
        wanted = "no upper limit, and none above time_step_min"
        fields.refuse("time_step_limit", fields.get("time_step_limit"), wanted)


def _rule(fields: ConfigFields) -> MambaRule:
    rule = MambaRule(
        heads=fields.count("mamba_num_heads", MAX_HEADS),
        head_dim=fields.count("mamba_head_dim", MAX_STATE),
        groups=fields.count("n_groups", MAX_HEADS),
        state_dim=fields.count("ssm_state_size", MAX_STATE),
        width=fields.count("conv_kernel", MAX_WIDTH, minimum=2),
        least_step=fields.positive("time_step_min"),  # transformers has no upper limit here
    )
    return with_whole_groups(fields, rule, "n_groups", "mamba_num_heads")


def _experts(fields: ConfigFields) -> ExpertsPlan:
    fields.expect("n_shared_experts", 1)
    count, routing = grouped_routing(fields)
    return ExpertsPlan(
        count,
        width(fields, "moe_intermediate_size"),
        routing,
        activation=SquaredRelu(),
        correction=True,
        shared=width(fields, "moe_shared_expert_intermediate_size"),
        latent=0
        if fields.get("moe_latent_size") is None
        else fields.count("moe_latent_size", SIZE_LIMITS["hidden_size"]),
    )


NEMOTRON_H = ModelFamily(
    "NemotronHForCausalLM",
    _plans,
    {
        "qkv": tuple(f"mixer.{part}_proj" for part in "qkv"),
        "o": ("mixer.o_proj",),
        "mamba": ("mixer.in_proj",),
        "mamba_out": ("mixer.out_proj",),
        "mamba_conv": ("mixer.conv1d",),
        "mamba_decay": ("mixer.A_log",),
        "mamba_step": ("mixer.dt_bias",),
        "mamba_skip": ("mixer.D",),
        "mamba_norm": ("mixer.norm",),
        "gate_up": ("mixer.up_proj",),
        "down": ("mixer.down_proj",),
        "experts.router": ("mixer.gate",),
        "experts.correction": ("mixer.gate.e_score_correction_bias",),
        "experts.gate_up": ("mlp.experts.{}.up_proj",),
        "experts.latent_in": ("mixer.fc1_latent_proj",),
        "experts.latent_out": ("mixer.fc2_latent_proj",),
        "shared_gate_up": ("mixer.shared_experts.up_proj",),
        "shared_down": ("mixer.shared_experts.down_proj",),
        "input_norm": ("norm",),
        "post_norm": ("norm",),
    },
    renamed={"backbone.": "model.", "model.embeddings.": "model.embed_tokens.", "model.norm_f.": "model.norm."},
    eps="layer_norm_epsilon",
    act=("mlp_hidden_act", "relu2"),
    rope_kinds=(),
    identities=("fc1_latent_proj", "fc2_latent_proj"),
)
