"""What lies between the attention of a layer and that of the next, for rows that the ring's kernel multiplies.

    x' = x + attended o^T;  x'' = x' + act(norm(x') gate_up^T) down^T;  qkv = norm'(x'') qkv^T

To the bits of `reference.layer_tail` out of packed products. What goes from one product to the next goes as the next
one
wants it: sums, residual and norm are one kernel, gated products are written regrouped, and what attention left may be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.common.weights import Weight, is_packed
from fastspec.kernels.linear.launches import Call, Norm, given_to, ring, tile_for, whole_ring
from fastspec.kernels.linear.plan import RING_ROWS, Ring
from fastspec.kernels.reference.layer import Layer


def in_a_ring(weights: list[Weight], rows: int) -> bool:
    """Whether all these are packed, and rows so many that the ring's kernel multiplies them."""
    return is_packed(weights) and all(isinstance(_tile(weight, rows), Ring) for weight in weights)


def read_once(weights: list[Weight], rows: int) -> bool:
    """Whether they are, and no program's rows are so many that another has to read the weights again."""
    return rows <= RING_ROWS and in_a_ring(weights, rows)


def layer_tail(
    attended: Tensor, x: Tensor, layer: Layer, next_layer: Layer | None, eps: float, pdl: bool
) -> tuple[Tensor, Tensor | None]:
    """As `reference.layer_tail`, for weights and rows that are `in_a_ring`; attended as there, or regrouped."""
    shape, x = x.shape, x.reshape(-1, x.shape[-1]).contiguous()
    rows = len(x)
    given = attended.reshape(rows, -1).contiguous()
    if attended.dim() == 3:
        _, given, _ = given_to(layer.o, given, None, pdl)
    post, out = (layer.post_norm, eps), x.new_empty(rows, layer.gate_up.shape[0] // 2)
    x, given, squares = _added(given, layer.o, layer.o_bias, x, post, layer.gate_up, pdl)
    call = Call(given, layer.gate_up, out, layer.gate_up_bias, post, gated=True)
    ring(_tile(layer.gate_up, rows, gated=True), call, squares, pdl, regroup_out=True)
    if next_layer is None:
        return _summed(out, layer.down, layer.down_bias, x, pdl).view(shape), None
    norm, qkv = (next_layer.input_norm, eps), x.new_empty(rows, next_layer.qkv.shape[0])
    x, given, squares = _added(out, layer.down, layer.down_bias, x, norm, next_layer.qkv, pdl)
    call = Call(given, next_layer.qkv, qkv, next_layer.qkv_bias, norm)
    whole_ring(_tile(next_layer.qkv, rows), call, squares, pdl)
    return x.view(shape), qkv.view(*shape[:-1], -1)


def _tile(weight: Weight, rows: int, gated: bool = False) -> Ring:
    return tile_for(weight, rows, gated=gated)  # type: ignore[return-value]


def _summed(given: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, pdl: bool) -> Tensor:
    """residual + the product with `given` rows [+ bias]."""
    out = torch.empty_like(residual)
    whole_ring(_tile(weight, len(given)), Call(given, weight, out, bias, residual=residual), None, pdl)
    return out


def _added(
    given: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, norm: Norm, next_layer: Weight, pdl: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`_summed`, and what `given_to` makes of it for a product with `following`."""
    tile = _tile(weight, len(given))
    if tile.ways is None:
        return given_to(next_layer, _summed(given, weight, bias, residual, pdl), norm, pdl)
    parts = ring(tile, Call(given, weight, residual, bias), None, pdl)
    return given_to(next_layer, residual, norm, pdl, parts, bias)
