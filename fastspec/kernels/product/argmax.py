"""Finds the id of the largest logit of a packed head in the kernel that computes the logits. Logits are not stored.

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
from fastspec.kernels.product.dispatch import checked_rows, run
from fastspec.kernels.product.launch import Call


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
