"""Qwen3: norms on queries and keys, biases if the config asks for them, and windows in layers named in layer_types.

The text model of Qwen3-VL is the same. Its rope has three positions per token, which are equal if all tokens are text.

Qwen3.5 and 3.6, dense: layers with the gated delta rule, and full attention in every fourth layer. Attention has an
output gate, and rope on a part of each head. Norms have the factor 1 + weight.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.plan import LayerPlan, ModelFamily, windows_by_layer_type
from fastspec.models.fields import ConfigFields
from fastspec.shapes import DeltaRule


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    bias = fields.flag("attention_bias")
    return tuple(
        LayerPlan(window=window, qkv_bias=bias, o_bias=bias, qk_norm="head")
        for window in windows_by_layer_type(fields, layers)
    )


def hybrid_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    """Returns the layer plans of Qwen3-Next and Qwen3.5, each with a dense MLP. `layers` is the number of layers."""
    types = fields.layer_types(layers, "linear_attention", "full_attention")
    if types is None:
        fields.refuse("layer_types", None, "'linear_attention' or 'full_attention' for each layer")
    bias = fields.flag("attention_bias")
    rule = DeltaRule(
        key_heads=fields.size("linear_num_key_heads"),
        value_heads=fields.size("linear_num_value_heads"),
        key_dim=fields.size("linear_key_head_dim"),
        value_dim=fields.size("linear_value_head_dim"),
        width=fields.size("linear_conv_kernel_dim"),
    )
    if rule.value_heads % rule.key_heads:
        fields.refuse("linear_num_key_heads", rule.key_heads, f"a divisor of linear_num_value_heads={rule.value_heads}")
    attends = LayerPlan(qkv_bias=bias, o_bias=bias, qk_norm="head", norm="rms_plus_one", output_gate=True)
    recurs = LayerPlan(norm="rms_plus_one", rope=None, attends=False, state=rule)
    return tuple(attends if kind == "full_attention" else recurs for kind in types)


QWEN3 = ModelFamily("Qwen3ForCausalLM", _plans)
QWEN3_VL = replace(QWEN3, architecture="Qwen3VLForConditionalGeneration", text_part=True)
QWEN3_5_TEXT = ModelFamily("Qwen3_5ForCausalLM", hybrid_plans, rope_kinds=("default",), partial_rope=True)
QWEN3_5 = replace(QWEN3_5_TEXT, architecture="Qwen3_5ForConditionalGeneration", text_part=True)
