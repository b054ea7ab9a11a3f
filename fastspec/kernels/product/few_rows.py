"""Packed product for few rows of x: operands go from global memory to registers, and warps split K.

A CTA has R weight rows by BM rows of x. S warps take the K tiles of KT values in turn. A lane loads 16 contiguous bytes
of a K tile: operands of the tensor core, or codes that it converts to operands (see reader.py). Weights and x do not
pass through shared memory. D K tiles of weights are loaded before the kernel waits for the previous kernel.

With a norm, the squares of x are summed during the products, or AHEAD of them, while the first weights are loaded.
Before products with codes another kernel computes the norm.

Batch invariance. An element of the result is the sum of S partial sums, one of each warp. A partial sum is over every
S-th K tile, in ascending order. (For weights with `tree` it is over a contiguous part of K.) The partial sums are then
added in a fixed order. A row's bits depend neither on the number of rows nor on the row's index.
"""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.product.epilogue import (
    add_squares,
    added_up,
    addends,
    enter_keys,
    folded,
    loaded_factor,
    no_squares,
    root_scale,
    row_factor,
    sum_of_splits,
    times_gamma,
    weight_numbers,
    weight_operand,
    write_argmax,
    write_tile,
)
from fastspec.kernels.product.quantised.conversion import offset_of, ones, words_layout
from fastspec.kernels.product.reader import (
    block_of,
    block_sums,
    groups_of,
    k_tile_of,
    less_offset,
    moved,
    no_sums,
    operands_of,
    rows_in,
    scales_of,
    starts_of,
    unit_of,
    weight_offsets,
    words_at,
)

UNROLLED = gl.constexpr(16)  # with more K tiles than this, the loop over them is not unrolled
# the same limit, if groups of K have their own sums or x has several blocks of rows: the assembler would start all
# iterations at once
UNROLLED_LESS = gl.constexpr(4)
SQUARED = gl.constexpr(4)  # K tiles of x that are loaded ahead while their squares are summed


@gluon.jit
def _rows(at, of, first: gl.constexpr, inside, RAGGED: gl.constexpr, KT: gl.constexpr, UNIT: gl.constexpr,
          BLOCKS: gl.constexpr):  # fmt: skip
    """Loads the 32-bit words of x in one K tile. Returns a tensor for each block of rows and each unit of K.

    For units see `unit_of`. With a norm, one more tensor has the words of gamma, the norm's weight.

    at: addresses, (x,) or with a norm (x, gamma). of: offsets for each block of rows of x, then for gamma. first:
    offset of the K tile, in words. inside, RAGGED: see `k` and `ragged` of `words_at`.
    """
    rows = ()
    for b in gl.static_range(BLOCKS):
        rows = rows + rows_in(at[0], of[b], first, inside, RAGGED, KT, UNIT)
    if len(at) == 2:
        rows = rows + (words_at(at[1], of[BLOCKS] + first, inside, RAGGED, ""),)
    return rows


@gluon.jit
def _first_of(some):
    """Returns the first element of a tuple, or () if the tuple is empty."""
    if len(some) == 0:
        return ()
    else:
        return some[0]


@gluon.jit
def _moved(at, words: gl.constexpr):
    """Returns the addresses `at` of x and, with a norm, of gamma, all advanced by `words` 32-bit words."""
    found = ()
    for i in gl.static_range(len(at)):
        found = found + (at[i] + words,)
    return found


@gluon.jit
def _runs(words):
    """Rearranges the words of x in a K tile, [S, KT / 2, BM], to [S, KT / 32, 4, BM, 4].

    The last axis has the four words (16 bytes) that a lane loads together.
    """
    runs = gl.reshape(words, [words.shape[0], words.shape[1] // 16, 4, 4, words.shape[2]])
    return gl.permute(runs, (0, 1, 2, 4, 3))


@gluon.jit
def _squares(at, of, k, STEP: gl.constexpr, T: gl.constexpr, RAGGED: gl.constexpr, DTYPE: gl.constexpr):
    """Sums the squares of x over all K tiles: [S, KT / 32, 4, BM], one sum for each 8 values that a lane loads at once.

    For `at`, `of` and `k` see `words_at`. STEP: words from one K tile of a warp to its next. T: number of K tiles of a
    warp.
    """
    total = no_squares(_runs(words_at(at, of, k, RAGGED, "")))
    FULL: gl.constexpr = (T - 1 if RAGGED else T) // SQUARED
    if T <= UNROLLED:
        for i in gl.static_range(FULL):
            total = _next_squares(total, at, of + i * (SQUARED * STEP), k, STEP, SQUARED, False, DTYPE)
    else:
        here = at
        for _turn in range(FULL):
            total = _next_squares(total, here, of, k, STEP, SQUARED, False, DTYPE)
            here += SQUARED * STEP
    total = _next_squares(total, at, of + FULL * SQUARED * STEP, k, STEP, T - FULL * SQUARED, RAGGED, DTYPE)
    return total


@gluon.jit
def _row_sums(total):
    """Adds the sums of squares [S, KT / 32, 4, BM] of S splits of K to one sum for each row of x, [BM].

    First adds the sums of each split as a binary tree. Then adds the results of the splits in order.
    """
    S: gl.constexpr = total.shape[0]
    BM: gl.constexpr = total.shape[3]
    RUNS: gl.constexpr = total.shape[1] * 4
    merged: gl.constexpr = gl.BlockedLayout([S, RUNS // 4, 4, 1], [1, 1, 1, 32], [1, 1, 1, S], [0, 1, 2, 3])
    sums = gl.permute(gl.convert_layout(total, merged), (3, 0, 1, 2))
    return added_up(gl.reshape(folded(gl.reshape(sums, [BM * S, RUNS])), [BM, S]))


@gluon.jit
def _next_squares(total, at, of, k, STEP: gl.constexpr, N: gl.constexpr, RAGGED: gl.constexpr, DTYPE: gl.constexpr):
    k_tiles = ()
    for i in gl.static_range(N):
        k_tiles = k_tiles + (words_at(at, of + i * STEP, k, RAGGED and i == N - 1, ""),)
    for i in gl.static_range(N):
        total = add_squares(total, _runs(k_tiles[i]), DTYPE)
    return total


@gluon.jit
def _step(
    sums, squares, k_tile, rows, x_at, x_of, x_in, ones_of, left: gl.constexpr, right: gl.constexpr, FORM: gl.constexpr,
    GROUP: gl.constexpr, KT: gl.constexpr, FIRST: gl.constexpr, RAGGED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Adds the products of one K tile to the sums of each block of rows of x. Codes are converted once for all blocks.

    Also adds the squares of x to `squares`, unless it is empty. Returns (sums, squares).

    sums: accumulators, as from `no_sums`. k_tile: words of the weights. rows: words of x that were loaded ahead. If
    `rows` is empty, the words of each block are loaded when they are needed.
    """
    UNIT: gl.constexpr = unit_of(FORM, GROUP, KT)
    UNITS: gl.constexpr = KT // UNIT
    mma: gl.constexpr = sums[0][0].type.layout
    units = operands_of(k_tile, left, FORM, GROUP, KT, DTYPE)
    scales = scales_of(k_tile, mma, FORM, GROUP, KT)
    found = ()
    for b in gl.static_range(len(sums)):
        if len(rows) == 0:
            block = rows_in(x_at[0], x_of[b], FIRST, x_in, RAGGED, KT, UNIT)
        elif len(x_at) == 2:
            block = (times_gamma(rows[0], rows[1], DTYPE),)
        else:
            block = rows[b * UNITS : (b + 1) * UNITS]
        found = found + (block_sums(sums[b], units, block, scales, ones_of, right, FORM, DTYPE),)
    if len(squares) == 1:
        squares = (add_squares(squares[0], _runs(rows[0]), DTYPE),)
    return found, squares


@gluon.jit(do_not_specialize=["M", "limit", "out_stride", "loops"])
def few_rows_kernel(
    inputs,  # Rows of launch.py
    weight,  # WeightParts of reader.py
    epilogue,  # Epilogue of launch.py
    M,
    N,
    limit,
    out_stride,
    loops,  # equal to LOOPS, but unknown to the compiler: it would unroll the loop and run out of registers
    K: gl.constexpr,
    S: gl.constexpr,
    KT: gl.constexpr,
    # number of neighbouring splits that are added first; 0: splits are ranges of K and are added as a tree
    PAIRWISE: gl.constexpr,
    R: gl.constexpr,
    BM: gl.constexpr,
    D: gl.constexpr,  # number of K tiles of weights loaded ahead
    XD: gl.constexpr,  # number of K tiles of x loaded ahead; 0, with codes only: none
    AHEAD: gl.constexpr,  # True: squares of x are summed before the products
    FORM: gl.constexpr,  # "values", or the form of codes, see `code_packing`
    GROUP: gl.constexpr,  # values of K that share a scale; 0: all
    PER: gl.constexpr,  # words that hold the scales of 16 weight rows for one group; with fp4, for 128 values of K
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Computes a tile of the result in each CTA: the products of R weight rows with BM rows of x, and the epilogue."""
    x_ptr, gamma_ptr, scale_ptr, eps = inputs
    UNIT: gl.constexpr = unit_of(FORM, GROUP, KT)
    BLOCK: gl.constexpr = block_of(FORM, BM)
    BLOCKS: gl.constexpr = BM // BLOCK
    LANE: gl.constexpr = min(8, UNIT // 8)  # contiguous values of a lane's operand
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, LANE)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, LANE)
    # in words, so half as many are contiguous
    w: gl.constexpr = gl.DotOperandLayout(0, mma, 4) if FORM == "values" else words_layout(S, R)
    x: gl.constexpr = gl.DotOperandLayout(1, mma, LANE // 2)
    W: gl.constexpr = KT // 2
    T: gl.constexpr = (K + S * KT - 1) // (S * KT)
    RAGGED: gl.constexpr = K % (S * KT) != 0
    RUNS: gl.constexpr = PAIRWISE == 0  # True: the K tiles of a warp are neighbours
    NEXT: gl.constexpr = 1 if RUNS else S  # K tiles from one of a warp to its next
    STEP: gl.constexpr = NEXT * W
    APART: gl.constexpr = T * W if RUNS else W  # words between the first K tiles of two warps
    OWN_SUM: gl.constexpr = GROUP == 0 and offset_of(FORM) > 0  # True: x is summed over all of K

    tile = gl.program_id(0)
    first_row = gl.program_id(1) * BM
    w_of, w_in = weight_offsets(tile, N, K, S, KT, R, FORM, GROUP, PER, w, T, RUNS)
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, x))), 1), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, UNIT // 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, x))), 0), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, x))), 0), 1)
    x_of = ()
    for b in gl.static_range(BLOCKS):
        # rows after the last one repeat it; they need no memory traffic, and their results are not stored
        x_of = x_of + (gl.minimum(b * BLOCK + m, M - 1 - first_row) * (K // 2) + s * APART + k,)
    x_in = (T - 1) * S + s < K // KT
    if FORM == "values":
        x_in = (T - 1) * STEP + s * APART + k < K // 2  # K may end with half of a K tile
    w_at = starts_of(weight, tile.to(gl.int64), K, R, FORM, GROUP, PER)
    x_at = (x_ptr + first_row.to(gl.int64) * (K // 2),)
    if gamma_ptr is not None:
        x_at = x_at + (gamma_ptr,)
        x_of = x_of + (s * APART + k,)

    ws = ()
    for i in gl.static_range(D):
        ws = ws + (k_tile_of(w_at, w_of, i, w_in, RAGGED and i == T - 1, NEXT, KT, FORM, GROUP, PER),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = no_sums(S, R, BLOCK, BLOCKS, OWN_SUM, mma)
    like = sum_of_splits(sums[0][0], PAIRWISE)
    if FORM != "values":
        column = weight_numbers(like, tile * R, 16, 8)
        column_factor = gl.load(weight.factors + column, mask=column < N, other=0.0)
    loaded = ()
    if BLOCKS == 1:
        loaded = addends(like, tile, first_row, epilogue.bias_ptr, epilogue.residual_ptr, M, N, GATED)
    if scale_ptr is not None and FORM == "values":
        factor = loaded_factor(scale_ptr, first_row, M, like)
    squares = ()
    if gamma_ptr is not None and AHEAD:
        summed = _row_sums(_squares(x_at[0], x_of[0], x_in, STEP, T, RAGGED, DTYPE))
        factor = row_factor(root_scale(summed, K, eps), like)
    xs = ()
    for i in gl.static_range(XD):
        xs = xs + (_rows(x_at, x_of, i * STEP, x_in, RAGGED and i == T - 1, KT, UNIT, BLOCKS),)
    if gamma_ptr is not None and not AHEAD:
        squares = (no_squares(_runs(xs[0][0])),)
    ones_of = ()
    if offset_of(FORM) > 0:
        ones_of = weight_operand(ones(S, words_layout(S, 16)), DTYPE, left)

    LONGEST: gl.constexpr = UNROLLED if groups_of(KT, FORM, GROUP) == 0 and BLOCKS == 1 else UNROLLED_LESS
    LOOPS: gl.constexpr = (T - D - 1) // D if T > LONGEST and T > D else 0
    REST: gl.constexpr = T - LOOPS * D
    if LOOPS > 0:
        for _turn in range(loops):
            for i in gl.static_range(D):
                sums, squares = _step(
                    sums, squares, ws[0], _first_of(xs), x_at, x_of, x_in, ones_of, left, right, FORM, GROUP, KT,
                    i * STEP, False, DTYPE,
                )  # fmt: skip
                ws = ws[1:] + (k_tile_of(w_at, w_of, i + D, w_in, False, NEXT, KT, FORM, GROUP, PER),)
                if XD > 0:
                    xs = xs[1:] + (_rows(x_at, x_of, (i + XD) * STEP, x_in, False, KT, UNIT, BLOCKS),)
            w_at = moved(w_at, D, NEXT, KT, FORM, GROUP, PER)
            x_at = _moved(x_at, D * STEP)
    for i in gl.static_range(REST):
        sums, squares = _step(
            sums, squares, ws[0], _first_of(xs), x_at, x_of, x_in, ones_of, left, right, FORM, GROUP, KT,
            i * STEP, RAGGED and i == REST - 1, DTYPE,
        )  # fmt: skip
        ws, xs = ws[1:], xs[1:]
        if i + D < REST:
            ws = ws + (k_tile_of(w_at, w_of, i + D, w_in, RAGGED and i + D == REST - 1, NEXT, KT, FORM, GROUP, PER),)
        if XD > 0 and i + XD < REST:
            xs = xs + (_rows(x_at, x_of, (i + XD) * STEP, x_in, RAGGED and i + XD == REST - 1, KT, UNIT, BLOCKS),)

    for b in gl.static_range(BLOCKS):
        first = first_row + b * BLOCK
        acc = sums[b][0]
        if OWN_SUM:
            acc = less_offset(acc, sums[b][1], FORM)
        total = sum_of_splits(acc, PAIRWISE)
        if gamma_ptr is not None and not AHEAD:
            factor = row_factor(root_scale(_row_sums(squares[0]), K, eps), total)
        if FORM != "values":
            total = total * column_factor
            if scale_ptr is not None:
                total = total * loaded_factor(scale_ptr, first, M, like)
        elif gamma_ptr is not None or scale_ptr is not None:
            total = total * factor
        if epilogue.keys_ptr is not None:
            enter_keys(total, tile, first, epilogue.keys_ptr, epilogue.ids_ptr, M, N, limit)
        else:
            if BLOCKS > 1:
                loaded = addends(like, tile, first, epilogue.bias_ptr, epilogue.residual_ptr, M, N, GATED)
            write_tile(
                *(total, loaded, tile, first, epilogue.out_ptr, M, N, GATED),
                *(epilogue.bias_ptr is not None, epilogue.residual_ptr is not None),
            )
    if epilogue.keys_ptr is not None:
        write_argmax(epilogue.keys_ptr, epilogue.out_ptr, out_stride, M, S)
