"""SmolLM3: Llama with some layers that have no rope."""

from __future__ import annotations

from fastspec.models.families.plan import LayerPlan, ModelFamily, windows_by_layer_type, without_windows
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    with_rope = fields.get("no_rope_layers")  # 1 means that the layer has rope, in spite of the field's name
    if not isinstance(with_rope, list) or len(with_rope) != layers or any(each not in (0, 1) for each in with_rope):
        fields.refuse("no_rope_layers", with_rope, f"a list of num_hidden_layers={layers} entries 0 or 1")
    if fields.flag("use_sliding_window"):
        windows = windows_by_layer_type(fields, layers)
    else:
        without_windows(fields, layers)
        windows = (None,) * layers
    bias = fields.flag("attention_bias")
    return tuple(
        LayerPlan(window=window, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"), rope=0 if rope else None)
        for window, rope in zip(windows, with_rope, strict=True)
    )


SMOLLM3 = ModelFamily("SmolLM3ForCausalLM", _plans)
