"""Torch definition of what lies between one attention and the next: an op of its own, for kernels that fuse it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from fastspec.kernels.common.weights import Weight
from fastspec.shapes import Tiling


class Layer(Protocol):
    """The products and norms of one decoder layer, as `models.weights.LayerWeights` describes them."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    o: Weight
    o_bias: Tensor | None
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


def layer_tail(
    linear: Callable[..., Tensor],
    attended: Tensor,
    x: Tensor,
    layer: Layer,
    next_layer: Layer | None,
    eps: float,
    tiling: Tiling,
) -> tuple[Tensor, Tensor | None]:
    """What lies between the attention of a layer and that of the `following` one, None behind the last.

    Args:
        linear: the op of that name.
        attended: [B, Q, H * D], what attention gave.
        x: [B, Q, hidden], the residual stream.
        eps: of the norms.

    Returns:
        The residual stream behind `layer`, and the product that goes into the attention of `following`.
    """
    x = linear(attended, layer.o, layer.o_bias, tiling, residual=x)
    gated = linear(x, layer.gate_up, layer.gate_up_bias, tiling, norm=(layer.post_norm, eps), gated=True)
    x = linear(gated, layer.down, layer.down_bias, tiling, residual=x)
    if next_layer is None:
        return x, None
    return x, linear(x, next_layer.qkv, next_layer.qkv_bias, tiling, norm=(next_layer.input_norm, eps))
