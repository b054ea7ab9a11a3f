"""Quantises a matrix so that its products with typical inputs change little (GPTQ, arXiv 2210.17323).

Columns are quantised one after the other. The error of a column is compensated by a change of the later columns, which
are not quantised yet. The change is computed from the second moments of the inputs.

The scales of a group of columns are chosen before its first column is quantised. The candidates are those of
`kernels/common/rounding.py`. The squared error of a column is weighted by its effect on the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.common.codes import Codes, CodesKind
from fastspec.kernels.common.rounding import ENDS, LARGEST, LEAST, SHRINK, short

# share of the mean of the moment's diagonal that is added to the diagonal: moments of few inputs are nearly singular
_DAMPING = 0.01
_LOW, _HIGH = ENDS["int4"]


def rounded_with_feedback(values: Tensor, kind: CodesKind, moment: Tensor) -> Codes:
    """Quantises a matrix to int4, with a scale for each group of columns in a row.

    Args:
        values: [N, K] of any float dtype.
        kind: result of `rounding.kind_for`.
        moment: fp32 [K, K], sum of x x^T over inputs x of the matrix, see `Activations.moments`.
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
    """Returns the upper Cholesky factor of the inverse moment, [K, K], after damping.

    Inputs that are always zero count as independent of the others.
    """
    damped = moment.clone()
    diagonal = damped.diagonal()
    diagonal += _DAMPING * diagonal.mean()
    diagonal[moment.diagonal() == 0] = 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def _scales(part: Tensor, diagonal: Tensor) -> Tensor:
    """Returns, for each row of a group of columns, the scale with the least weighted squared error: fp32 [N].

    Args:
        part: [N, G], the group.
        diagonal: [G], its part of the diagonal of the result of `_factor`. The weight of a column is 1 / diagonal^2.
    """
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
