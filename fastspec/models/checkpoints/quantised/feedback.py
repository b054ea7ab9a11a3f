"""Rounds a matrix so that its products with typical inputs change little (GPTQ, arXiv 2210.17323).

Columns are rounded one after the other. Later columns, which are not rounded yet, take over the error of each: by the
second moments of the inputs it is known how much of it they can make up for. A scale is chosen when its group begins,
among those of `kernels/common/rounding.py`. Errors count there by their share in the error of the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.common.codes import Codes, CodesKind
from fastspec.kernels.common.rounding import LARGEST, LEAST, SHRINK, short

_DAMPING = 0.01  # of the mean second moment, added to each: moments of few inputs are nearly singular
_LOW, _HIGH = -8, 7


def rounded_with_feedback(values: Tensor, kind: CodesKind, moment: Tensor) -> Codes:
    """Rounds a matrix [N, K] to int4 in groups.

    Args:
        values: any float dtype.
        kind: from `rounding.kind_for`.
        moment: sum of x x^T over inputs x, [K, K].
    """
    left = values.to(moment.device, torch.float32, copy=True)
    factor, group = _factor(moment), kind.block[1]
    codes = torch.empty(left.shape, dtype=torch.uint8, device=left.device)
    scales = []
    for low in range(0, left.shape[1], group):
        part, own = left[:, low : low + group], factor[low : low + group, low : low + group]
        scale = _scales(part, own.diagonal())
        errors = torch.empty_like(part)
        for column in range(group):
            nearest = (part[:, column] / scale).round_().clamp_(_LOW, _HIGH)
            codes[:, low + column] = (nearest - _LOW).to(torch.uint8)
            errors[:, column] = (part[:, column] - nearest * scale) / own[column, column]
            part[:, column + 1 :] -= errors[:, column, None] * own[column, column + 1 :]
        left[:, low + group :] -= errors @ factor[low : low + group, low + group :]
        scales.append(scale)
    joined = torch.stack(scales, 1).to(values.device)
    return Codes(kind, codes.to(values.device), joined, torch.full_like(joined, -_LOW, dtype=torch.uint8))


def _factor(moment: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the inverse moment. Inputs that are always zero count as independent."""
    damped = moment.clone()
    diagonal = damped.diagonal()
    diagonal += _DAMPING * diagonal.mean()
    diagonal[moment.diagonal() == 0] = 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def _scales(part: Tensor, diagonal: Tensor) -> Tensor:
    """Returns the scale of each row of a group [N, G] with the least error. `diagonal` [G] is that of the factor."""
    largest = part.abs().amax(1) / LARGEST["int4"]
    weights = diagonal.reciprocal().square()
    best, chosen = torch.full_like(largest, torch.inf), largest
    for shrink in SHRINK:
        scale = short(largest * shrink)
        quotient = part / scale[:, None]
        error = ((quotient.round().clamp_(_LOW, _HIGH) - quotient) * scale[:, None]).square() @ weights
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, scale, chosen)
    return torch.where(largest < LEAST, 1.0, chosen)
