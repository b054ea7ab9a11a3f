"""Gated RMSNorm of the output of a recurrent layer, and gate of the output of attention. Each is one launch.

    gated_norm:  rmsnorm(x) * weight * silu(gate), or sigmoid(gate) instead of silu      gated:  x * sigmoid(gate)

| argument | shape, dtype                         | notes                                             |
|----------|--------------------------------------|---------------------------------------------------|
| x        | [B, Q, heads * D] bf16, fp16 or fp32 | contiguous                                        |
| gate     | shape and dtype of x                 | its last axis contiguous, tokens at equal strides |
| weight   | [D], x's dtype                       | contiguous; weight of the norm                    |

The norm is over the D elements of a head. A CTA computes a part of one token, so a row's bits do not depend on others.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import told
from fastspec.kernels.common.launch import launch

_ELEMENTS = 1024  # elements in a CTA


@triton.jit
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes `gated_norm` for GROUP heads of one token. The grid is (token, group of heads)."""
    if PDL:
        gdc_launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    at = tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (at < DIM)[None, :]
    within = head[:, None] * DIM + at[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + at, mask=at < DIM, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + token * (HEADS * DIM) + within, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + within, mask=inside, other=0.0).to(tl.float32)
    normed = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / DIM + eps))[:, None]
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if SIGMOID:
        out = weight[None, :] * normed * opened
    else:
        out = (normed.to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32) * (gate * opened)
    tl.store(out_ptr + token * (HEADS * DIM) + within, out.to(dtype), mask=inside)


@triton.jit
def _gate_kernel(x_ptr, gate_ptr, out_ptr, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Computes `gated` for BLOCK elements of one token. The grid is (token, block of elements)."""
    if PDL:
        gdc_launch_dependents()
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + token * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + at, (x * sigmoid).to(dtype), mask=inside)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Computes x * sigmoid(gate), as `Ops.gated`.

    Raises:
        ValueError: a shape, dtype or layout other than in the table above.
    """
    stride, width = _stride_of(x, gate), x.shape[-1]
    out = torch.empty_like(x)
    launch(
        _gate_kernel, (x.shape[0] * x.shape[1], triton.cdiv(width, _ELEMENTS)), x, gate, out, stride,
        WIDTH=width, BLOCK=_ELEMENTS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Literal["silu", "sigmoid"] = "silu"
) -> Tensor:
    """Computes rms_norm(x) * weight * activation(gate), with a norm over each head, as `Ops.gated_norm`.

    Raises:
        ValueError: a shape, dtype or layout other than in the table above.
    """
    dim = weight.shape[0]
    if x.shape[-1] % dim or weight.dtype != x.dtype:
        raise ValueError(f"x is {told(x)}, weight {told(weight)}; wanted [B, Q, heads * D] and [D], of one dtype")
    stride = _stride_of(x, gate)
    heads, block = x.shape[-1] // dim, triton.next_power_of_2(dim)
    group = max(1, _ELEMENTS // block)
    out = torch.empty_like(x)
    launch(
        _gated_norm_kernel,
        (x.shape[0] * x.shape[1], triton.cdiv(heads, group)),
        x,
        gate,
        weight,
        out,
        stride,
        eps,
        HEADS=heads,
        DIM=dim,
        GROUP=group,
        BLOCK=block,
        SIGMOID=activation == "sigmoid",
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def _stride_of(x: Tensor, gate: Tensor) -> int:
    """Checks x and gate. Returns the stride, in elements, from the gate of one token to the gate of the next token."""
    if x.dim() != 3 or not x.is_contiguous():
        raise ValueError(f"x is {told(x)}; wanted contiguous [B, Q, heads * D]")
    stride = gate.stride(1) if gate.dim() == 3 else 0
    even = gate.shape[0] == 1 or gate.stride(0) == gate.shape[1] * stride
    if gate.shape != x.shape or gate.dtype != x.dtype or gate.stride(2) != 1 or not even:
        raise ValueError(f"gate is {told(gate)}; wanted it as x, {told(x)}, with tokens at equal strides")
    return stride
