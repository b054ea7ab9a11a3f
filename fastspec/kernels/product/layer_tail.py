"""Layer tail: the part of a layer after attention, and the next layer's q, k and v, by the TMA kernels for many rows.

    x' = x + attended o^T;  x'' = x' + act(norm(x') gate_up^T) down^T;  qkv = norm'(x'') qkv^T

The bits are those of `reference.layer_tail` with packed products. A product's result is stored in the order in which
the next product reads it (regrouped, see packing.py). Gated products and attention can store their results regrouped.
Before other products, one kernel adds partial sums and residual, multiplies by the norm's weight, and regroups.

There are two halves, `attention_out` and `mlp`. With tensor parallelism each ends with an all-reduce.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fastspec.kernels.common.weights import Weight, is_packed
from fastspec.kernels.product.launch import (
    GLUON_TYPE,
    Call,
    Norm,
    launch_and_sum,
    launch_tma,
    permuted_for,
    reads_raised,
    split_for,
    tile_for,
)
from fastspec.kernels.product.plan import Tma, Wide
from fastspec.kernels.product.split_k import Parts, add_up
from fastspec.kernels.reference.layer import Layer, Reduce
from fastspec.kernels.room import Room


def runs_on_tma(weights: list[Weight], rows: int) -> bool:
    """True if all weights are packed or quantised, and `rows` rows of x are enough for a TMA kernel."""
    return all(
        (weight.codes is not None or is_packed([weight])) and isinstance(_tile(weight, rows), Tma | Wide)
        for weight in weights
    )


class NextInput(NamedTuple):
    """Residual stream between two products, and the input of the next product.

    Attributes:
        x: residual stream [M, hidden].
        permuted: [M, hidden], x times the norm's weight, regrouped by `permuted_rows`.
        squares: fp32 [S, M], for the norm: sums of squares of x for each split of the next product. None without a
            norm.
    """

    x: Tensor
    permuted: Tensor
    squares: Tensor | None


@runtime_checkable
class SharesRoom(Protocol):
    """All-reduce (`Reduce`) between GPUs that can access each other's memory."""

    def room_for(self, elements: int) -> Room | None:
        """Returns memory that all ranks can access, for an all-reduce of `elements` fp32 elements.

        Returns None if the `Reduce` object itself must be called for an all-reduce of that size.
        """


def layer_tail(
    attended: Tensor,
    x: Tensor,
    layer: Layer,
    next_layer: Layer | None,
    eps: float,
    pdl: bool,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the part of a layer after attention, and q, k and v of the next layer, as `Ops.layer_tail`.

    Args:
        attended: output of attention, [B, Q, H * D], or regrouped [B, Q, H * D / 64, 64].
        x: residual stream [B, Q, hidden].
        layer: weights of the layer. `runs_on_tma` must accept them for B * Q rows.
        next_layer: layer whose q, k and v are computed. None: `layer` is the last one.
        eps: epsilon of the norms.
        pdl: see `packed_linear`.
        reduce: all-reduce over the ranks. None: one rank.

    Returns:
        The new residual stream [B, Q, hidden]; and q, k and v [B, Q, N], or None without a next layer.
    """
    shape, rows = x.shape, x.reshape(-1, x.shape[-1]).contiguous()
    x, qkv = mlp(attention_out(attended, rows, layer, eps, pdl, reduce), layer, next_layer, eps, pdl, reduce)
    return x.view(shape), None if qkv is None else qkv.view(*shape[:-1], -1)


def attention_out(
    attended: Tensor, x: Tensor, layer: Layer, eps: float, pdl: bool, reduce: Reduce | None = None
) -> NextInput:
    """Adds the output projection of attention to x, as `Ops.attention_out`, and prepares the result as input of `mlp`.

    Args:
        attended: [B, Q, H * D], or regrouped [B, Q, H * D / 64, 64].
        x: [M, hidden] contiguous, M = B * Q.
        eps: epsilon of the norm before the MLP.
        pdl, reduce: see `layer_tail`.
    """
    given = attended.reshape(len(x), -1).contiguous()
    if attended.dim() == 3:
        _, given, _ = permuted_for(layer.o, given, None, pdl)
    else:
        given = _raised_for(layer.o, given)
    return _added(given, layer.o, layer.o_bias, x, (layer.post_norm, eps), layer.gate_up, pdl, reduce)


def mlp(
    given: NextInput, layer: Layer, next_layer: Layer | None, eps: float, pdl: bool, reduce: Reduce | None = None
) -> tuple[Tensor, Tensor | None]:
    """Adds the output of the MLP to x, and computes q, k and v of the next layer, as `Ops.mlp`.

    Args:
        given: result of `attention_out`.
        layer, next_layer, eps, pdl, reduce: see `layer_tail`.

    Returns:
        The new x [M, hidden]; and q, k and v of the next layer [M, N], or None without a next layer.
    """
    x, permuted, squares = given
    out = x.new_empty(len(x), layer.gate_up.shape[0] // 2)
    call = Call(permuted, layer.gate_up, out, layer.gate_up_bias, (layer.post_norm, eps), gated=True)
    tile = _tile(layer.gate_up, len(x), gated=True)
    raises = isinstance(tile, Wide) and reads_raised(layer.down)
    launch_tma(tile, call, squares, pdl, regroup_out=True, raise_out=raises)
    if not raises:
        out = _raised_for(layer.down, out)
    if next_layer is None:
        return _summed(out, layer.down, layer.down_bias, x, pdl, reduce), None
    norm, qkv = (next_layer.input_norm, eps), x.new_empty(len(x), next_layer.qkv.shape[0])
    x, permuted, squares = _added(out, layer.down, layer.down_bias, x, norm, next_layer.qkv, pdl, reduce)
    call = Call(permuted, next_layer.qkv, qkv, next_layer.qkv_bias, norm)
    launch_and_sum(_tile(next_layer.qkv, len(x)), call, squares, pdl)
    return x, qkv


def _raised_for(weight: Weight, given: Tensor) -> Tensor:
    """Returns the regrouped rows `given`, multiplied by 2^64, exactly, if `weight` has 8-bit codes. Else unchanged."""
    return given * 2.0**64 if reads_raised(weight) else given


def _tile(weight: Weight, rows: int, gated: bool = False) -> Tma | Wide:
    return tile_for(weight, rows, gated=gated)  # type: ignore[return-value]


def _leaves_parts(tile: Tma | Wide, weight: Weight) -> bool:
    """True if a product with this tile and weight stores partial sums, which another kernel adds."""
    if isinstance(tile, Wide):
        return tile.splits < split_for(weight).split_k
    return tile.split_k is not None


def _summed(
    given: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, pdl: bool, reduce: Reduce | None
) -> Tensor:
    """Returns residual + given @ weight.T [+ bias], [M, N].

    given: regrouped rows [M, K]. reduce: all-reduce that first sums the product over ranks. None: one rank.
    """
    tile = _tile(weight, len(given))
    if reduce is not None:
        return reduce(_own_sums(tile, given, weight, residual, pdl), bias, residual)
    out = torch.empty_like(residual)
    launch_and_sum(tile, Call(given, weight, out, bias, residual=residual), None, pdl)
    return out


def _own_sums(tile: Tma | Wide, given: Tensor, weight: Weight, like: Tensor, pdl: bool) -> Tensor:
    """Returns this rank's product in fp32, [M, N], as input of the all-reduce.

    If partial sums are added as a binary tree, without column factors, they are returned instead, [splits, M, N]. like:
    tensor [M, N] on the same device.
    """
    parts = _own_parts(tile, given, weight, like, pdl)
    if len(parts.sums) == 1:
        return parts.sums[0]
    if parts.is_tree and parts.factors is None:
        return parts.sums
    out = torch.empty_like(like, dtype=torch.float32)
    add_up(parts, None, None, None, None, out, pdl)
    return out


def _own_parts(tile: Tma | Wide, given: Tensor, weight: Weight, like: Tensor, pdl: bool) -> Parts:
    """Returns this rank's product in fp32 as partial sums [splits, M, N]; [1, M, N] if the kernel summed all of K.

    like: tensor [M, N] on the same device.
    """
    out = like.new_empty(1, *like.shape, dtype=torch.float32)
    return launch_tma(tile, Call(given, weight, out[0]), None, pdl) or Parts(out, 1)


def _added(
    given: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor,
    norm: Norm,
    next_weight: Weight,
    pdl: bool,
    reduce: Reduce | None,
) -> NextInput:
    """Computes x = residual + given @ weight.T [+ bias], then norm(x) in the layout that the next product reads.

    Args:
        given, weight, bias, residual: see `_summed`.
        norm: the norm before the next product.
        next_weight: weight of the next product. Its kernel decides the layout, see `permuted_for`.
        pdl: True to launch kernels before the previous kernel has ended (programmatic dependent launch).
        reduce: sums x over ranks. None: this process has the whole weight.
    """
    tile = _tile(weight, len(given))
    if isinstance(reduce, SharesRoom):
        # imported only where several GPUs are used
        from fastspec.kernels.product.rank_sums import elements_in_room, sum_ranks_permuted

        split = split_for(next_weight)
        cut = split.split_k, split.k_tile
        if (room := reduce.room_for(elements_in_room(*residual.shape, cut))) is not None:
            own, dtype = _own_parts(tile, given, weight, residual, pdl), GLUON_TYPE[residual.dtype]
            found = sum_ranks_permuted(own, bias, residual, norm, cut, dtype, pdl, room, reads_raised(next_weight))
            return NextInput(*found)
    if not _leaves_parts(tile, weight) or reduce is not None:
        return NextInput(*permuted_for(next_weight, _summed(given, weight, bias, residual, pdl, reduce), norm, pdl))
    parts = launch_tma(tile, Call(given, weight, residual, bias), None, pdl)
    return NextInput(*permuted_for(next_weight, residual, norm, pdl, parts, bias))
