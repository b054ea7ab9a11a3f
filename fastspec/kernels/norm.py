"""RMSNorm or LayerNorm of rows in one launch, and `add_norm`: norm, residual sum, and the next norm in one launch.

| argument     | shape, dtype                          | notes                                              |
|--------------|---------------------------------------|----------------------------------------------------|
| x            | [..., K] bf16, fp16 or fp32           | any strides, K up to MAX_WIDTH                     |
| weight, bias | [K], x's dtype or fp32, both the same | contiguous; see `reference.norm` for their meaning |

A CTA norms one row. The order of its sum depends only on K, so a row's bits do not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import told
from fastspec.kernels.common.launch import launch

MAX_WIDTH = 65536
ELEMENTS = 512  # elements of a row per warp, with at most 16 warps


@triton.jit
def weight_of(weight_ptr, at, inside):
    """Loads a norm's weight at offsets `at` in fp32. `inside` masks valid offsets.

    No kernel writes the weight, so callers load it before they wait for the previous kernel.
    """
    return tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def normed_row(x, weight, width, eps, ROUND_FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """Computes RMSNorm of a row in fp32. The caller rounds the result to the output's dtype.

    `x` is the row in fp32, with zeros beyond its `width` elements. `weight` is the result of `weight_of`.
    ROUND_FIRST: True to round the row to DTYPE before it is multiplied by the weight.
    """
    normed = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / width + eps))
    if ROUND_FIRST:
        normed = normed.to(DTYPE).to(tl.float32)
    return normed * weight


@triton.jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    width,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the norm of one row of x [rows, width]. CENTRED: True for LayerNorm, False for RMSNorm.

    BIAS: True if `bias_ptr` is added to the result. ROUND_FIRST: see `normed_row`.
    """
    if PDL:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = weight_of(weight_ptr, at, inside)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
    normed = normed_row(x, weight, width, eps, ROUND_FIRST, out_ptr.dtype.element_ty)
    if BIAS:
        normed = normed + tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + at, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_kernel(
    added_ptr,
    x_ptr,
    weight_ptr,
    next_ptr,  # or None
    sum_ptr,
    out_ptr,
    eps,
    width,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes sum = x + norm(added) of one row, and out = next_norm(sum). Without `next_ptr`, `out` is not written.

    ROUND_FIRST: see `normed_row`.
    """
    if PDL:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = weight_of(weight_ptr, at, inside)
    if next_ptr is not None:
        next_weight = weight_of(next_ptr, at, inside)
    if PDL:
        gdc_wait()
    kind: tl.constexpr = sum_ptr.dtype.element_ty
    added = tl.load(added_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    x += normed_row(added, weight, width, eps, ROUND_FIRST, kind).to(kind).to(tl.float32)
    tl.store(sum_ptr + start + at, x.to(kind), mask=inside)
    if next_ptr is not None:
        normed = normed_row(x.to(kind).to(tl.float32), next_weight, width, eps, ROUND_FIRST, kind)
        tl.store(out_ptr + start + at, normed.to(kind), mask=inside)


def _warps(block: int) -> int:
    return min(16, max(1, block // ELEMENTS))


def norm(x: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None, centred: bool = False) -> Tensor:
    """Computes RMSNorm, or LayerNorm if `centred`, over the last axis, as `Ops.norm`, with a Triton kernel.

    Args:
        x, weight, eps, bias, centred: see `Ops.norm`.

    Raises:
        ValueError: a shape, dtype or layout differs from the table at the top of this file.
    """
    width, x = x.shape[-1], x.contiguous()  # the last of several positions is a view with strides
    if not 0 < width <= MAX_WIDTH or weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(
            f"x is {told(x)}, weight {told(weight)}; wanted [..., K] and contiguous [K], K up to {MAX_WIDTH}"
        )
    if bias is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias is {told(bias)}; wanted it as the weight, {told(weight)}")
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    launch(
        _norm_kernel,
        (x.numel() // width,),
        x,
        weight,
        weight if bias is None else bias,
        out,
        eps,
        width,
        CENTRED=centred,
        BIAS=bias is not None,
        ROUND_FIRST=weight.dtype == x.dtype,
        BLOCK=block,
        num_warps=_warps(block),
        enable_fp_fusion=False,
    )
    return out


def add_norm(
    added: Tensor, x: Tensor, weight: Tensor, next_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Computes sum = x + norm(added), and the next norm of the sum, as `Ops.add_norm`, with one Triton kernel.

    Args:
        added, x, weight, next_weight, eps: see `Ops.add_norm`.

    Returns:
        The sum, and its norm with `next_weight`. The norm is None if `next_weight` is None.

    Raises:
        ValueError: a shape, dtype or layout differs from the table at the top of this file, or tensors do not fit each
            other.
    """
    width, added, x = x.shape[-1], added.contiguous(), x.contiguous()
    if not 0 < width <= MAX_WIDTH or weight.shape != (width,) or added.shape != x.shape or added.dtype != x.dtype:
        raise ValueError(
            f"added is {told(added)}, x {told(x)}, weight {told(weight)}; wanted [..., K] twice and [K], K up to "
            f"{MAX_WIDTH}"
        )
    if next_weight is not None and (next_weight.shape != weight.shape or next_weight.dtype != weight.dtype):
        raise ValueError(f"next_weight is {told(next_weight)}; wanted it as the weight, {told(weight)}")
    total, out = torch.empty_like(x), None if next_weight is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    launch(
        _add_norm_kernel,
        (x.numel() // width,),
        *(added, x, weight.contiguous(), None if next_weight is None else next_weight.contiguous(), total, out),
        *(eps, width),
        ROUND_FIRST=weight.dtype == x.dtype,
        BLOCK=block,
        num_warps=_warps(block),
        enable_fp_fusion=False,
    )
    return total, out
