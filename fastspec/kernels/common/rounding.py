"""Quantises a matrix while a model is loaded: to the nearest codes, with the scales of the least squared error.

    fp8, int8: one scale for each row.   int4: one scale for each group of columns, symmetric

The basic scale of a group (for fp8 and int8, a row) is its largest magnitude divided by the largest number that a code
can hold. Fifteen scales are tried: the basic scale times each factor in `SHRINK`. The scale with the least sum of
squared errors is chosen. A smaller scale clips a few large values, but rounds all others more finely.

While scales are compared, a value's error is the difference between value / scale and the nearest number that a code
can hold. Its square is rounded to a multiple of 1 / `STEPS`. Sums of such multiples are exact and do not depend on
their order, so every device chooses the same scales.

The scale is 1 if all values of a group are zero, or too small for a scale in bf16. A smaller scale would not fit in 16
bits beside the scales of other groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.codes import CodeFormat, Codes, CodesKind

FORMATS: tuple[CodeFormat, ...] = ("fp8", "int8", "int4")
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
SHRINK = tuple(1.0 - step / 40 for step in range(15))
# powers of two, small enough that a square times STEPS is below 2^23. In int8, the smallest scale (0.65 times the
# basic one) gives errors up to 68.9, squares up to 4741
STEPS = {"fp8": 2.0**7, "int8": 2.0**10, "int4": 2.0**19}
LEAST = 2.0**-126  # the smallest normal bf16. No torch.finfo: processes without torch import this file
_GROUPS = (128, 64, 32)
ENDS = {"int8": (-127, 127), "int4": (-8, 7)}
_SUBNORMAL = 121 << 23  # bits of 2^-6 in fp32: below it, values of e4m3 have equal distances
_ADDED = 255  # counts below 2^23 whose sum is below 2^31
# values rounded at a time; each needs up to twenty bytes of temporary memory. On a CPU they fit in its caches
VALUES = 2**22
CPU_VALUES = 2**19


def kind_for(form: CodeFormat, shape: tuple[int, int]) -> CodesKind | None:
    """Returns the `CodesKind` with which a matrix of shape (N, K) is quantised to the format `form`.

    Returns None if `form` is int4, and no group size of int4 divides K.
    """
    if form != "int4":
        return CodesKind(form, (1, shape[1]))
    group = next((size for size in _GROUPS if shape[1] % size == 0), None)
    return None if group is None else CodesKind("int4", (1, group))


def rounded(values: Tensor, kind: CodesKind) -> Codes:
    """Quantises a matrix, on its device. The same values give the same codes on every device.

    Args:
        values: [N, K] of any float dtype.
        kind: result of `kind_for`.
    """
    step = max(1, (CPU_VALUES if values.device.type == "cpu" else VALUES) // values.shape[1])
    parts = [_rounded(part.float().unflatten(1, (-1, kind.block[1])), kind.format) for part in values.split(step)]
    codes = torch.cat([codes for codes, _ in parts])
    scales = torch.cat([scales for _, scales in parts])
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if kind.format == "int4" else None
    return Codes(kind, codes, scales, zeros)


def pack_rounded(place: PackedCodes, tile: int, rows: Tensor) -> Tensor:
    """Quantises some rows of a matrix, packs their codes, and returns their scales. The scales are not stored.

    Args:
        place: the packed matrix, whose `words` are written. Its kind is a result of `kind_for`.
        tile: index of the first 16-row tile of `place` that is written.
        rows: [n, K] of any float dtype, n a multiple of 16. Gate rows of a gated matrix come first.

    Returns:
        The scales of the rows, fp32 [n, groups].
    """
    codes = rounded(rows, place.kind)
    place.fill_words(tile, codes.codes)
    return codes.scales


def _rounded(groups: Tensor, form: CodeFormat) -> tuple[Tensor, Tensor]:
    """Quantises fp32 values [n, G, K / G], with G groups in each row. Returns codes [n, K] and scales [n, G]."""
    rows = groups.flatten(0, 1)
    # a column is a group: operations run over long rows, and sums over columns add whole rows
    columns = rows.t().contiguous() if rows.shape[1] <= _GROUPS[0] else rows.t()
    if form == "fp8":
        columns = columns.abs()  # of the same errors, and rounded in fewer operations
    room = torch.empty_like(columns), torch.empty_like(columns)
    ends = torch.stack((columns.amin(0), columns.amax(0)))
    # not a division: torch's division by a number gives other bits on a GPU
    largest = ends.abs().amax(0) * (1 / LARGEST[form])
    factors = torch.tensor(SHRINK, dtype=torch.float64, device=rows.device)[:, None]
    tried = short(largest * factors.float())
    shares = (tried / largest.clamp(min=LEAST)).square_()
    # the errors of the smallest and the largest value are a lower bound of the sum. Scales whose bound is not below the
    # best sum are not tried
    both = ends[:, None].expand(-1, len(tried), -1).flatten(1)
    bounds = _errors(both, tried.flatten(), form).view_as(tried).mul_(shares)
    best = torch.full_like(largest, torch.inf)
    chosen = largest
    for scales, share, bound in zip(tried, shares, bounds, strict=True):
        open_ = (~(bound >= best)).nonzero()[:, 0]
        if not len(open_):
            continue
        if 2 * len(open_) < len(best):
            error = torch.full_like(best, torch.inf)
            error[open_] = _errors(columns.index_select(1, open_), scales[open_], form) * share[open_]
        else:
            error = _errors(columns, scales, form, room) * share
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, scales, chosen)
    chosen = torch.where(largest < LEAST, 1.0, chosen)
    codes = _codes(rows / chosen[:, None], form)
    return codes.view(len(groups), -1), chosen.view(len(groups), -1)


def _errors(columns: Tensor, scales: Tensor, form: CodeFormat, room: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Returns the sum of squared errors of each group of values, if the group is quantised with a given scale.

    Args:
        columns: fp32 [values of a group, groups].
        scales: fp32 [groups], the scale of each group.
        form: format of the codes.
        room: two scratch tensors like `columns`. Allocation for every scale would take longer than the sums. None: they
            are allocated.

    Returns:
        fp32 [groups], in units of 1 / STEPS. Each square is rounded to a whole number of these units, and sums of
        rounded squares are exact.
    """
    quotient, nearest = room or (torch.empty_like(columns), torch.empty_like(columns))
    torch.mul(columns, scales.reciprocal(), out=quotient)  # one instruction, and accurate enough here
    difference = _nearest(quotient, form, nearest).sub_(quotient)
    squares = torch.mul(difference, difference, out=difference)
    # a square is less than 2^23 / STEPS. Added to that number, its last bits are the rounded count of 1 / STEPS
    unit = 2.0**23 / STEPS[form]
    counts = squares.add_(unit).view(torch.int32)
    first = int(torch.tensor(unit, dtype=torch.float32, device="cpu").view(torch.int32))
    # sums of int32 take a fifth of the time of those of int64; a part's sum is below 2^31
    sums = [part.sum(0, dtype=torch.int32).sub_(_wrapped(first * len(part))) for part in counts.split(_ADDED)]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0, dtype=torch.int64)
    return total.double().float()


def _wrapped(number: int) -> int:
    """Returns the int32 that is congruent to a number modulo 2^32."""
    return (number + 2**31) % 2**32 - 2**31


def short(scales: Tensor) -> Tensor:
    """Rounds scales to 8 bits of mantissa, as in checkpoints. Values are divided by scales, so results are never 0."""
    return scales.bfloat16().float().clamp(min=LEAST)


def _nearest(quotient: Tensor, form: CodeFormat, place: Tensor) -> Tensor:
    """Rounds quotients (value / scale) to the nearest numbers that codes can hold. For fp8 they must not be negative.

    The result is written to `place`, fp32, which is also returned.
    """
    if form != "fp8":
        return torch.round(quotient, out=place).clamp_(*ENDS[form])
    # 2^(e + 20) for a quotient in [2^e, 2^(e + 1)): added to it, all bits behind the third of the mantissa are rounded
    bits = place.view(torch.int32)
    torch.bitwise_and(quotient.view(torch.int32), 0x7F800000, out=bits).clamp_(min=_SUBNORMAL).add_(20 << 23)
    rounded_up = torch.add(quotient, place)
    return torch.sub(rounded_up, place, out=place).clamp_(max=LARGEST[form])


def _codes(quotient: Tensor, form: CodeFormat) -> Tensor:
    """Returns the codes nearest to quotients (value / scale), uint8. Overwrites `quotient`."""
    if form == "fp8":
        return quotient.clamp_(-LARGEST[form], LARGEST[form]).to(torch.float8_e4m3fn).view(torch.uint8)
    nearest = quotient.round_().clamp_(*ENDS[form])
    return nearest.to(torch.int8).view(torch.uint8) if form == "int8" else (nearest + 8).to(torch.uint8)
