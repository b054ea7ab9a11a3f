"""Zamba2: Mamba-2 layers, some of which begin with a transformer block whose weights they share."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from fastspec.models.families.plan import BlockPlan, LayerPlan, ModelFamily
from fastspec.models.families.recurrent.mamba import MAX_HEADS, MAX_STATE, MAX_WIDTH, with_whole_groups
from fastspec.models.fields import SIZE_LIMITS, ConfigFields
from fastspec.shapes import MambaRule

_EPS = 1e-5  # of the norm inside Mamba-2; transformers has this constant
_SHARED: Final = re.compile(r"(.*layers\.)(\d+)\.shared_transformer\.(.+)")
_SLOT: Final = re.compile(r"(.+)_list\.(\d+)\.(.+)")  # the adapter of one of the layers that share a block


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    kinds = "linear_attention", "hybrid", "mamba"
    types = fields.layer_types(layers, *kinds)
    if types is None:
        fields.refuse("layers_block_type", None, " or ".join(map(repr, kinds)) + " for each layer")
    for name in ("add_bias_linear", "use_long_context"):
        if fields.flag(name):
            fields.refuse(name, True, "false")
    fields.expect("use_conv_bias", True)
    if fields.get("rms_norm_eps") != _EPS:
        fields.refuse("rms_norm_eps", fields.get("rms_norm_eps"), f"{_EPS}, the constant of the norm in Mamba-2")
    recurs = LayerPlan(attends=False, feeds=False, rope=None, state=_rule(fields), conv_bias=True)
    hybrids = [layer for layer, kind in enumerate(types) if kind == "hybrid"]
    blocks = _blocks(fields, hybrids) if hybrids else {}
    begins = (
        replace(
            recurs,
            attends=True,
            feeds=True,
            rope=0 if fields.flag("use_mem_rope") else None,
            attention_scale=(fields.size("head_dim") / 2) ** -0.5,
            activation="gelu",
            block=BlockPlan(rank=0),
        )
        if hybrids
        else recurs
    )
    return tuple(replace(begins, block=blocks[layer]) if layer in blocks else recurs for layer in range(layers))


def _blocks(fields: ConfigFields, hybrids: list[int]) -> dict[int, BlockPlan]:
    """Returns the block of each of the layers `hybrids`. The first `num_mem_blocks` of them have their own weights."""
    adapts, heads = fields.flag("use_shared_attention_adapter"), fields.size("num_attention_heads")
    if adapts and fields.get("num_key_value_heads") != heads:
        wanted = f"num_attention_heads={heads}, with use_shared_attention_adapter"
        fields.refuse("num_key_value_heads", fields.get("num_key_value_heads"), wanted)
    count = fields.count("num_mem_blocks", SIZE_LIMITS["num_hidden_layers"])
    own = BlockPlan(fields.count("adapter_rank", SIZE_LIMITS["hidden_size"]), adapts=adapts)
    return {layer: own if at < count else replace(own, lender=hybrids[at % count]) for at, layer in enumerate(hybrids)}


def _rule(fields: ConfigFields) -> MambaRule:
    rule = MambaRule(
        heads=fields.count("n_mamba_heads", MAX_HEADS),
        head_dim=fields.count("mamba_headdim", MAX_STATE),
        groups=fields.count("mamba_ngroups", MAX_HEADS),
        state_dim=fields.count("mamba_d_state", MAX_STATE),
        width=fields.count("mamba_d_conv", MAX_WIDTH, minimum=2),
        least_step=fields.positive("time_step_min"),  # transformers has no upper limit here
    )
    return with_whole_groups(fields, rule, "mamba_ngroups", "n_mamba_heads")


def _located(plans: tuple[LayerPlan, ...], name: str) -> str:
    """Returns the name of a tensor of a shared block. For the arguments see `ModelFamily.located`.

    Adapters are stored in the layer that has the block's weights, numbered by the layers that share it. A live model
    has all tensors of a block in each of its layers.
    """
    if (found := _SHARED.fullmatch(name)) is None:
        return name
    before, number, rest = found.groups()
    hybrids = [layer for layer, plan in enumerate(plans) if plan.block is not None]
    if (slot := _SLOT.fullmatch(rest)) is not None and int(slot[2]) < len(hybrids):
        return f"{before}{hybrids[int(slot[2])]}.shared_transformer.{slot[1]}.{slot[3]}"
    block = plans[int(number)].block if int(number) < len(plans) else None
    return name if block is None or block.lender is None else f"{before}{block.lender}.shared_transformer.{rest}"


_BLOCK: Final = "shared_transformer."
ZAMBA2 = ModelFamily(
    "Zamba2ForCausalLM",
    _plans,
    {
        "qkv": tuple(f"{_BLOCK}self_attn.{part}_proj" for part in "qkv"),
        "o": (f"{_BLOCK}self_attn.o_proj",),
        "gate_up": (f"{_BLOCK}feed_forward.gate_up_proj",),
        "down": (f"{_BLOCK}feed_forward.down_proj",),
        "post_norm": (f"{_BLOCK}pre_ff_layernorm",),
    },
    renamed={"model.final_layernorm.": "model.norm.", ".mamba_decoder.": "."},
    located=_located,
    act=("hidden_act", "gelu"),
    rope_kinds=("default",),
    identities=("_adapter_list",),
)
