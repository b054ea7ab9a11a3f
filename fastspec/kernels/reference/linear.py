"""Torch definition of the matrix products of a forward pass, and of norms and activations around them.

Batch invariance: a row's bits do not depend on the number of rows beside it. Libraries choose the algorithm of a matrix
product by its shape. So `linear` multiplies zero-padded blocks of `Tiling.rows` rows, which all have one shape.
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
    """Computes RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).

    x / sqrt(...) is computed in fp32 and rounded to x's dtype before it is multiplied by the weight.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def norm(x: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None, centred: bool = False) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) * weight [+ bias] over the last axis in fp32 (RMSNorm, arXiv 1910.07467).

    Args:
        x: [..., K].
        weight: [K]. If it has x's dtype, x / sqrt(...) is rounded to it before the multiplication. If it is fp32 and x
            is not, the result is rounded once, at the end.
        eps: epsilon.
        bias: [K], weight's dtype.
        centred: True to subtract the mean of x first, as LayerNorm does (arXiv 1607.06450).

    Returns:
        Shape and dtype of x.
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
    """Computes sum = x + norm(added) and norm(sum), for models that norm the outputs of attention and MLP.

    Args:
        added: [..., K], output of attention or of the MLP.
        x: [..., K], the residual stream.
        weight: [K], weight of the norm of `added`; see `norm`.
        next_weight: [K], weight of the norm of the sum. None: this norm is not computed.
        eps: epsilon of both norms.

    Returns:
        The sum, and its norm or None. Shape and dtype of x.
    """
    total = x + norm(added, weight, eps)
    return total, None if next_weight is None else norm(total, next_weight, eps)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Computes gelu(gate) * up of a fused gate and up projection, with the tanh formula of GELU (arXiv 1606.08415).

    Args:
        gate_up: [..., 2 I], gate first.

    Returns:
        [..., I] in gate_up's dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def gelu(x: Tensor) -> Tensor:
    """Computes GELU of each element by its exact formula (arXiv 1606.08415), in fp32, rounded once."""
    wide = x.float()
    return (0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Computes GELU of each element by its tanh formula."""
    if x.is_cuda:
        return F.gelu(x, approximate="tanh")
    # not F.gelu: on a CPU it rounds the last elements of a tensor in another way, so bits would depend on other rows
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
    """Computes a linear layer, with norm, activation and residual: [residual +] [silu_mul of] (norm(x) W^T + bias).

    Args:
        x: [..., K].
        weight: W [N, K]. With `gated` it has N/2 gate rows, then N/2 up rows, in the order of `Weight.unpack`.
        bias: [N].
        tiling: `tiling.rows` rows are multiplied in one matrix product.
        norm: weight [K] and epsilon of an RMSNorm of x, see `rms_norm`. None: x is not normed.
        residual: [..., N], added at the end.
        gated: True if x W^T is [gate | up]. The result is silu(gate) * up, [..., N/2].
        gelu: with `gated`, True for gelu(gate) * up, see `gelu_tanh_mul`.
        out_dtype: torch.float32 returns the unrounded accumulator. None: x's dtype.

    Returns:
        [..., N], or [..., N/2] with `gated`.
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
    ids: Tensor | None = None,
) -> None:
    """Computes the argmax of each logits row: the id of the largest logit, the lowest id if several are equal.

    Args:
        x: [R, K], hidden states.
        weight: [V, K], the LM head. Logits are in fp32.
        limit: number of ids that count. Ids from `limit` on are padding of the vocabulary.
        tiling: `tiling.rows` rows are multiplied in one matrix product.
        norm: weight [K] and epsilon of an RMSNorm of x, see `rms_norm`. None: x is not normed.
        work: scratch memory from `Ops.workspace`. Torch needs none.
        out: output. If it is int64 [R], ids are written; if uint64 [R], keys of the largest logits (`keys_of`).
        ids: int64 [V], the id of each logit. Ids below `limit` are different. None: a logit's id is its place.
    """
    pick(linear(x, weight, None, tiling, norm=norm, out_dtype=torch.float32), limit, out, ids)


def pick(logits: Tensor, limit: int, out: Tensor, ids: Tensor | None = None) -> None:
    """Writes the argmax of logits rows [R, V] to `out`. For `limit`, `out` and `ids` see `argmax`."""
    if out.dtype == torch.uint64:
        out.view(torch.int64).copy_(keys_of(logits, limit, ids))
    else:
        out.copy_(logits[..., :limit].argmax(dim=-1) if ids is None else _largest(logits, limit, ids)[1])


def _largest(logits: Tensor, limit: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest logit of each row whose id is below `limit`, and its id; of equal logits the lowest id.

    ids: int64 [V], the id of each logit.
    """
    counted = ids < limit
    value = torch.where(counted, logits, -torch.inf).amax(dim=-1, keepdim=True)
    largest = counted & ((logits == value) | (logits.isnan() & value.isnan()))
    return value[..., 0], torch.where(largest, ids, _LAST_ID).amin(dim=-1)


def keys_of(logits: Tensor, limit: int, ids: Tensor | None = None) -> Tensor:
    """Returns a key for each row, int64 [R]: one integer that contains the row's largest logit and its id.

    If a vocabulary is divided between ranks, the largest key of all ranks has the id of the largest logit.

    A key has 63 bits. The upper 32 bits are the fp32 logit as an integer with the same order. NaN is above all numbers,
    and both zeros are equal. The lower 31 bits are 2^31 - 1 - id: of equal logits the lowest id has the largest key.

    Args:
        logits: fp32 [R, W], the logits of one rank's W ids.
        limit: number of ids that count. Below 1 every key is 0.
        ids: see `argmax`.
    """
    if limit < 1:
        return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    if ids is None:
        found = logits[:, :limit].argmax(dim=-1)
        value = logits.gather(1, found[:, None])[:, 0]
    else:
        value, found = _largest(logits, limit, ids)
    value = value + 0.0  # -0.0 is equal to 0.0
    bits = value.view(torch.int32).to(torch.int64)
    order = torch.where(bits < 0, ~bits, bits + 2**31) & 0xFFFFFFFF
    order = torch.where(value.isnan(), 0xFFFFFFFF, order)
    return (order << 31) | (_LAST_ID - found)


class PartKeys(NamedTuple):
    """Largest logits of a vocabulary that is divided into parts, one for each rank.

    Greedy verification needs nothing else of the logits.

    Attributes:
        keys: int64 [B, k+1, parts], results of `keys_of` for each scored position and each part.
        width: number of ids of each part. Part i has the ids from i * width on.
    """

    keys: Tensor
    width: int

    def best(self) -> Tensor:
        """Returns the largest key of each scored position, int64 [B, k+1], with its id in the whole vocabulary."""
        return _placed(self.keys.unbind(-1), self.width)

    def picks(self) -> Tensor:
        """Returns the id of the largest logit of each scored position, int64 [B, k+1]."""
        return largest_of(self.keys.unbind(-1), self.width)

    def invalid(self) -> Tensor:
        """Returns bool [B, k+1], True for scored positions whose largest logit is NaN or infinite."""
        order = self.best() >> 31
        return (order >= INFINITE) | (order <= 0xFFFFFFFF - INFINITE)


INFINITE = 0x7F800000 + 2**31  # the upper 32 bits of a key for the logit infinity; those of NaN are larger


def largest_of(keys: Sequence[Tensor], width: int) -> Tensor:
    """Returns the id of each row's largest logit in the whole vocabulary, int64 [R].

    Args:
        keys: int64 [R] for each part of the vocabulary, the results of `keys_of`.
        width: number of ids of a part.
    """
    return _LAST_ID - (_placed(keys, width) & _LAST_ID)


def _placed(keys: Sequence[Tensor], width: int) -> Tensor:
    """Returns the largest key over all parts, converted to its id in the whole vocabulary.

    For the arguments see `largest_of`.
    """
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
    """Splits x [R, K] into blocks [row_block, K], the last one padded with zeros."""
    return list(F.pad(x, (0, 0, 0, -x.shape[0] % row_block)).split(row_block))


def _product_fp32(rows: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype == torch.float32:
        return F.linear(rows, weight)
    if weight.is_cuda:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    # the CPU has no product of 16 bits with fp32 output. Weights are widened in slices: a whole copy would be large
    return torch.cat([F.linear(rows.float(), part.float()) for part in weight.split(8192)], dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Computes silu(gate) * up, [..., I], of a fused gate and up projection [..., 2 I], gate first."""
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
    """Computes `linear` with a row-major weight [N, K], and with all rows of x in one matrix product."""
    return linear(x, Weight(weight), bias, norm=norm, residual=residual, gated=gated, out_dtype=out_dtype)


def tile_argmax(x: Tensor, weight: Tensor, limit: int, *, norm: tuple[Tensor, float] | None = None) -> Tensor:
    """Returns `argmax` ids, int64 [R], for a row-major head [V, K]. NaN counts as the largest logit."""
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
    """Computes `linear` with a packed or quantised weight. If `gated` is True, `weight.gated` is True, too."""
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
    """Computes `linear` with a packed or quantised weight, rounding only the result.

    All intermediate values are in fp32, or in fp64 if x is.
    """
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
    """Returns `argmax` ids, int64 [R], for a packed or quantised head [V, K]."""
    return packed_linear(x, weight, norm=norm, out_dtype=torch.float32)[:, :limit].argmax(dim=-1)
