"""Quantises a matrix and packs its codes in one launch, with the same bits as `common.rounding.pack_rounded`.

| argument | shape, dtype                | notes                                                              |
|----------|-----------------------------|--------------------------------------------------------------------|
| values   | [N, K] bf16, fp16 or fp32   | contiguous; N % 16 is 0; a gated matrix has the gate's rows first  |
| halves   | int16 [N/16, K/C, 16, 32]   | output: packed codes, see code_packing.py; C is 64, for int4 128   |
| scales   | fp32 [N, K / group]         | output: for fp8 and int8 a group is a whole row                    |
| part     | integer                     | number of gate rows of a gated matrix; N of any other matrix       |
| height   | integer                     | rows of one part in a 16-row tile of `halves`: 8 if gated, else 16 |
| chunks   | integer                     | K/C                                                                |

For int4 a CTA keeps its groups in registers. For fp8 and int8 a CTA reads its rows three times, once from DRAM and then
from the caches: for the largest magnitude, for the squared errors of all tried scales, and for the codes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common import rounding
from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.launch import launch

_TRIED = len(rounding.SHRINK)
TRIED = tl.constexpr(_TRIED)
LEAST = tl.constexpr(rounding.LEAST)
WITHIN = 4096  # number of values that a CTA of `round_groups_kernel` rounds
ROWS, COLUMNS = 2, 1024  # for `round_rows_kernel`: rows of a CTA, and values of each row that it reads at a time


@triton.jit
def _short(scales):
    """Rounds fp32 scales to eight bits of mantissa, to nearest even. Results are at least LEAST, so never 0.

    Gives the same bits as `rounding.short`.
    """
    bits = scales.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.maximum(bits.to(tl.float32, bitcast=True), LEAST)


@triton.jit
def _shrunk(top, tried):
    """Returns candidate scales: top * SHRINK[tried], rounded to the same bits as in rounding.py.

    `top` are basic scales: the largest magnitude of each group over the largest value that a code can hold.
    """
    none = tl.zeros_like(top)
    return _short(top * tl.div_rn(none + (40 - tried), none + 40.0))


@triton.jit
def _divided(x, scales):
    """Divides values x [n, m] by scales [n], rounded as in IEEE 754."""
    return tl.div_rn(x, scales[:, None] + tl.zeros_like(x))


@triton.jit
def _nearest(quotient, FORM: tl.constexpr):
    """Rounds quotients (value / scale) to the nearest numbers that codes of FORM can hold, in fp32.

    The rounding adds 1.5 * 2^23 times the distance between neighbouring numbers, and subtracts it again.
    """
    if FORM == "fp8":
        bounded = tl.minimum(tl.maximum(quotient, -448.0), 448.0)
        # neighbours are 2^-3 of the number's power of two apart, and 2^-9 apart below 2^-6
        power = (bounded.to(tl.int32, bitcast=True) & 0x7F800000) + 0x0A400000
        lift = tl.maximum(power, 0x46C00000).to(tl.float32, bitcast=True)
        return (bounded + lift) - lift
    else:
        LOW: tl.constexpr = -127.0 if FORM == "int8" else -8.0
        HIGH: tl.constexpr = 127.0 if FORM == "int8" else 7.0
        return tl.minimum(tl.maximum((quotient + 12582912.0) - 12582912.0, LOW), HIGH)


@triton.jit
def _squares(x, scales, FORM: tl.constexpr, STEPS: tl.constexpr):
    """Returns the squared rounding errors of x / scale, int32 [n, m], in units of 1 / STEPS.

    x is [n, m]. scales are [n], one for each row of x.
    """
    quotient = x * tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)[:, None]
    apart = _nearest(quotient, FORM) - quotient
    # a number from 2^23 to 2^24 has whole numbers in its last bits
    return (apart * apart * STEPS + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000


@triton.jit
def _errors(squares, scales, top):
    """Returns the errors by which candidate scales are compared: squares * (scale / top)^2, fp32.

    `squares` are sums of the results of `_squares`. `scales` are the candidates. `top` are the basic scales.
    """
    share = tl.div_rn(scales, tl.maximum(top, LEAST))
    return squares.to(tl.float32) * (share * share)


@triton.jit
def _bits(quotient, FORM: tl.constexpr):
    """Returns the codes nearest to quotients (value / scale), int32, as `_packed` reads them.

    In fp8 and int8, bit 7 is the sign, and bits 0..6 are the magnitude. An int4 code is the number plus 8.
    """
    value = _nearest(quotient, FORM)
    if FORM == "fp8":
        size = tl.abs(value)
        normal = (size.to(tl.int32, bitcast=True) >> 20) - 960  # changes the bias of the exponent
        code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)
        return code | ((quotient.to(tl.int32, bitcast=True) >> 24) & 0x80)
    elif FORM == "int8":
        return tl.abs(value).to(tl.int32) | tl.where(value < 0.0, 0x80, 0)
    else:
        return value.to(tl.int32) + 8


@triton.jit
def _packed(codes, FORM: tl.constexpr):
    """Packs codes [n, c, 32] into int16 [n, 32]: c codes in each int16, in the layout of `code_packing.FIELDS`."""
    i = tl.arange(0, codes.shape[1])[None, :, None]
    sign, size = codes & 0x80, codes & 0x7F
    if FORM == "fp8":
        parts = tl.where(i == 0, sign << 8 | size << 4, sign << 4 | (size & 0x70) << 8 | (size & 0xF))
    elif FORM == "int8":
        parts = tl.where(i == 0, sign << 8 | size, sign | size << 8)
    else:
        parts = codes << 4 * i
    return tl.sum(parts, axis=1).to(tl.int16)  # codes of one int16 have no bit in common


@triton.jit
def _store(halves_ptr, halves, part, height, chunks, row, chunk, there, NARROW: tl.constexpr):
    """Stores packed codes `halves` [n, 32]. halves[i] are the codes of chunk chunk[i] in row row[i] of the matrix.

    `row` and `chunk` are indices; `there` [n] masks valid ones. NARROW: True for int4 with groups of 32 values, whose
    columns are in another order (code_packing.py). For `part`, `height` and `chunks` see the top of this file.
    """
    inner = row % part
    tile, line = inner // height, row // part * height + inner % height
    column = tl.arange(0, 32)
    place = column
    if NARROW:
        place = column % 16 // 4 * 8 + column // 16 * 4 + column % 4
    at = ((tile.to(tl.int64) * chunks + chunk) * 16 + line) * 32
    tl.store(halves_ptr + at[:, None] + place[None, :], halves, mask=there[:, None])


@triton.jit(do_not_specialize=["rows", "part", "height", "chunks"])
def round_groups_kernel(
    values_ptr,
    halves_ptr,
    scales_ptr,
    rows,
    part,
    height,
    chunks,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Quantises CHUNKS adjacent chunks of 128 values to int4, with one scale for each group of GROUP values.

    STEPS: see `rounding.STEPS`. INVERSE: 1 / `rounding.LARGEST`. For the other arguments see the top of this file.
    """
    GROUPS: tl.constexpr = CHUNKS * 128 // GROUP
    first = tl.program_id(0) * CHUNKS
    group = first * (128 // GROUP) + tl.arange(0, GROUPS)
    there = group < rows * chunks * (128 // GROUP)
    at = group.to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(values_ptr + at, mask=there[:, None], other=0.0).to(tl.float32)
    top = tl.max(tl.abs(x), axis=1) * INVERSE
    best, chosen = tl.full([GROUPS], float("inf"), tl.float32), top
    for tried in range(TRIED):
        scales = _shrunk(top, tried)
        error = _errors(tl.sum(_squares(x, scales, "int4", STEPS), axis=1), scales, top)
        chosen = tl.where(error < best, scales, chosen)
        best = tl.minimum(error, best)
    chosen = tl.where(top < LEAST, 1.0, chosen)
    tl.store(scales_ptr + group, chosen, mask=there)
    codes = _bits(_divided(x, chosen), "int4")
    chunk = first + tl.arange(0, CHUNKS)
    row = chunk // chunks
    halves = _packed(tl.reshape(codes, [CHUNKS, 4, 32]), "int4")
    _store(halves_ptr, halves, part, height, chunks, row, chunk % chunks, row < rows, GROUP == 32)


@triton.jit(do_not_specialize=["rows", "part", "height", "chunks"])
def round_rows_kernel(
    values_ptr,
    halves_ptr,
    scales_ptr,
    rows,
    part,
    height,
    chunks,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Quantises ROWS rows to fp8 or int8 (FORM), with one scale for each row. Reads COLUMNS values of a row at a time.

    STEPS: see `rounding.STEPS`. INVERSE: 1 / `rounding.LARGEST`. For the other arguments see the top of this file.
    """
    size = chunks * 64
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    line = values_ptr + row.to(tl.int64)[:, None] * size
    top = tl.zeros([ROWS], tl.float32)
    for start in range(0, size, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        x = tl.load(line + column, mask=there[:, None] & (column < size), other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(x), axis=1))
    top *= INVERSE
    place = tl.arange(0, 16)[None, :]
    squares = tl.zeros([ROWS, 16], tl.int64)
    for start in range(0, size, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        x = tl.load(line + column, mask=there[:, None] & (column < size), other=0.0).to(tl.float32)
        for tried in range(TRIED):
            found = _squares(x, _shrunk(top, tried), FORM, STEPS).to(tl.int64)
            squares += tl.where(place == tried, tl.sum(found, axis=1)[:, None], 0)
    each = top[:, None] + tl.zeros([ROWS, 16], tl.float32)
    errors = _errors(squares, _shrunk(each, place), each)
    chosen = _shrunk(top, tl.argmin(tl.where(place < TRIED, errors, float("inf")), axis=1))
    chosen = tl.where(top < LEAST, 1.0, chosen)
    tl.store(scales_ptr + row, chosen, mask=there)
    PARTS: tl.constexpr = COLUMNS // 64
    piece = tl.arange(0, ROWS * PARTS)
    of_piece = tl.program_id(0) * ROWS + piece // PARTS
    for start in range(0, size, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        x = tl.load(line + column, mask=there[:, None] & (column < size), other=0.0).to(tl.float32)
        codes = _bits(_divided(x, chosen), FORM)
        halves = _packed(tl.reshape(codes, [ROWS * PARTS, 2, 32]), FORM)
        chunk = start // 64 + piece % PARTS
        inside = (of_piece < rows) & (chunk < chunks)
        _store(halves_ptr, halves, part, height, chunks, of_piece, chunk, inside, False)


def pack_rounded(place: PackedCodes, tile: int, rows: Tensor) -> Tensor:
    """Quantises rows [n, K] and packs their codes into `place`, as `rounding.pack_rounded`, with a Triton kernel.

    Args:
        place, tile, rows: see `rounding.pack_rounded`.

    Returns:
        The scales, fp32 [n, groups].
    """
    (n, k), form = rows.shape, place.kind.format
    group = place.group or k
    scales = torch.empty((n, k // group), dtype=torch.float32, device=rows.device)
    halves = place.words[tile : tile + n // 16].view(torch.int16)
    height, chunks = 8 if place.gated else 16, place.words.shape[1]
    given = (rows, halves, scales, n, n * height // 16, height, chunks)
    numbers = {"STEPS": rounding.STEPS[form], "INVERSE": 1 / rounding.LARGEST[form]}
    options: dict[str, Any] = {**numbers, "enable_fp_fusion": False, "num_warps": 4}
    if form == "int4":
        grid = (triton.cdiv(n * chunks, WITHIN // 128),)
        launch(round_groups_kernel, grid, *given, GROUP=group, CHUNKS=WITHIN // 128, **options)
    else:
        sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS}
        launch(round_rows_kernel, (triton.cdiv(n, ROWS),), *given, FORM=form, **sizes, **options)
    return scales
