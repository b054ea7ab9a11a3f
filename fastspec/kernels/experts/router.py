"""RMSNorm before the router of an MoE layer, and the router's product, in one launch for the few rows of a decode pass.

| argument | shape, dtype                      | notes                                            |
|----------|-----------------------------------|--------------------------------------------------|
| x        | [..., K] bf16, fp16 or fp32       | any number of rows, K up to `MAX_WIDTH`          |
| weight   | [K], x's dtype or fp32            | contiguous; see `reference.norm` for its meaning |
| router   | `Weight` [N, K] in x's dtype      | stored as rows                                   |
| bias     | [N], x's dtype                    | or None                                          |

A CTA loads BLOCK_N rows of the router before it waits for x. Then it computes their logits for one row of x after the
other. The order of the sum over K depends only on K, so a row's bits do not depend on other rows.
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
from fastspec.kernels.norm import normed_row, weight_of

MAX_WIDTH = 8192  # largest K
BLOCK_N = 8  # rows of the router in a CTA
PROGRAMS = 1024  # largest number of CTAs with one row of x each; above it, a CTA has several rows


@triton.jit(do_not_specialize=["rows", "each"])
def router_kernel(
    x_ptr,
    weight_ptr,
    router_ptr,
    bias_ptr,  # or None
    normed_ptr,  # [R, K]
    logits_ptr,  # fp32 [R, N]
    eps,
    rows,  # R
    each,  # rows of x in a CTA
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    ROUND_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes BLOCK_N of the router's logits, for each of `each` rows of x, in each CTA.

    The CTA with a row's first logits also stores the normed row.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    last = tl.minimum(n, N - 1)
    router = tl.load(router_ptr + last[:, None] * K + k[None, :], mask=inside[None, :], other=0.0)
    weight = weight_of(weight_ptr, k, inside)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + last).to(tl.float32)
    if PDL:
        gdc_wait()
    first = tl.program_id(1) * each
    kind: tl.constexpr = normed_ptr.dtype.element_ty
    keeps = inside & (tl.program_id(0) == 0)
    x_ptr += first.to(tl.int64) * K
    normed_ptr += first.to(tl.int64) * K
    logits_ptr += first.to(tl.int64) * N
    for _row in range(first, tl.minimum(first + each, rows)):
        x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
        normed = normed_row(x, weight, K, eps, ROUND_FIRST, kind).to(kind)
        tl.store(normed_ptr + k, normed, mask=keeps)
        logits = tl.sum(router.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
        if bias_ptr is not None:
            logits += bias
        tl.store(logits_ptr + n, logits, mask=n < N)
        x_ptr += K
        normed_ptr += K
        logits_ptr += N


def normed_logits(x: Tensor, weight: Tensor, eps: float, router: Weight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes the RMSNorm of x, and the router's logits of the normed x, as `Ops.normed_logits`.

    Args:
        x, weight, eps, router, bias: see `Ops.normed_logits`.

    Returns:
        The normed x, and logits fp32 [..., N].

    Raises:
        ValueError: a shape, dtype or layout other than in the table above.
    """
    (n, k), flat = router.shape, x.reshape(-1, x.shape[-1]).contiguous()
    if router.format != "rows" or router.dtype != x.dtype or x.shape[-1] != k or not k <= MAX_WIDTH:
        raise ValueError(
            f"x is {told(x)}, the router {router.dtype} {[n, k]} stored as {router.format}; wanted [..., K] and rows "
            f"[N, K] of one dtype, K up to {MAX_WIDTH}"
        )
    check("weight", weight, (k,))
    if bias is not None:
        check("bias", bias, (n,), x.dtype)
    rows, tiles = len(flat), triton.cdiv(n, BLOCK_N)
    normed = torch.empty_like(flat)
    logits = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    each = triton.cdiv(rows * tiles, PROGRAMS)
    if rows:
        launch(
            router_kernel, (tiles, triton.cdiv(rows, each)),
            flat, weight, router.data, bias, normed, logits, eps, rows, each,
            N=n, K=k, BLOCK_N=BLOCK_N, BLOCK_K=block, ROUND_FIRST=weight.dtype == x.dtype,
            num_warps=min(16, max(4, block // 256)), enable_fp_fusion=False,
        )  # fmt: skip
    return normed.view(x.shape), logits.view(*x.shape[:-1], n)
