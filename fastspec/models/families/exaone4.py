"""EXAONE 4: norms come after attention and MLP, none before. Each query head and each key head is normed.

If some layers have windows, only those have rope.
"""

from __future__ import annotations

from fastspec.models.families.plan import LayerPlan, ModelFamily, windows_by_layer_type
from fastspec.models.fields import ConfigFields


def _plans(fields: ConfigFields, layers: int) -> tuple[LayerPlan, ...]:
    everywhere = fields.get("sliding_window") is None
    return tuple(
        LayerPlan(
            window=window,
            qk_norm="head",
            rope=0 if everywhere or window is not None else None,
            pre_norm=False,
            post_norm=True,
        )
        for window in windows_by_layer_type(fields, layers)
    )


EXAONE4 = ModelFamily("Exaone4ForCausalLM", _plans)
