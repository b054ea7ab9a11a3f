"""Gemma 2: norms with the factor 1 + weight before and after attention and MLP, windows in every other layer.

Attention scores and logits have softcaps.

Gemma 3 (text model): no softcap of scores, norms of query and key heads, and a different rope for layers with and
without a window. From 4B on, `gemma3` is the text part of a model that also reads images.

Gemma 4 (text model): layers with a window and layers without one have different heads. Layers without a window have
wider heads, fewer KV heads, and may use keys as values. The last layers may read keys and values of earlier ones. Small
models have a second embedding, which gives each layer an input of its own. Every layer's result is multiplied by a
stored number. A model with experts beside its MLP is run by transformers' own module.
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
    """Returns the factor on the embedding, which is sqrt(hidden_size), and the softcap of logits, if there is one."""
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


def _plans4(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    bias, inputs, width = fields.flag("attention_bias"), _inputs(fields), fields.size("intermediate_size")
    plan = LayerPlan(
        attention_scale=1.0,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        norm="rms_fp32",
        post_norm=True,
        activation="gelu_tanh",
        value_norm=True,
        inputs=inputs,
        scaled=True,
    )
    same = fields.flag("attention_k_eq_v")
    shared = fields.count("num_kv_shared_layers", layers - 1, 0)
    windows = windows_by_layer_type(fields, layers)
    made = []
    for layer, (window, (kv_heads, dim)) in enumerate(zip(windows, _heads(fields, layers), strict=True)):
        one = replace(plan, window=window, kv_heads=kv_heads, head_dim=dim, rope=0 if window else 1)
        if layer >= layers - shared:
            one = replace(one, shares=_source(fields, windows[: layers - shared], window), value_norm=False)
            if fields.flag("use_double_wide_mlp"):
                one = replace(one, width=2 * width)
        elif window is None and same:
            one = replace(one, value_is_key=True)
        made.append(one)
    return tuple(made)


def _inputs(fields: ConfigFields) -> int:
    """Returns the elements per token of each layer's own input (per-layer embedding). 0: no such inputs."""
    inputs = fields.count("hidden_size_per_layer_input", 2**20, 0) if fields.get("hidden_size_per_layer_input") else 0
    rows = fields.get("vocab_size_per_layer_input")
    if inputs and rows != fields.size("vocab_size"):
        fields.refuse("vocab_size_per_layer_input", rows, f"vocab_size={fields.size('vocab_size')}")
    return inputs


def _heads(fields: ConfigFields, layers: int) -> tuple[tuple[int | None, int | None], ...]:
    """Returns (KV heads, head_dim) of each layer. A number is None if it is the same as for the whole model."""
    config, kinds = fields.config, fields.layer_types(layers) or ()
    own = getattr(config, "per_layer_config", None)
    if own is None:  # transformers before 5.20 has fields for global layers
        dim = fields.count("global_head_dim", 512) if fields.get("global_head_dim") else None
        kv_heads = fields.get("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None
        found = [(kv_heads, dim) if kind == "full_attention" else (None, None) for kind in kinds]
    else:
        found = [(own[layer].num_key_value_heads, own[layer].head_dim) for layer in range(layers)]
    heads, first = fields.size("num_attention_heads"), fields.of_first_layer()
    usual = first.get("num_key_value_heads"), first.get("head_dim")
    for kv_heads, dim in found:
        if kv_heads is not None and (type(kv_heads) is not int or kv_heads < 1 or heads % kv_heads):
            fields.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
        if dim is not None and (type(dim) is not int or dim % 2 or not 2 <= dim <= 512):
            fields.refuse("head_dim", dim, "an even number up to 512")
    return tuple(
        tuple(None if value == default else value for value, default in zip(pair, usual, strict=True))  # type: ignore[misc]
        for pair in found
    )


def _source(fields: ConfigFields, windows: tuple[int | None, ...], window: int | None) -> int:
    """Returns the index of the layer whose keys and values a later layer reads: the last one of the same type.

    Args:
        fields: fields of the config, for errors.
        windows: attention windows of the layers that have keys of their own. None: no window.
        window: attention window of the later layer. None: no window.
    """
    same = [layer for layer, other in enumerate(windows) if (other is None) == (window is None)]
    if not same:
        shared = fields.get("num_kv_shared_layers")
        fields.refuse("num_kv_shared_layers", shared, "a layer with keys of its own for each of layer_types")
    return same[-1]


def _hosts(config: object) -> bool:
    """True for a config with experts, and for one in which queries also attend to later tokens.

    transformers' own module runs such a model.
    """
    return (
        bool(getattr(config, "enable_moe_block", False))
        or getattr(config, "use_bidirectional_attention", None) == "all"
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
GEMMA4_TEXT = ModelFamily(
    "Gemma4ForCausalLM",
    _plans4,
    _NAMES,
    _scales,
    act=_ACT,
    rope_kinds=("default", "linear", "proportional"),
    rope_layers=("sliding_attention", "full_attention"),
    mixed_heads=True,
    hosts=_hosts,
)
