"""Torch definition of a layer's computations between two attentions. They are one op, so that kernels can fuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fastspec.kernels.common.weights import Weight
from fastspec.shapes import Tiling


class Layer(Protocol):
    """The products and norms of one decoder layer; `models.layer_table.LayerWeights` has their shapes."""

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


# (partial, bias [N] or None, residual [..., N]) -> residual + (sum over devices of partial [+ bias]), rounded once.
# partial is fp32 of residual's shape. It may have one more axis in front, of parts that are added as a binary tree
Reduce = Callable[[Tensor, Tensor | None, Tensor], Tensor]


def attention_out(
    linear: Callable[..., Tensor],
    attended: Tensor,
    x: Tensor,
    layer: Layer,
    tiling: Tiling,
    reduce: Reduce | None = None,
) -> Tensor:
    """Adds a layer's attention to the residual stream: x + attended o^T [+ bias].

    Args:
        linear: the op of that name.
        attended: [B, Q, H * D], result of attention. With `reduce` it has the heads of this device.
        x: [B, Q, hidden], the residual stream.
        layer: weights. With `reduce`, `layer.o` has this device's columns.
        tiling: rows per product.
        reduce: adds products over devices; None if one device has the whole layer.

    Returns:
        [B, Q, hidden], the residual stream.
    """
    return _added(linear, attended, layer.o, layer.o_bias, x, tiling, reduce)


def mlp(
    linear: Callable[..., Tensor],
    x: Tensor,
    layer: Layer,
    next_layer: Layer | None,
    eps: float,
    tiling: Tiling,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Adds a layer's MLP to the residual stream, and computes q, k and v of the next layer.

    Args:
        linear: the op of that name.
        x: [B, Q, hidden], result of `attention_out`.
        layer: weights. With `reduce`, `gate_up` has this device's rows of each half, and `down` the same columns.
        next_layer: None after the last layer.
        eps: epsilon of the norms.
        tiling: rows per product.
        reduce: see `attention_out`.

    Returns:
        x [B, Q, hidden], and q, k and v of the next layer [B, Q, N]; None after the last layer.
    """
    gated = linear(x, layer.gate_up, layer.gate_up_bias, tiling, norm=(layer.post_norm, eps), gated=True)
    x = _added(linear, gated, layer.down, layer.down_bias, x, tiling, reduce)
    if next_layer is None:
        return x, None
    return x, linear(x, next_layer.qkv, next_layer.qkv_bias, tiling, norm=(next_layer.input_norm, eps))


def layer_tail(
    linear: Callable[..., Tensor],
    attended: Tensor,
    x: Tensor,
    layer: Layer,
    next_layer: Layer | None,
    eps: float,
    tiling: Tiling,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The computations between two attentions: `attention_out`, then `mlp`.

    Args:
        linear, attended, x, layer, next_layer, eps, tiling, reduce: see `attention_out` and `mlp`.

    Returns:
        As `mlp`.
    """
    x = attention_out(linear, attended, x, layer, tiling, reduce)
    return mlp(linear, x, layer, next_layer, eps, tiling, reduce)


def _added(
    linear: Callable[..., Tensor],
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor,
    tiling: Tiling,
    reduce: Reduce | None,
) -> Tensor:
    if reduce is None:
        return linear(x, weight, bias, tiling, residual=residual)
    return reduce(linear(x, weight, None, tiling, out_dtype=torch.float32), bias, residual)
