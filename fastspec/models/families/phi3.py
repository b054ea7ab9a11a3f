"""Phi-3 and 4: Llama with q, k and v in one matrix, and gate and up in one.

Some models rotate only a part of each head, and some have longrope.
"""

from __future__ import annotations

from fastspec.models.families.plan import LayerPlan, ModelFamily, one_window
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    return (LayerPlan(window=one_window(fields, layers)),) * layers


PHI3 = ModelFamily(
    "Phi3ForCausalLM",
    _plans,
    {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)},
    rope_kinds=("default", "longrope"),
    partial_rope=True,
)
