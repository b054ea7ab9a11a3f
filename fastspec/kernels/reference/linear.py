"""Torch definition of the matrix products of a pass, and of the norms fused with them.

Row invariance: the bits of a row must not depend on how many rows run beside it. Libraries choose the algorithm of a
matrix product by its shape, so `linear` always gives them the same shape: rows go in zero-padded blocks of
`Tiling.rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastspec.kernels.common.weights import Weight
from fastspec.shapes import UNTILED, Tiling

_LAST_ID = 2**31 - 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics in fp32 (arXiv 1910.07467)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def norm(x: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None, centred: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight [+ bias] over the last axis, computed in fp32.

    Args:
        x: [..., K].
        weight: [K]. In x's dtype: x / sqrt(...) is rounded before it is multiplied, as in `rms_norm`. In fp32 beside
            another x: the result is rounded once, at its end.
        bias: [K], of weight's dtype.
        centred: the mean of x is taken off first, as a LayerNorm does (arXiv 1607.06450).
    """
    wide = x.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == x.dtype:
        normed = normed.to(x.dtype).float()
    normed = normed * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def add_norm(
    added: Tensor, x: Tensor, weight: Tensor, next_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """(x + norm(added), the next norm of that sum): what a layer with a norm after attention or MLP does there.

    Args:
        added, x: [..., K].
        weight, next_weight: as in `norm`; without the next one nothing comes of it.
    """
    total = x + norm(added, weight, eps)
    return total, None if next_weight is None else norm(total, next_weight, eps)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of a fused [..., 2 I] product, gate first; gelu by its tanh formula (arXiv 1606.08415)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu by its tanh formula."""
    if x.is_cuda:
        return F.gelu(x, approximate="tanh")
    # not F.gelu: a CPU rounds an element otherwise at the tensor's end than before, so by how many rows are beside it
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    tiling: Tiling = UNTILED,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A linear layer with what stands before and after it: [residual +] [silu_mul of] (norm(x) @ weight.T + bias).

    Args:
        x: [..., K].
        weight: [N, K]; with `gated` the N/2 gate rows first, then the N/2 up rows, as `Weight.unpack` has them.
        bias: [N].
        tiling: `tiling.rows` rows a product.
        norm: weight [K] and epsilon of an RMSNorm of x.
        residual: [..., N], added at the end.
        gated: the product is [gate; up], the result [..., N/2] is silu(gate) * up.
        gelu: then it is gelu(gate) * up, as `gelu_tanh_mul` has it.
        out_dtype: float32 keeps the accumulator as it is, whatever the weights' dtype; by default x's dtype.
    """
    if norm is not None:
        x = rms_norm(x, *norm)
    product = _product(x, weight.unpack(), bias, tiling, out_dtype)
    if gated:
        product = gelu_tanh_mul(product) if gelu else silu_mul(product)
    return product if residual is None else residual + product


def argmax(
    x: Tensor,
    weight: Weight,
    limit: int,
    tiling: Tiling = UNTILED,
    *,
    norm: tuple[Tensor, float] | None = None,
    work: Any,
    out: Tensor,
) -> None:
    """Writes to out int64 [R] which of the first `limit` fp32 logits of x [R, K] is the largest, lowest id first.

    If out is uint64 it gets keys, as `keys_of` makes them.
    """
    logits = linear(x, weight, None, tiling, norm=norm, out_dtype=torch.float32)
    if out.dtype == torch.uint64:
        out.view(torch.int64).copy_(keys_of(logits, limit))
    else:
        out.copy_(logits[..., :limit].argmax(dim=-1))


def keys_of(logits: Tensor, limit: int) -> Tensor:
    """int64 [R], by which the largest of the first `limit` logits can be found among several such parts of a row.

    A key grows with the largest of fp32 logits [R, W] and, between equal ones, falls with the id: 32 bits that order
    floats as integers (NaN above all, both zeros alike) over 31 bits of 2^31 - 1 - id. Where no id counts it is 0.
    """
    if limit < 1:
        return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    ids = logits[:, :limit].argmax(dim=-1)
    value = logits.gather(1, ids[:, None])[:, 0] + 0.0  # -0.0 is equal to 0.0
    bits = value.view(torch.int32).to(torch.int64)
    order = torch.where(bits < 0, ~bits, bits + 2**31) & 0xFFFFFFFF
    order = torch.where(value.isnan(), 0xFFFFFFFF, order)
    return (order << 31) | (_LAST_ID - ids)


class PartKeys(NamedTuple):
    """The largest logits of places whose ids lie in several parts, which is all that a greedy step asks of them.

    Attributes:
        keys: int64 [B, k+1, parts], of each part as `keys_of` makes them.
        width: ids of a part; they follow one another.
    """

    keys: Tensor
    width: int

    def best(self) -> Tensor:
        """int64 [B, k+1], the key of each place, of an id among all."""
        return _placed(self.keys.unbind(-1), self.width)

    def picks(self) -> Tensor:
        """int64 [B, k+1], the id of each place's largest logit."""
        return largest_of(self.keys.unbind(-1), self.width)

    def invalid(self) -> Tensor:
        """bool [B, k+1], places whose largest logit is NaN or infinite."""
        order = self.best() >> 31
        return (order >= INFINITE) | (order <= 0xFFFFFFFF - INFINITE)


INFINITE = 0x7F800000 + 2**31  # the upper part of a key of infinity; NaN lies above


def largest_of(keys: Sequence[Tensor], width: int) -> Tensor:
    """int64 [R], the id of each row's largest logit, by the keys int64 [R] of its parts of `width` ids (`keys_of`)."""
    return _LAST_ID - (_placed(keys, width) & _LAST_ID)


def _placed(keys: Sequence[Tensor], width: int) -> Tensor:
    """The largest of parts' keys, of ids among those of all parts."""
    return torch.stack([torch.where(key > 0, key - part * width, 0) for part, key in enumerate(keys)]).amax(0)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, out_dtype: torch.dtype | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    blocks = [flat] if tiling.rows is None else _row_blocks(flat, tiling.rows)
    if out_dtype is torch.float32:
        product = torch.cat([_product_fp32(rows, weight) for rows in blocks])
        product = product if bias is None else product + bias
    else:
        product = torch.cat([F.linear(rows, weight, bias) for rows in blocks])
    return product[: flat.shape[0]].view(*x.shape[:-1], -1)


def _row_blocks(x: Tensor, row_block: int) -> list[Tensor]:
    """Rows of x [R, K] as zero-padded blocks [row_block, K]."""
    return list(F.pad(x, (0, 0, 0, -x.shape[0] % row_block)).split(row_block))


def _product_fp32(rows: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype == torch.float32:
        return F.linear(rows, weight)
    if weight.is_cuda:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    # the CPU has no mixed-output product: widen the weights by slices, so that no fp32 copy of all of them exists
    return torch.cat([F.linear(rows.float(), part.float()) for part in weight.split(8192)], dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [..., 2 I] product, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def tile_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` with a weight [N, K] as rows; rows of x taken all at once."""
    return linear(x, Weight(weight), bias, norm=norm, residual=residual, gated=gated, out_dtype=out_dtype)


def tile_argmax(x: Tensor, weight: Tensor, limit: int, *, norm: tuple[Tensor, float] | None = None) -> Tensor:
    """int64 [R]: the lowest id of the largest of `linear`'s first `limit` logits in fp32; NaN counts as largest."""
    return linear(x, Weight(weight), norm=norm, out_dtype=torch.float32)[:, :limit].argmax(dim=-1)


def prefill_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` with a packed weight; `gated` goes with one whose rows are interleaved."""
    return linear(x, weight, bias, norm=norm, residual=residual, gated=gated, out_dtype=out_dtype)


def packed_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` with a packed weight, computed in fp32 (in fp64 for fp64 operands) and rounded once, at the end."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.to(wide)
    if norm is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm[1]) * norm[0].to(wide)
    out = F.linear(rows, weight.unpack().to(wide), None if bias is None else bias.to(wide))
    if gated:
        out = gelu_tanh_mul(out) if gelu else silu_mul(out)
    if residual is not None:
        out = out + residual.to(wide)
    return out.to(out_dtype or x.dtype)


def packed_argmax(x: Tensor, weight: Weight, limit: int, *, norm: tuple[Tensor, float] | None = None) -> Tensor:
    """int64 [R]: the lowest id of the largest of a packed head's first `limit` logits; NaN counts as the largest."""
    return packed_linear(x, weight, norm=norm, out_dtype=torch.float32)[:, :limit].argmax(dim=-1)
