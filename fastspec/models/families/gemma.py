"""Gemma 2: norms 1 + w before and after attention and MLP, softcaps of scores and logits, windows in every other layer.

Gemma 3 (text model): no softcap of scores, head norms, and a different rope for layers with and without a window. From
4B on, `gemma3` is the text part of a model that also reads images.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.plan import LayerPlan, ModelFamily, ModelScales, windows_by_layer_type
from fastspec.models.fields import ConfigFields

_NAMES = {"post_norm": ("pre_feedforward_layernorm",)}
_ACT = ("hidden_activation", "gelu_pytorch_tanh")


def _plan(fields: ConfigFields) -> LayerPlan:
    """Returns the plan that layers of Gemma 2 and 3 share."""
    if fields.flag("use_bidirectional_attention"):
        fields.refuse("use_bidirectional_attention", True, "false: a query sees older keys only")
    bias = fields.flag("attention_bias")
    return LayerPlan(
        attention_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        qkv_bias=bias,
        o_bias=bias,
        norm="rms_plus_one",
        post_norm=True,
        activation="gelu_tanh",
    )


def _scales(fields: ConfigFields) -> ModelScales:
    """Returns the factor on the embedding (the square root of its width), and the softcap of logits, if any."""
    return ModelScales(
        embed=fields.size("hidden_size") ** 0.5, softcap=fields.optional_positive("final_logit_softcapping")
    )


def _plans2(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    softcap = fields.optional_positive("attn_logit_softcapping")
    plan = replace(_plan(fields), softcap=softcap)
    return tuple(replace(plan, window=window) for window in windows_by_layer_type(fields, layers))


def _plans3(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    # `attn_logit_softcapping` is ignored, as in transformers
    plan = replace(_plan(fields), qk_norm="head")
    return tuple(
        replace(plan, window=window, rope=0 if window is None else 1)
        for window in windows_by_layer_type(fields, layers)
    )


GEMMA2 = ModelFamily("Gemma2ForCausalLM", _plans2, _NAMES, _scales, act=_ACT, rope_kinds=("default",))
GEMMA3_TEXT = ModelFamily(
    "Gemma3ForCausalLM",
    _plans3,
    _NAMES,
    _scales,
    act=_ACT,
    rope_kinds=("default", "linear", "yarn"),
    rope_layers=("full_attention", "sliding_attention"),
)
GEMMA3 = replace(GEMMA3_TEXT, architecture="Gemma3ForConditionalGeneration", text_part=True)
