"""Rounds a matrix to codes in one launch, as `common.rounding` defines it.

| argument | shape, dtype                  | notes                                          |
|----------|-------------------------------|------------------------------------------------|
| values   | [N, K] bf16, fp16 or fp32     | contiguous                                     |
| codes    | uint8 [N, K]                  | written                                        |
| scales   | fp32 [N, K / group]           | written; a group is a row of fp8 and int8      |

A program has some groups, and reads them three times: for the largest magnitude, for the squared errors of all scales
that are tried, and for the codes. Which scale is best may differ from the definition where two are as good but for the
order of a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common.codes import Codes, CodesKind
from fastspec.kernels.common.launch import launch
from fastspec.kernels.common.rounding import LARGEST, SHRINK

_TRIED = len(SHRINK)
TRIED = tl.constexpr(_TRIED)
LEAST = tl.constexpr(2.0**-126)  # the smallest normal bf16; kernels are also imported where torch is not
NARROW, WIDE = 32, 2  # groups to a program: of up to 128 values, and of whole rows
COLUMNS = 1024  # of a row that are read at a time


@triton.jit
def _short(scales):
    """As `rounding._short`: to nearest even at eight bits of mantissa, never 0."""
    bits = scales.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.maximum(bits.to(tl.float32, bitcast=True), LEAST)


@triton.jit
def _shrunk(top, tried):
    """Scales by which the largest magnitude `top` is reached, times the one of SHRINK with that number, to the bit."""
    none = tl.zeros_like(top)
    return _short(top * tl.div_rn(none + (40 - tried), none + 40.0))


@triton.jit
def _codes_of(quotient, FORM: tl.constexpr):
    """int32 codes nearest to the quotients: of fp8 the number's bits, of the others the whole number."""
    if FORM == "fp8":
        size = tl.minimum(tl.abs(quotient), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        # to nearest even at bit 20, and another bias of the exponent
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        # below 2^-6 there are steps of 2^-9, which are those of numbers from 2^14 on
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        sign = (quotient.to(tl.int32, bitcast=True) >> 24) & 0x80
        return tl.where(size < 0.015625, small, normal) | sign
    else:
        LOW: tl.constexpr = -127.0 if FORM == "int8" else -8.0
        HIGH: tl.constexpr = 127.0 if FORM == "int8" else 7.0
        nearest = (quotient + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no bits behind the point
        return tl.minimum(tl.maximum(nearest, LOW), HIGH).to(tl.int32)


@triton.jit
def _values_of(codes, FORM: tl.constexpr):
    """What int32 codes stand for, as fp32."""
    if FORM == "fp8":
        size = codes & 0x7F
        value = tl.where(size < 8, size * 0.001953125, ((size + 960) << 20).to(tl.float32, bitcast=True))
        return tl.where(codes > 127, -value, value)
    else:
        return codes.to(tl.float32)


@triton.jit
def _round_kernel(
    values_ptr,
    codes_ptr,
    scales_ptr,
    count,
    size,
    FORM: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """GROUPS groups of `count`, each of `size` values that lie side by side."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    first = group.to(tl.int64)[:, None] * size
    there = (group < count)[:, None]
    top = tl.zeros([GROUPS], tl.float32)
    for start in range(0, size, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        x = tl.load(values_ptr + first + column, mask=there & (column < size), other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(x), axis=1))
    top = tl.div_rn(top, LARGEST + tl.zeros([GROUPS], tl.float32))
    place = tl.arange(0, 16)[None, :]
    errors = tl.where(place < TRIED, tl.zeros([GROUPS, 16], tl.float32), float("inf"))
    for start in range(0, size, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        x = tl.load(values_ptr + first + column, mask=there & (column < size), other=0.0).to(tl.float32)
        for tried in range(TRIED):
            scale = _shrunk(top, tried)[:, None] + tl.zeros_like(x)
            apart = _values_of(_codes_of(tl.div_rn(x, scale), FORM), FORM) * scale - x
            errors += tl.where(place == tried, tl.sum(apart * apart, axis=1)[:, None], 0.0)
    best = tl.argmin(errors, axis=1)
    scales = _shrunk(top, best)
    tl.store(scales_ptr + group, scales, mask=group < count)
    for start in range(0, size, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        inside = there & (column < size)
        x = tl.load(values_ptr + first + column, mask=inside, other=0.0).to(tl.float32)
        codes = _codes_of(tl.div_rn(x, scales[:, None] + tl.zeros_like(x)), FORM)
        if FORM == "int4":
            codes += 8
        tl.store(codes_ptr + first + column, codes.to(tl.uint8), mask=inside)


def rounded(values: Tensor, kind: CodesKind) -> Codes:
    """As `common.rounding.rounded`, which defines it."""
    (n, k), group = values.shape, kind.block[1]
    codes = torch.empty((n, k), dtype=torch.uint8, device=values.device)
    scales = torch.empty((n, k // group), dtype=torch.float32, device=values.device)
    groups, columns = (NARROW, group) if group <= 128 else (WIDE, COLUMNS)
    launch(
        _round_kernel,
        (triton.cdiv(scales.numel(), groups),),
        values,
        codes,
        scales,
        scales.numel(),
        group,
        FORM=kind.format,
        GROUPS=groups,
        COLUMNS=columns,
        LARGEST=LARGEST[kind.format],
        enable_fp_fusion=False,
        num_warps=4,
    )
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if kind.format == "int4" else None
    return Codes(kind, codes, scales, zeros)
