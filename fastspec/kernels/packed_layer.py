"""What lies between the attention of a layer and that of the next, for rows that the ring's kernel multiplies.

    x' = x + attended o^T;  x'' = x' + act(norm(x') gate_up^T) down^T;  qkv = norm'(x'') qkv^T

To the bits of `reference.between` out of packed products. What goes from one product to the next goes as the next one
wants it: sums, residual and norm are one kernel, and gated products are written regrouped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.packed_launch import GLUON_TYPE, Call, Ring, capability_of, ring, split_of, tile_of
from fastspec.kernels.packed_norm import norm_rows, regroup
from fastspec.kernels.packed_sum import add_up, add_up_and_norm
from fastspec.kernels.reference_layer import Layer


def in_a_ring(weights: list[Tensor], rows: int) -> bool:
    """Whether all these are packed, and rows so many that the ring's kernel multiplies them."""
    packed = all(weight.dim() == 4 and weight.dtype in GLUON_TYPE for weight in weights)
    return packed and all(isinstance(_tile(weight, rows), Ring) for weight in weights)


def between(
    attended: Tensor, x: Tensor, layer: Layer, following: Layer | None, eps: float, pdl: bool
) -> tuple[Tensor, Tensor | None]:
    """As `reference.between`, for weights and rows that are `in_a_ring`."""
    shape, flat = x.shape, x.reshape(-1, x.shape[-1]).contiguous()
    given = regroup(attended.reshape(len(flat), -1).contiguous(), pdl)
    norm = (layer.post_norm, eps)
    flat, normed, scale = _added(given, layer.o, layer.o_bias, flat, norm, layer.gate_up, pdl)
    given = flat.new_empty(len(flat), layer.gate_up.shape[0] * 8)
    call = Call(normed, layer.gate_up, given, layer.gate_up_bias, gated=True)
    ring(_tile(layer.gate_up, len(flat), gated=True), call, scale, pdl, regroup_out=True)
    if following is None:
        return _summed(given, layer.down, layer.down_bias, flat, pdl).view(shape), None
    norm = (following.input_norm, eps)
    flat, normed, scale = _added(given, layer.down, layer.down_bias, flat, norm, following.qkv, pdl)
    qkv = flat.new_empty(len(flat), following.qkv.shape[0] * 16)
    call = Call(normed, following.qkv, qkv, following.qkv_bias)
    parts = ring(_tile(following.qkv, len(flat)), call, scale, pdl)
    if parts is not None:
        add_up(parts, scale, following.qkv_bias, None, qkv, pdl)
    return flat.view(shape), qkv.view(*shape[:-1], -1)


def _tile(weight: Tensor, rows: int, gated: bool = False) -> Ring:
    n, k = weight.shape[0] * 16, weight.shape[1] * 32
    return tile_of(n, k, rows, capability_of(weight.device), gated=gated)  # type: ignore[return-value]


def _summed(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, pdl: bool) -> Tensor:
    """residual + x weight^T [+ bias], x regrouped."""
    out = torch.empty_like(residual)
    parts = ring(_tile(weight, len(x)), Call(x, weight, out, bias, residual=residual), None, pdl)
    if parts is not None:
        add_up(parts, None, bias, residual, out, pdl)
    return out


def _added(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: tuple[Tensor, float],
    following: Tensor,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_summed`, and its norm for a product with `following`: regrouped, and factors of its rows."""
    tile, kind = _tile(weight, len(x)), GLUON_TYPE[x.dtype]
    split = split_of(following.shape[0] * 16, following.shape[1] * 32)
    if not tile.apart:
        out = _summed(x, weight, bias, residual, pdl)
        return out, *norm_rows(out, *norm, split.ways, split.slab, kind, pdl, regroup=True)
    parts = ring(tile, Call(x, weight, residual, bias), None, pdl)
    assert parts is not None
    return add_up_and_norm(parts, bias, residual, norm, (split.ways, split.slab), kind, pdl)
