"""Rounds a matrix to codes when a model is loaded: to the nearest, by scales of least squared error.

    fp8, int8: one scale a row.   int4: one scale for each group of columns, symmetric

A scale is the largest magnitude that it has to reach, over the largest code, times the one of `SHRINK` with which the
sum of squared differences is least: to cut off a few values costs little where all others become finer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.common.codes import CodeFormat, Codes, CodesKind

FORMATS: tuple[CodeFormat, ...] = ("fp8", "int8", "int4")
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
SHRINK = tuple(1.0 - step / 40 for step in range(15))
_GROUPS = (128, 64, 32)
VALUES = 2**22  # that are rounded at a time: beside them stand up to twenty bytes for each


def kind_for(form: CodeFormat, shape: tuple[int, int]) -> CodesKind | None:
    """The kind in which a matrix (N, K) is rounded; None: K has no group of int4."""
    if form != "int4":
        return CodesKind(form, (1, shape[1]))
    group = next((size for size in _GROUPS if shape[1] % size == 0), None)
    return None if group is None else CodesKind("int4", (1, group))


def rounded(values: Tensor, kind: CodesKind) -> Codes:
    """Codes of a matrix [N, K], on its device. The same values give the same codes.

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


def _rounded(groups: Tensor, form: CodeFormat) -> tuple[Tensor, Tensor]:
    """Codes [n, K] and scales [n, G] of values [n, G, K / G]."""
    largest = groups.abs().amax(-1) / LARGEST[form]
    best = torch.full_like(largest, torch.inf)
    chosen = largest
    for factor in SHRINK:
        scales = _short(largest * factor)
        error = _nearest(groups, scales, form).mul_(scales[..., None]).sub_(groups).square_().sum(-1)
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, scales, chosen)
    return _codes(_nearest(groups, chosen, form), form).flatten(1), chosen


def _short(scales: Tensor) -> Tensor:
    """Scales of 8 bits of mantissa, as checkpoints store them; never 0, which would divide."""
    return scales.bfloat16().float().clamp(min=torch.finfo(torch.bfloat16).tiny)


def _nearest(groups: Tensor, scales: Tensor, form: CodeFormat) -> Tensor:
    """Values of the nearest codes, as fp32 that nothing else holds."""
    quotient = groups / scales[..., None]
    if form == "fp8":
        return quotient.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    low, high = (-127, 127) if form == "int8" else (-8, 7)
    return quotient.round_().clamp_(low, high)


def _codes(nearest: Tensor, form: CodeFormat) -> Tensor:
    if form == "fp8":
        return nearest.to(torch.float8_e4m3fn).view(torch.uint8)
    return nearest.to(torch.int8).view(torch.uint8) if form == "int8" else (nearest + 8).to(torch.uint8)
