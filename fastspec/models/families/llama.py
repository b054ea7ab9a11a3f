"""Llama, Seed-OSS, ERNIE 4.5, Helium: full attention in every layer; biases if the config asks for them.

In ERNIE 4.5 and Helium rope is interleaved.
"""

from __future__ import annotations

from fastspec.models.families.plan import LayerPlan, ModelFamily, without_windows
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    bias = fields.flag("attention_bias")
    without_windows(fields, layers)
    return (LayerPlan(qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias")),) * layers


def _seed_oss_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    without_windows(fields, layers)
    plan = LayerPlan(
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )
    return (plan,) * layers


def _ernie_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    bias = fields.flag("use_bias")
    without_windows(fields, layers)
    return (LayerPlan(qkv_bias=bias, o_bias=bias, mlp_bias=bias),) * layers


def _helium_plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    without_windows(fields, layers)
    bias = fields.flag("attention_bias")
    return (LayerPlan(qkv_bias=bias, mlp_bias=fields.flag("mlp_bias")),) * layers


LLAMA = ModelFamily("LlamaForCausalLM", _plans)
ERNIE4_5 = ModelFamily("Ernie4_5ForCausalLM", _ernie_plans, interleaved=True)
HELIUM = ModelFamily("HeliumForCausalLM", _helium_plans, interleaved=True)
SEED_OSS = ModelFamily("SeedOssForCausalLM", _seed_oss_plans)
