"""Rounds a matrix to codes when a model is loaded: to the nearest code, with scales of least squared error.

    fp8, int8: one scale a row.   int4: one scale for each group of columns, symmetric

The basic scale is the largest magnitude over the largest code. The scale is this times the factor of `SHRINK` with the
least sum of squared errors. A smaller scale cuts off a few large values, but rounds all others more finely.

An error is the distance between a value and its code's value, over the scale. Its square is counted as a whole number
of 1 / `STEPS`. Sums of whole numbers do not depend on their order, so every device chooses the same scales.

The scale is 1 for values that are zero, or too small for a scale in bf16. A smaller scale would not fit in 16 bits
beside the scales of other groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.codes import CodeFormat, Codes, CodesKind

FORMATS: tuple[CodeFormat, ...] = ("fp8", "int8", "int4")
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
SHRINK = tuple(1.0 - step / 40 for step in range(15))
# powers of two. In int8, the smallest scale (0.65 times the largest) gives distances up to 68.9, squares up to 4741
STEPS = {"fp8": 2.0**7, "int8": 2.0**10, "int4": 2.0**19}
LEAST = 2.0**-126  # the smallest normal bf16; kernels are also imported where torch is not
_GROUPS = (128, 64, 32)
VALUES = 2**22  # values rounded at a time; each needs up to twenty bytes of temporary memory


def kind_for(form: CodeFormat, shape: tuple[int, int]) -> CodesKind | None:
    """Returns the CodesKind with which a matrix (N, K) is rounded. None if no group size of int4 divides K."""
    if form != "int4":
        return CodesKind(form, (1, shape[1]))
    group = next((size for size in _GROUPS if shape[1] % size == 0), None)
    return None if group is None else CodesKind("int4", (1, group))


def rounded(values: Tensor, kind: CodesKind) -> Codes:
    """Rounds a matrix [N, K] to codes, on its device. The same values give the same codes.

    Args:
        values: any float dtype.
        kind: from `kind_for`.
    """
    step = max(1, VALUES // values.shape[1])
    parts = [_rounded(part.float().unflatten(1, (-1, kind.block[1])), kind.format) for part in values.split(step)]
    codes = torch.cat([codes for codes, _ in parts])
    scales = torch.cat([scales for _, scales in parts])
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if kind.format == "int4" else None
    return Codes(kind, codes, scales, zeros)


def pack_rounded(place: PackedCodes, tile: int, rows: Tensor) -> Tensor:
    """Rounds rows [n, K] of whole tiles and packs their codes.

    Args:
        place: the packed matrix, whose words are written. Its kind is a result of `kind_for`.
        tile: number of the first tile.
        rows: any float dtype; rows of a gated matrix have the gate's rows first.

    Returns:
        The scales of the rows, fp32 [n, groups].
    """
    codes = rounded(rows, place.kind)
    place.fill_words(tile, codes.codes)
    return codes.scales


def _rounded(groups: Tensor, form: CodeFormat) -> tuple[Tensor, Tensor]:
    """Rounds values [n, G, K / G]: codes [n, K] and scales [n, G]."""
    # not a division: torch's division by a number gives other bits on a GPU
    largest = groups.abs().amax(-1) * (1 / LARGEST[form])
    best = torch.full_like(largest, torch.inf)
    chosen = largest
    for factor in SHRINK:
        scales = _short(largest * factor)
        quotient = groups * scales.reciprocal()[..., None]  # one instruction, and accurate enough here
        squares = _nearest(quotient, form).sub_(quotient).square_().mul_(STEPS[form]).round_()
        share = scales / largest.clamp(min=LEAST)
        error = squares.sum(-1, dtype=torch.float64).float() * (share * share)
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, scales, chosen)
    chosen = torch.where(largest < LEAST, 1.0, chosen)
    return _codes(_nearest(groups / chosen[..., None], form), form).flatten(1), chosen


def _short(scales: Tensor) -> Tensor:
    """Rounds scales to 8 bits of mantissa, as in checkpoints. They are never 0, because values are divided by them."""
    return scales.bfloat16().float().clamp(min=LEAST)


def _nearest(quotient: Tensor, form: CodeFormat) -> Tensor:
    """Returns the values of the codes nearest to quotients, as a new fp32 tensor."""
    if form == "fp8":
        return quotient.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    low, high = (-127, 127) if form == "int8" else (-8, 7)
    return quotient.round().clamp_(low, high)


def _codes(nearest: Tensor, form: CodeFormat) -> Tensor:
    if form == "fp8":
        return nearest.to(torch.float8_e4m3fn).view(torch.uint8)
    return nearest.to(torch.int8).view(torch.uint8) if form == "int8" else (nearest + 8).to(torch.uint8)
