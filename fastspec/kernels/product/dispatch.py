"""Product of a decode pass's rows with a packed weight, fused with the norm before it and the residual sum after it.

    out = act(rms_norm(x) weight^T + bias) + residual,    if gated: act(gate, up) = silu(gate) * up, or gelu(gate) * up

| argument | shape, dtype                            | notes                                             |
|----------|-----------------------------------------|---------------------------------------------------|
| x        | [..., K] bf16 or fp16                   | any number of rows                                |
| weight   | `Weight` [N, K] in x's dtype            | packed or codes; gated if the call is gated       |
| bias     | [N], x's dtype                          | not interleaved: the N/2 values of the gate first |
| norm     | (gamma [K] in x's dtype, eps)           | RMSNorm of x, arXiv 1910.07467                    |
| residual | [..., N or N/2], x's dtype              |                                                   |
| out      | [..., N or N/2], x's dtype or fp32      | rounded once, from fp32                           |

Products accumulate in fp32. With a norm the operands are x * gamma, each rounded once. The squares of x are summed in
fp32, and a row's sums of products are multiplied by 1 / sqrt(mean(x^2) + eps) at the end. In fp16, x * gamma must not
overflow.

Batch invariance. The sum over K is split into S partial sums. Each is over every S-th K tile of KT values, in ascending
order. (For weights with `tree` it is over a contiguous part of K.) The partial sums are then added in a fixed order
(`plan.Split`). This split depends only on the weight. So a row's bits do not depend on other rows, on the kernel or on
its tiles.

For greedy decoding, the kernel that computes the logits of a packed LM head also finds the largest logit of each row.
The logits are not stored:

    out[r] = argmax_{id < limit} logits[r, id],    logits = rms_norm(x) weight^T in fp32, equal to `packed_linear`

| argument | shape, dtype                    | notes                                            |
|----------|---------------------------------|--------------------------------------------------|
| x        | [R, K] bf16 or fp16             |                                                  |
| weight   | `Weight` [V, K] in x's dtype    | packed, not gated                                |
| scratch  | int64 [R + 1] or more           | zero before and after; for one launch at a time  |
| out      | int64 [R], any stride           | if uint64: keys, see `reference.linear.keys_of`  |

Of equal logits the lowest id is taken, and NaN counts as the largest, as in torch.argmax. For each row of x, a CTA
finds the largest logit of its weight rows. It combines this logit and its id, as one integer key, with the scratch by
an atomic maximum. So the order of CTAs does not matter. The last CTA writes the ids and clears the scratch.
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
    """Returns act(rms_norm(x) @ weight.T + bias) + residual, as `Ops.packed_linear`. The table above has the shapes.

    Args:
        x, weight, bias, norm, residual: see the table above. Operations whose bias, norm or residual is None
            are left out.
        gated: True if act is silu(gate) * up. Before packing, the first half of the weight's N rows gives gate, and the
            second half gives up.
        gelu: True for gelu instead of silu in a gated product.
        out_dtype: dtype of the result: x's, or float32. Default: x's.
        pdl: True to launch with programmatic dependent launch: the kernels may start before the previous kernel ends,
            and let the next one start early. All kernels of the pass must then be launched with it. Needs sm_90.

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
    ids: Tensor | None = None,
) -> Tensor:
    """Returns the id of the largest logit of each row, as `Ops.packed_argmax`. The second table above has the shapes.

    Args:
        x, weight: operands of the logits. `weight` is the LM head.
        limit: only ids below it are compared. At least 1 for ids; may be 0 for keys.
        scratch: int64 zeros. Calls that may run at the same time need scratch of their own.
        norm: weight and epsilon of an RMSNorm of x. None: no norm.
        pdl: see `packed_linear`.
        out: int64 [R] for ids, or uint64 [R] for keys. None: a new tensor of ids.
        ids: int64 [V], the id of each logit; several may have an id from `limit` on. None: its place.

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
    if ids is not None:
        _check("ids", ids, weight.shape[:1], torch.int64)
    if len(rows) > 0:
        run(Call(rows, weight, out, norm=norm, argmax_keys=scratch, limit=limit, ids=ids), pdl)
    return out


def checked_rows(x: Tensor, weight: Weight, norm: tuple[Tensor, float] | None) -> Tensor:
    """Checks the operands of a packed product, and returns x [..., K] as contiguous rows [M, K].

    Raises:
        TypeError: dtypes that do not fit each other.
        ValueError: shapes that do not fit each other, or a weight that the packed products cannot read.
    """
    if weight.format == "rows":
        raise ValueError(f"weight is stored as {weight.format}; pack it first, with `Weight.pack`")
    if weight.format == "codes" and x.dtype != torch.bfloat16:
        raise TypeError(f"x is {x.dtype}; with a quantised weight it must be bfloat16")
    if x.dtype not in GLUON_TYPE or weight.dtype != x.dtype:
        raise TypeError(f"x is {x.dtype} and weight {weight.dtype}; both must be bfloat16 or both float16")
    if weight.tree and norm is not None:
        raise ValueError("weight has tree=True, so this product can have no norm in front; norm x first")
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
        raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
