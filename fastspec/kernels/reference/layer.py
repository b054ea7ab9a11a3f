"""Torch definition of the computations between one layer's attention and the next layer's.

They are one op, `layer_tail`, so that kernels can fuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fastspec.kernels.common.weights import Weight
from fastspec.shapes import Tiling


class Layer(Protocol):
    """Weights of one decoder layer with a gated MLP; `models.layer_table.LayerWeights` has their shapes."""

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


# an all-reduce: (x, bias [N] or None, residual [..., N]) -> residual + (sum over ranks of x [+ bias]), rounded once.
# x is fp32 of residual's shape. It may have one more axis in front, of partial sums that are added as a binary tree
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
        linear: the op `Ops.linear`.
        attended: [B, Q, H * D], result of attention. With `reduce` it has only the heads of this rank.
        x: [B, Q, hidden], the residual stream.
        layer: weights. With `reduce`, `layer.o` has only the columns of this rank.
        tiling: `tiling.rows` rows are multiplied in one matrix product.
        reduce: adds fp32 products of all ranks, bias and residual. None: one rank has the whole layer.

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
        linear: the op `Ops.linear`.
        x: [B, Q, hidden], result of `attention_out`.
        layer: weights. With `reduce`, `gate_up` has this rank's rows of gate and of up, and `down` the same columns.
        next_layer: weights of the next layer. None after the last layer.
        eps: epsilon of the norms.
        tiling: `tiling.rows` rows are multiplied in one matrix product.
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
    """Computes everything between one layer's attention and the next layer's: `attention_out`, then `mlp`.

    Args:
        linear, attended, x, layer, next_layer, eps, tiling, reduce: see `attention_out` and `mlp`.

    Returns:
        x [B, Q, hidden], and q, k and v of the next layer [B, Q, N]; None after the last layer.
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
