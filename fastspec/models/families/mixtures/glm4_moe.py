"""GLM-4.5, 4.6 and 4.7: sigmoid router with correction and expert groups, a shared expert. The first layers are dense.

The text model of GLM-4.5V and 4.6V has these layers, too. Its rope has three positions per token, which are equal if
all tokens are text.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.mixtures.experts import MAX_EXPERTS, counts, width
from fastspec.models.families.plan import ExpertsPlan, LayerPlan, ModelFamily, without_windows
from fastspec.models.fields import SIZE_LIMITS, ConfigFields
from fastspec.shapes import RoutingRule


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    without_windows(fields, layers)
    inner = width(fields, "moe_intermediate_size")
    count, routing = grouped_routing(fields)
    shared = inner * fields.count("n_shared_experts", MAX_EXPERTS)
    experts = ExpertsPlan(count, inner, routing, correction=True, shared=shared)
    dense = fields.count("first_k_dense_replace", SIZE_LIMITS["num_hidden_layers"], minimum=0)
    plan = LayerPlan(qkv_bias=fields.flag("attention_bias"), qk_norm="head" if fields.flag("use_qk_norm") else None)
    return tuple(plan if at < dense else replace(plan, experts=experts) for at in range(layers))


def grouped_routing(fields: ConfigFields, name: str = "n_routed_experts") -> tuple[int, RoutingRule]:
    """Returns the number of experts of a layer, and the rule that chooses a token's experts.

    `name` is the config field of the number of experts.
    """
    count, chosen = counts(fields, name)
    groups, kept = fields.count("n_group", count), fields.count("topk_group", count)
    if count % groups or (groups > 1 and count // groups < 2):
        fields.refuse("n_group", groups, f"a divisor of {name}={count} that leaves two or more a group")
    if kept > groups or kept * (count // groups) < chosen:
        wanted = f"at most n_group={groups}, with room for num_experts_per_tok={chosen}"
        fields.refuse("topk_group", kept, wanted)
    normed, scale = fields.flag("norm_topk_prob"), fields.positive("routed_scaling_factor")
    return count, RoutingRule(chosen, "sigmoid", normed, scale, groups, kept)


GLM4_MOE = ModelFamily(
    "Glm4MoeForCausalLM",
    _plans,
    {
        "shared_gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "shared_down": ("mlp.shared_experts.down_proj",),
    },
    partial_rope=True,
)
GLM4V_MOE = replace(GLM4_MOE, architecture="Glm4vMoeForConditionalGeneration", text_part=True)
