"""Input of a learned drafter's layer: the RMSNorms of a token's embedding and of a hidden state, concatenated.

| argument | shape, dtype                          | notes                                                       |
|----------|---------------------------------------|-------------------------------------------------------------|
| table    | `Weight` [V, K]: rows or packed       | contiguous, x's dtype                                       |
| ids      | [B, Q] int64                          | contiguous; clamped to the table                            |
| x        | [B, Q, K] bf16, fp16 or fp32          | contiguous, K up to `norm.MAX_WIDTH`                        |
| norms    | two of [K], x's dtype or fp32         | contiguous, same dtype; weights for the embedding and for x |

One launch replaces four: lookup of embeddings, two norms, and concatenation. A CTA norms one embedding or one row of x,
with the same bits as norm.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, told
from fastspec.kernels.common.launch import launch
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.embed import place_of
from fastspec.kernels.norm import ELEMENTS, MAX_WIDTH


@triton.jit
def _joined_kernel(
    table_ptr,
    ids_ptr,
    x_ptr,
    embed_norm_ptr,
    x_norm_ptr,
    out_ptr,
    eps,
    rows,
    width,
    X_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes one half of a token's output row: the RMSNorm of its embedding, or the RMSNorm of its row of x.

    If program_id(1) is 0, this is the embedding; if it is 1, the row of x. X_FIRST: True if the norm of x is the first
    half. PACKED: see `embed.place_of`. ROUND_FIRST: see `norm.normed_row`.
    """
    if PDL:
        # wait first, as in `embed`, because a pass begins with this kernel
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    of_x = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < width
    if of_x == 1:
        values = tl.load(x_ptr + row * width + at, mask=inside, other=0.0).to(tl.float32)
        gamma = tl.load(x_norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    else:
        token = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), rows - 1).to(tl.int64)
        values = tl.load(table_ptr + place_of(token, at, width, PACKED), mask=inside, other=0.0).to(tl.float32)
        gamma = tl.load(embed_norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    normed = values * (1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / width + eps))
    if ROUND_FIRST:
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    half = 1 - of_x if X_FIRST else of_x
    out = out_ptr + (2 * row + half) * width + at
    tl.store(out, (normed * gamma).to(out_ptr.dtype.element_ty), mask=inside)


def joined_norms(
    table: Weight, ids: Tensor, x: Tensor, norms: tuple[Tensor, Tensor], eps: float, *, x_first: bool = False
) -> Tensor:
    """Concatenates RMSNorms of the embeddings of ids and of x, as `Ops.joined_norms`, with a Triton kernel.

    Args:
        table: embedding table, not quantised.
        ids, x, norms, eps, x_first: see `Ops.joined_norms`.

    Raises:
        ValueError: a shape, dtype or layout differs from the table at the top of this file.
    """
    rows, width = table.shape
    if table.codes is not None or table.dtype != x.dtype or not table.data.is_contiguous() or width > MAX_WIDTH:
        raise ValueError(
            f"the embedding is {told(table.data)}, x {told(x)}; wanted a contiguous embedding without quantisation, in "
            f"x's dtype, of width up to {MAX_WIDTH}"
        )
    check("ids", ids, ids.shape, torch.int64)
    check("x", x, (*ids.shape, width), x.dtype)
    for norm in norms:
        check("norm", norm, (width,), norms[0].dtype)
    out = torch.empty(*ids.shape, 2 * width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    launch(
        _joined_kernel,
        (ids.numel(), 2),
        table.data,
        ids,
        x,
        *norms,
        out,
        eps,
        rows,
        width,
        X_FIRST=x_first,
        PACKED=table.format == "packed",
        ROUND_FIRST=norms[0].dtype == x.dtype,
        BLOCK=block,
        num_warps=min(16, max(1, block // ELEMENTS)),
        enable_fp_fusion=False,
    )
    return out
