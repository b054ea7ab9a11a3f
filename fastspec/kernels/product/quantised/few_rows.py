"""Product with quantised weights for few rows of x. Codes are converted in registers, once for up to 64 rows.

It differs from `product.few_rows` in three points. A lane loads codes, and the converted words are the operands of
several products with 8 rows of x each. If groups of K have scales, each group is summed separately, and acc =
fma(scale, sum, acc). Another kernel computes the norm before.

Row invariance: an element consists of S sums over every S-th K tile of KT values, each in ascending order. They are
then added in order. A row's bits depend neither on the number of rows nor on the row's index.
"""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.product.epilogue import (
    addends,
    enter_keys,
    loaded_factor,
    row_operand,
    weight_numbers,
    weight_operand,
    write_argmax,
    write_tile,
)
from fastspec.kernels.product.few_rows import sum_of_splits
from fastspec.kernels.product.quantised.conversion import (
    for_all,
    offset_of,
    ones,
    raised,
    rows_of,
    units_of,
    words_layout,
    zeros_of,
)
from fastspec.kernels.product.quantised.loads import (
    all_rows_in,
    groups_of,
    k_tile_of,
    moved,
    pieces_of,
    rows_in,
    starts_of,
    weight_offsets,
)

UNROLLED = gl.constexpr(16)  # with more K tiles than this, the loop over them is not unrolled
# the same if groups have sums or there are many rows: the assembler would start all iterations at once
UNROLLED_LESS = gl.constexpr(4)
BLOCK = gl.constexpr(8)  # rows of x in one product


class CodesOperands(NamedTuple):
    """Pointers to the two factors.

    Attributes:
        x: int32 words [M, K / 2] of bf16.
        words, factors, scales, zeros: tensors of `PackedCodes`.
    """

    x: Any
    words: Any
    factors: Any
    scales: Any
    zeros: Any


class CodesEpilogue(NamedTuple):
    """Pointers for the operations after the product. None: absent.

    Attributes:
        row_factors: fp32 [M], factors of a norm, if x is already multiplied with the norm's weight.
        bias, residual: [N] and [M, width].
        out: [M, width], or int64 ids if `keys` is given.
        keys: int64 [M + 1].
    """

    row_factors: Any
    bias: Any
    residual: Any
    out: Any
    keys: Any


@gluon.constexpr_function
def unit_of(FORM, GROUP):
    """Returns the number of values of K in one product."""
    return 32 if GROUP == 32 and FORM == "int4" else 64


@gluon.jit
def operands_of(k_tile, left: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, KT: gl.constexpr,
              UNIT: gl.constexpr):  # fmt: skip
    """Converts a K tile to bf16 [S, R, UNIT] for each unit, in the layout of the left operand."""
    PIECES: gl.constexpr = pieces_of(KT, FORM)
    GROUPS: gl.constexpr = groups_of(KT, FORM, GROUP)
    like: gl.constexpr = k_tile[0].type.layout
    zeros = ()
    if len(k_tile) > PIECES + GROUPS and FORM == "int4":
        for g in gl.static_range(GROUPS):
            zeros = zeros + (zeros_of(k_tile[PIECES + GROUPS + g], like),)
    found = ()
    for p in gl.static_range(PIECES):
        own = zeros[p * (len(zeros) // PIECES) : (p + 1) * (len(zeros) // PIECES)]
        pairs = units_of(k_tile[p], k_tile[len(k_tile) - 1], own, FORM, UNIT)
        for u in gl.static_range(len(pairs)):
            found = found + (weight_operand(pairs[u], gl.bfloat16, left),)
    return found


@gluon.jit
def less_offset(part, total, FORM: gl.constexpr):
    """Subtracts the codes' offset times the sums of x, `total` [S, 16, BM], from sums of codes times x."""
    total = gl.convert_layout(for_all(total, part.shape[1]), part.type.layout, assert_trivial=True)
    return gl.fma(gl.full_like(total, -1.0 * offset_of(FORM)), total, part)


@gluon.jit
def block_sums(sums, units, rows, scales, ones_of, right: gl.constexpr, FORM: gl.constexpr):
    """Multiplies 8 rows of x with a K tile.

    `sums` is (acc,), or (acc, sums of x) if the offset is subtracted at the end.
    """
    acc = sums[0]
    mma: gl.constexpr = acc.type.layout
    S: gl.constexpr = acc.shape[0]
    GROUPS: gl.constexpr = len(scales)
    EACH: gl.constexpr = len(units) // GROUPS if GROUPS > 0 else len(units)
    OFFSET: gl.constexpr = offset_of(FORM) > 0
    total = gl.zeros([S, 16, BLOCK], gl.float32, mma)
    if len(sums) == 2:
        total = sums[1]
    part = acc
    for u in gl.static_range(len(units)):
        if GROUPS > 0 and u % EACH == 0:
            part = gl.zeros(acc.shape, gl.float32, mma)
            total = gl.zeros([S, 16, BLOCK], gl.float32, mma)
        x = row_operand(raised(rows[u], FORM), gl.bfloat16, right)
        part = mma_v2(units[u], x, part)
        if OFFSET:
            total = mma_v2(ones_of, x, total)
        if GROUPS > 0 and u % EACH == EACH - 1:
            if OFFSET:
                part = less_offset(part, total, FORM)
            acc = gl.fma(scales[u // EACH], part, acc)
    if GROUPS == 0:
        acc = part
    if len(sums) == 2:
        return acc, total
    else:
        return (acc,)


@gluon.jit
def _step(sums, k_tile, rows, x, ones_of, left: gl.constexpr, right: gl.constexpr, FORM: gl.constexpr,
          GROUP: gl.constexpr, KT: gl.constexpr, UNIT: gl.constexpr, FIRST: gl.constexpr,
          RAGGED: gl.constexpr):  # fmt: skip
    """Multiplies one K tile with all rows. Its codes are converted once.

    rows: words of x that were loaded ahead; if empty they are loaded from x, (pointer, offsets, mask).
    """
    PIECES: gl.constexpr = pieces_of(KT, FORM)
    GROUPS: gl.constexpr = groups_of(KT, FORM, GROUP)
    UNITS: gl.constexpr = KT // UNIT
    mma: gl.constexpr = sums[0][0].type.layout
    units = operands_of(k_tile, left, FORM, GROUP, KT, UNIT)
    scales = ()
    for g in gl.static_range(GROUPS):
        scales = scales + (rows_of(k_tile[PIECES + g], gl.float16, mma),)
    found = ()
    for b in gl.static_range(len(sums)):
        if len(rows) == 0:
            some = rows_in(x[0], x[1][b], FIRST, x[2], RAGGED, KT, UNIT)
        else:
            some = rows[b * UNITS : (b + 1) * UNITS]
        found = found + (block_sums(sums[b], units, some, scales, ones_of, right, FORM),)
    return found


@gluon.jit
def _first_of(some):
    """Splits a tuple into (its first element, the others). Returns two empty tuples for an empty tuple."""
    if len(some) == 0:
        return (), ()
    else:
        return some[0], some[1:]


@gluon.jit
def no_sums(S: gl.constexpr, R: gl.constexpr, BLOCKS: gl.constexpr, OWN_SUM: gl.constexpr, mma: gl.constexpr):
    """Returns zero sums for each 8 rows of x. With OWN_SUM also sums of x, for offsets subtracted at the end."""
    sums = ()
    for _ in gl.static_range(BLOCKS):
        each = (gl.zeros([S, R, BLOCK], gl.float32, mma),)
        if OWN_SUM:
            each = each + (gl.zeros([S, 16, BLOCK], gl.float32, mma),)
        sums = sums + (each,)
    return sums


@gluon.jit(do_not_specialize=["M", "limit", "out_stride", "loops"])
def quantised_kernel(
    operands,  # CodesOperands
    epilogue,  # CodesEpilogue
    M,
    N,
    limit,
    out_stride,
    loops,  # equal to LOOPS, but unknown to the compiler: it would unroll the loop and run out of registers
    K: gl.constexpr,
    S: gl.constexpr,
    KT: gl.constexpr,
    PAIRWISE: gl.constexpr,  # number of neighbouring splits that are added first
    R: gl.constexpr,
    BLOCKS: gl.constexpr,  # groups of 8 rows of x
    D: gl.constexpr,  # number of K tiles of weights loaded ahead
    XD: gl.constexpr,  # number of K tiles of x loaded ahead
    FORM: gl.constexpr,  # form of the codes, see `code_packing`
    GROUP: gl.constexpr,  # values of K that share a scale; 0: all
    PER: gl.constexpr,  # words of scales per tile and group; for fp4 per 128 values of K
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Computes R weight rows by 8 BLOCKS rows of x."""
    UNIT: gl.constexpr = unit_of(FORM, GROUP)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, UNIT // 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, UNIT // 8)
    x: gl.constexpr = gl.DotOperandLayout(1, mma, UNIT // 16)  # in words, so half as many are contiguous
    w: gl.constexpr = words_layout(S, R)
    T: gl.constexpr = (K + S * KT - 1) // (S * KT)
    RAGGED: gl.constexpr = K % (S * KT) != 0
    STEP: gl.constexpr = S * KT // 2  # words of x between two K tiles of a warp
    OWN_SUM: gl.constexpr = GROUP == 0 and offset_of(FORM) > 0  # True: x is summed over all of K

    tile = gl.program_id(0)
    first_row = gl.program_id(1) * (BLOCKS * BLOCK)
    of, inside = weight_offsets(tile, N, K, S, KT, R, FORM, GROUP, PER, w, T)
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, x))), 1), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, UNIT // 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, x))), 0), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, x))), 0), 1)
    x_of = ()
    for b in gl.static_range(BLOCKS):
        # rows after the last one repeat it; they need no memory traffic, and their results are not stored
        x_of = x_of + (gl.minimum(b * BLOCK + m, M - 1 - first_row) * (K // 2) + s * (KT // 2) + k,)
    x_in = (T - 1) * S + s < K // KT
    x_at = operands.x + first_row.to(gl.int64) * (K // 2)
    at = starts_of(operands, tile.to(gl.int64), K, R, FORM, GROUP, PER)

    ws = ()
    for i in gl.static_range(D):
        ws = ws + (k_tile_of(at, of, i, inside, RAGGED and i == T - 1, S, KT, FORM, GROUP, PER),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = no_sums(S, R, BLOCKS, OWN_SUM, mma)
    like = sum_of_splits(sums[0][0], PAIRWISE)
    place = weight_numbers(like, tile * R, 16, 8)
    factor = gl.load(operands.factors + place, mask=place < N, other=0.0)
    loaded = ()
    if BLOCKS == 1:
        loaded = addends(like, tile, first_row, epilogue.bias, epilogue.residual, M, N, GATED)
    xs = ()
    for i in gl.static_range(XD):
        xs = xs + (all_rows_in(x_at, x_of, i * STEP, x_in, RAGGED and i == T - 1, KT, UNIT),)
    ones_of = ()
    if offset_of(FORM) > 0:
        ones_of = weight_operand(ones(S, words_layout(S, 16)), gl.bfloat16, left)

    LONGEST: gl.constexpr = UNROLLED if groups_of(KT, FORM, GROUP) == 0 and BLOCKS == 1 else UNROLLED_LESS
    LOOPS: gl.constexpr = (T - D - 1) // D if T > LONGEST and T > D else 0
    REST: gl.constexpr = T - LOOPS * D
    if LOOPS > 0:
        for _turn in range(loops):
            for i in gl.static_range(D):
                rows, xs = _first_of(xs)
                of_x = (x_at, x_of, x_in)
                sums = _step(sums, ws[0], rows, of_x, ones_of, left, right, FORM, GROUP, KT, UNIT, i * STEP, False)
                ws = ws[1:] + (k_tile_of(at, of, i + D, inside, False, S, KT, FORM, GROUP, PER),)
                if XD > 0:
                    xs = xs + (all_rows_in(x_at, x_of, (i + XD) * STEP, x_in, False, KT, UNIT),)
            at = moved(at, D, S, KT, FORM, GROUP, PER)
            x_at = x_at + D * STEP
    of_x = (x_at, x_of, x_in)
    for i in gl.static_range(REST):
        rows, xs = _first_of(xs)
        sums = _step(
            sums, ws[0], rows, of_x, ones_of, left, right, FORM, GROUP, KT, UNIT, i * STEP, RAGGED and i == REST - 1
        )
        ws = ws[1:]
        if i + D < REST:
            ws = ws + (k_tile_of(at, of, i + D, inside, RAGGED and i + D == REST - 1, S, KT, FORM, GROUP, PER),)
        if XD > 0 and i + XD < REST:
            xs = xs + (all_rows_in(x_at, x_of, (i + XD) * STEP, x_in, RAGGED and i + XD == REST - 1, KT, UNIT),)

    for b in gl.static_range(BLOCKS):
        first = first_row + b * BLOCK
        acc = sums[b][0]
        if OWN_SUM:
            acc = less_offset(acc, sums[b][1], FORM)
        total = sum_of_splits(acc, PAIRWISE) * factor
        if epilogue.row_factors is not None:
            total = total * loaded_factor(epilogue.row_factors, first, M, like)
        if epilogue.keys is not None:
            enter_keys(total, tile, first, epilogue.keys, M, N, limit)
        else:
            if BLOCKS > 1:
                loaded = addends(like, tile, first, epilogue.bias, epilogue.residual, M, N, GATED)
            write_tile(
                total,
                loaded,
                tile,
                first,
                epilogue.out,
                M,
                N,
                GATED,
                epilogue.bias is not None,
                epilogue.residual is not None,
            )
    if epilogue.keys is not None:
        write_argmax(epilogue.keys, epilogue.out, out_stride, M, S)
