"""GLM-4: interleaved rope on a part of each head, gate and up in one matrix.

`glm4` also has norms after attention and MLP. The text model of GLM-4.1V is `glm4` with biases. Its rope has three
positions per token, which are equal if all tokens are text.
"""

from __future__ import annotations

from dataclasses import replace

from fastspec.models.families.plan import LayerPlan, ModelFamily, without_windows
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    without_windows(fields, layers)
    return (LayerPlan(qkv_bias=fields.flag("attention_bias")),) * layers


def _plans4(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    return tuple(replace(plan, post_norm=True) for plan in _plans(fields, layers))


def _plans4v(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    return tuple(replace(plan, qkv_bias=True) for plan in _plans4(fields, layers))


_NAMES = {
    "gate_up": ("mlp.gate_up_proj",),
    "attended_norm": ("post_self_attn_layernorm",),
    "mlp_norm": ("post_mlp_layernorm",),
}
GLM = ModelFamily("GlmForCausalLM", _plans, _NAMES, interleaved=True, partial_rope=True)
GLM4 = ModelFamily("Glm4ForCausalLM", _plans4, _NAMES, interleaved=True, partial_rope=True)
GLM4V = replace(GLM4, architecture="Glm4vForConditionalGeneration", plans=_plans4v, text_part=True)
