"""Product with a packed weight for the few rows of a decode pass, fused with the norm before it and the sum after it.

    out = act(rms_norm(x) weight^T + bias) + residual,    if gated: act(gate, up) = silu(gate) * up, or with gelu

| argument | shape, dtype                            | notes                                             |
|----------|-----------------------------------------|---------------------------------------------------|
| x        | [..., K] bf16 or fp16                   | any number of rows                                |
| weight   | `Weight` [N, K] in x's dtype            | packed or codes; gated if the call is             |
| bias     | [N], x's dtype                          | gate first, as in the weight before packing       |
| norm     | (gamma [K] in x's dtype, eps)           | RMSNorm of x, arXiv 1910.07467                    |
| residual | [..., N or N/2], x's dtype              |                                                   |
| out      | [..., N or N/2], x's dtype or fp32      | rounded once, from fp32                           |

Products accumulate in fp32. With a norm the operands are x * gamma, each rounded once. Meanwhile the squares of x are
summed in fp32, and the sum of products is scaled at the end. In fp16 x * gamma must be in fp16's range.

Row invariance: a sum over K consists of S sums, each over every S-th K tile of KT values in ascending order. These are
then added in order. S and KT depend only on the weight's shape. So a row's bits do not depend on other rows, on the
kernel or on its tiles.

The largest logit of a packed head is found in the kernel that computes the logits, which are not stored:

    out[r] = argmax_{id < limit} logits[r, id],    logits = rms_norm(x) weight^T in fp32, equal to `packed_linear`

| argument | shape, dtype                    | notes                                            |
|----------|---------------------------------|--------------------------------------------------|
| x        | [R, K] bf16 or fp16             |                                                  |
| weight   | `Weight` [V, K] in x's dtype    | packed, not gated                                |
| scratch  | int64 [R + 1] or more           | zero before and after; for one launch at a time  |
| out      | int64 [R], any stride           | uint64: the keys themselves, see `reference.keys_of` |

Of equal logits the lowest id is taken, and NaN counts as the largest, as in torch.argmax. Each CTA enters the largest
logit of its weight rows by an integer maximum per row of x. So the order of CTAs does not matter. The last CTA writes
the ids and clears the scratch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.common.weights import Weight
from fastspec.kernels.product.launch import GLUON_TYPE, Call, run


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
    pdl: bool,
) -> Tensor:
    """Computes `Ops.packed_linear` with a Triton kernel.

    Args:
        pdl: True if the kernels may start before the previous kernel ends, and let the next one start early. All
            kernels of the chain must then be launched with it. Needs sm_90.

    Raises:
        TypeError: dtypes that do not fit each other.
        ValueError: shapes that do not fit each other, or a weight that is not packed.
    """
    rows = checked_rows(x, weight, norm)
    n, _ = weight.shape
    width = n // 2 if gated else n
    if out_dtype not in (None, x.dtype, torch.float32):
        raise TypeError(f"out_dtype is {out_dtype}; it can be x's own, {x.dtype}, or float32")
    if bias is not None:
        _check("bias", bias, (n,), x.dtype)
        bias = bias.contiguous()
    if residual is not None:
        _check("residual", residual, (*x.shape[:-1], width), x.dtype)
        residual = residual.contiguous()
    out = x.new_empty(*x.shape[:-1], width, dtype=out_dtype or x.dtype)
    if rows.shape[0] > 0:
        run(Call(rows, weight, out, bias, norm, residual, gated=gated, gelu=gelu), pdl)
    return out


def packed_argmax(
    x: Tensor,
    weight: Weight,
    limit: int,
    scratch: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    pdl: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Computes `Ops.packed_argmax` with a Triton kernel. The result is written to `out`, if given.

    Args:
        limit: only ids below it count. At least 1 for ids; may be 0 for keys.
        scratch: calls that may run at the same time need different ones.
        pdl: see `packed_linear`.

    Raises:
        TypeError: dtypes that do not fit each other.
        ValueError: shapes that do not fit each other, or a limit below 1.
    """
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [R, K]")
    rows = checked_rows(x, weight, norm)
    if limit < 1 and (out is None or out.dtype != torch.uint64):
        raise ValueError(f"limit is {limit}; at least one id must count")
    if scratch.dtype != torch.int64 or scratch.numel() <= len(rows):
        raise ValueError(f"scratch is {scratch.dtype} {tuple(scratch.shape)}; wanted int64 [{len(rows) + 1}] or longer")
    if out is None:
        out = torch.empty(len(rows), dtype=torch.int64, device=x.device)
    if out.shape != (len(rows),) or out.dtype not in (torch.int64, torch.uint64):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; it must be int64 [{len(rows)}]")
    if len(rows) > 0:
        run(Call(rows, weight, out, norm=norm, argmax_keys=scratch, limit=limit), pdl)
    return out


def checked_rows(x: Tensor, weight: Weight, norm: tuple[Tensor, float] | None) -> Tensor:
    """Returns x [..., K] as contiguous rows [M, K]. Raises if the arguments do not fit each other."""
    if weight.format == "rows":
        raise ValueError(f"weight is stored as {weight.format}; pack it first, with `Weight.pack`")
    if weight.format == "codes" and x.dtype != torch.bfloat16:
        raise TypeError(f"x is {x.dtype}; what quantised weights multiply must be bfloat16")
    if x.dtype not in GLUON_TYPE or weight.dtype != x.dtype:
        raise TypeError(f"x is {x.dtype} and weight {weight.dtype}; both must be bfloat16 or both float16")
    if weight.tree and norm is not None:
        raise ValueError("weight's sum over K is a tree, which has no norm in front; norm x first")
    _, k = weight.shape
    if k % 64 != 0:
        raise ValueError(f"weight has K = {k}; packed products need a multiple of 64, see `packing.can_pack`")
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} columns and weight {k}; they must be equal")
    if norm is not None:
        _check("norm's weight", norm[0], (k,), x.dtype)
        if not norm[0].is_contiguous():
            raise ValueError("norm's weight must be contiguous")
    return x.reshape(-1, k).contiguous()


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with this x and weight it must be {shape}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}; it must be x's dtype, {dtype}")
