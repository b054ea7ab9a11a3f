"""StarCoder2: LayerNorms with a bias, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from fastspec.models.families.plan import LayerPlan, ModelFamily, one_window
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    bias = fields.flag("use_bias")
    plan = LayerPlan(
        window=one_window(fields, layers),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm="layer",
        norm_bias=True,
        activation="gelu_tanh",
        gated=False,
    )
    return (plan,) * layers


STARCODER2 = ModelFamily(
    "Starcoder2ForCausalLM",
    _plans,
    {"gate_up": ("mlp.c_fc",), "down": ("mlp.c_proj",)},
    eps="norm_epsilon",
    act=("hidden_act", "gelu_pytorch_tanh"),
)
