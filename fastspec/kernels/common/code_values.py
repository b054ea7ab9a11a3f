"""Dequantises `PackedCodes` in Triton kernels, for matrix products of prefill and for rows of an embedding.

The bits are those of `PackedCodes.dequantise`: fp32, rounded once to bf16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastspec.kernels.common.code_packing import FP4_RAISED, LIFT, PackedCodes


class ValueSource(NamedTuple):
    """Tensors of a `PackedCodes`, as the argument `source` of `code_values`.

    Attributes:
        halves: int16 view of `PackedCodes.words`.
        factors: `PackedCodes.factors`, fp32 [N].
        scales: view of `PackedCodes.scales`, bf16 for codes in fp4, else fp16 or fp32. None if each row has one scale.
        zeros: bf16 view of `PackedCodes.zeros`. None if there are no zeros.
    """

    halves: Any
    factors: Any
    scales: Any
    zeros: Any


def source_of(codes: PackedCodes) -> tuple[ValueSource, dict[str, Any]]:
    """Returns two things with which `code_values` reads a matrix: its argument `source`, and its constexprs by name.

    The constexpr K is not among them.
    """
    scales = codes.scales
    if scales is not None:
        half = torch.bfloat16 if codes.form == "fp4" else torch.float16
        scales = scales.view(torch.float32 if scales.dtype == torch.int64 else half)
    zeros = None if codes.zeros is None else codes.zeros.view(torch.bfloat16)
    pairs = 0 if codes.scales is None else codes.scales.shape[2]
    constants = {"FORM": codes.form, "GROUP": codes.group, "PAIRS": pairs, "LOWER": 2.0 ** -LIFT[codes.form]}
    return ValueSource(codes.words.view(torch.int16), codes.factors, scales, zeros), constants


RAISED = tl.constexpr(2.0**-FP4_RAISED)
E4M3_UNIT = tl.constexpr(2.0**120)
E2M1_UNIT = tl.constexpr(2.0**126)


@triton.jit
def _integer(bits):
    """Converts integers `bits` in 0 .. 2^23 - 1 to fp32 without a conversion instruction.

    The fp32 number 2^23 + bits has `bits` as its lowest bits.
    """
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _decoded(half, i, FORM: tl.constexpr):
    """Decodes the code with index i (0 .. 3) in each 16-bit half of a word to fp32. half: int32, 0 .. 65535."""
    if FORM == "fp8":
        first = ((half & 0x8000) << 16) | ((half & 0x07F0) << 16)
        second = ((half & 0x0800) << 20) | ((half & 0x7000) << 12) | ((half & 0x000F) << 20)
        return tl.where(i == 0, first, second).to(tl.float32, bitcast=True) * E4M3_UNIT
    elif FORM == "int8":
        size = _integer(tl.where(i == 0, half & 0x7F, (half >> 8) & 0x7F))
        sign = tl.where(i == 0, half >> 15, half >> 7) & 1
        return tl.where(sign == 1, -size, size)
    elif FORM == "off8":
        return _integer((half >> (8 * i)) & 0xFF) - 128.0
    elif FORM == "int4":
        return _integer((half >> (4 * i)) & 0xF)
    else:
        sign = tl.where(i == 0, half >> 15, tl.where(i == 1, half >> 12, tl.where(i == 2, half >> 14, half >> 13)))
        size = tl.where(i == 0, half >> 6, tl.where(i == 1, half >> 3, tl.where(i == 2, half >> 9, half)))
        return (((sign & 1) << 31) | ((size & 7) << 22)).to(tl.float32, bitcast=True) * E2M1_UNIT


@triton.constexpr_function
def blocks_of(FORM):
    """Returns the number of codes in one 16-bit half of a word. Each belongs to a different block of 32 columns."""
    return 4 if FORM in ("int4", "fp4") else 2


@triton.jit
def column_of(place, FORM: tl.constexpr, GROUP: tl.constexpr):
    """Returns the column (0..31), within a block of 32 columns, of the codes in the 16-bit half with index `place`.

    `place` is 0..31. For FORM and GROUP see `PackedCodes.form` and `PackedCodes.group`.
    """
    if FORM == "int4" and GROUP == 32:
        return place % 8 // 4 * 16 + place // 8 * 4 + place % 4
    else:
        return place


@triton.jit
def scaled(
    half,
    source,
    n,
    k,
    i,
    inside,
    K: tl.constexpr,
    FORM: tl.constexpr,  # `PackedCodes.form`
    GROUP: tl.constexpr,  # `PackedCodes.group`
    PAIRS: tl.constexpr,  # number of pairs of scales of a tile per group of columns, 8 or 1; 0: each row has one scale
    LOWER: tl.constexpr,  # 2^-LIFT
):
    """Dequantises the code with index i in each 16-bit half. Returns fp32 values.

    Args:
        half: 16-bit halves of `PackedCodes.words`, int32, 0 .. 65535.
        source: `ValueSource`.
        n: row indices of the codes, int64 in the order of `PackedCodes.words`.
        k: column indices of the codes. Codes that share a scale may share one n and one k.
        i: index of the code in its half, 0 .. 3.
        inside: mask of valid rows and columns.
        K: number of columns of the matrix.
    """
    value = _decoded(half, i, FORM)
    tile, row = n // 16, n % 16
    factor = tl.load(source.factors + n, mask=inside, other=0.0) * LOWER
    if GROUP == 0:
        return value * factor
    elif FORM == "fp4":
        T: tl.constexpr = 32 // GROUP
        pair = ((tile * (K // 128) + k // 128) * 16 + row) * (4 * T) + k % 32 // GROUP * 4 + k % 128 // 32
        scale = tl.load(source.scales + pair, mask=inside, other=0.0).to(tl.float32) * RAISED
        return value * (scale * factor)
    else:
        pair = ((tile * (K // GROUP) + k // GROUP) * PAIRS + row % 8 % PAIRS) * 2 + row // 8
        scale = tl.load(source.scales + pair, mask=inside, other=0.0).to(tl.float32)
        if source.zeros is not None:
            value -= tl.load(source.zeros + pair, mask=inside, other=0.0).to(tl.float32)
        elif FORM == "int4":
            value -= 8.0
        return value * (scale * factor)


@triton.jit
def code_values(
    source,
    n,
    k,
    inside,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    LOWER: tl.constexpr,
):
    """Returns elements [n, k] of a quantised matrix, dequantised to fp32. For the arguments see `scaled`."""
    C: tl.constexpr = 32 * blocks_of(FORM)
    within = k % 32
    place = within
    if FORM == "int4" and GROUP == 32:
        place = within % 16 // 4 * 8 + within // 16 * 4 + within % 4
    at = (n // 16 * (K // C) + k // C) * 512 + n % 16 * 32 + place
    half = tl.load(source.halves + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
    return scaled(half, source, n, k, k % C // 32, inside, K, FORM, GROUP, PAIRS, LOWER)
