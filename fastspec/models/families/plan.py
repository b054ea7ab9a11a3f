"""What a layer does, in order, and how a family says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastspec.models.fields import ConfigFields


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One decoder layer. x is the residual stream; a norm is an RMSNorm with a weight.

        h = norm(x)
        q, k, v = h Wqkv [+ bias]                   one product
        q, k = norm of each head [where qk_norm]
        q, k = rope(q, k)
        a = attention(q, k, v)                      over all keys, or over the `window` newest
        x = x + residual_scale * (a Wo [+ bias])
        h = norm(x)
        g, u = h Wgate_up [+ bias]                  one product
        x = x + residual_scale * ((silu(g) * u) Wdown [+ bias])

    Attributes:
        window: keys that a query sees, the newest ones with its own among them; None: all.
        qkv_bias: q, k and v projections have a bias.
        o_bias: the output projection has one.
        mlp_bias: gate, up and down projections have one.
        qk_norm: queries and keys are normalised over head_dim, before rope.
        residual_scale: factor on what attention and MLP add to x.
    """

    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    residual_scale: float = 1.0

    @property
    def fused_tail(self) -> bool:
        """Whether `Ops.layer_tail` computes what follows attention: it adds products to x as they are."""
        return self.residual_scale == 1.0


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    Attributes:
        architecture: the class of transformers that a config names, and that a live module must have.
        plans: from a config, whose number of layers is checked, the plan of each layer. Refuses a setting that
            changes the arithmetic and has no place in a plan.
    """

    architecture: str
    plans: Callable[[ConfigFields, int], tuple[LayerPlan, ...]]


def without_windows(fields: ConfigFields, layers: int) -> None:
    """Refuses a layer that asks for a window, in a model that has none.

    A `sliding_window` alone is ignored, as transformers does.
    """
    types = fields.layer_types(layers)
    if types is not None and "sliding_attention" in types:
        fields.refuse("layer_types", "sliding_attention", "'full_attention' here: there is no sliding_window")


def windows_by_layer_type(fields: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """The window of each layer where `layer_types` says which layers have one."""
    types = fields.layer_types(layers)
    if fields.get("sliding_window") is None:
        without_windows(fields, layers)
        return (None,) * layers
    window = fields.size("sliding_window")
    if types is None:
        fields.refuse("layer_types", None, f"one entry per layer with sliding_window={window}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
