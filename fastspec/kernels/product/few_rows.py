"""Packed product for up to 16 rows of x (more in blocks of rows): operands go from memory to registers, warps split K.

A CTA has R weight rows. S warps take the K tiles of KT values in turn. A lane loads 16 contiguous bytes of a K tile,
which are its operands of the tensor core. Weights and x do not pass through shared memory. D K tiles of weights are
loaded before the kernel waits for the previous kernel. With a norm, the squares of x are summed during the products, or
AHEAD of them, while the first weights are loaded.
"""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.product.epilogue import (
    add_squares,
    added_up,
    addends,
    apart,
    enter_keys,
    folded,
    loaded_factor,
    no_squares,
    root_scale,
    row_factor,
    row_operand,
    times_gamma,
    weight_operand,
    write_argmax,
    write_tile,
)
from fastspec.kernels.product.k_steps import by_groups

UNROLLED = gl.constexpr(16)  # with more K tiles than this, the loop over them is not unrolled
SQUARED = gl.constexpr(4)  # K tiles of x that are loaded ahead while their squares are summed


@gluon.jit
def words_at(at, of, k, ragged: gl.constexpr, policy: gl.constexpr):
    """Loads words at offsets `of` from `at`. Zero where `k` is beyond K in a ragged last K tile."""
    if ragged:
        return gl.load(at + of, mask=k, other=0, eviction_policy=policy)
    else:
        return gl.load(at + of, eviction_policy=policy)


@gluon.jit
def _weights(at, of, first: gl.constexpr, k, ragged: gl.constexpr):
    return words_at(at[0], of[0] + first * 16, k, ragged, "evict_first")


@gluon.jit
def _rows(at, of, first: gl.constexpr, k, ragged: gl.constexpr):
    """Loads words of x; with a norm also those of gamma."""
    if len(at) == 3:
        return words_at(at[1], of[1] + first, k, ragged, ""), words_at(at[2], of[2] + first, k, ragged, "")
    else:
        return (words_at(at[1], of[1] + first, k, ragged, ""),)


@gluon.jit
def _moved(at, words: gl.constexpr):
    if len(at) == 3:
        return at[0] + words * 16, at[1] + words, at[2] + words
    else:
        return at[0] + words * 16, at[1] + words


@gluon.jit
def _runs(words):
    """Rearranges [S, KT / 2, BM] to [S, KT / 32, 4, BM, 4].

    The last axis has the four words that a lane loads together.
    """
    runs = gl.reshape(words, [words.shape[0], words.shape[1] // 16, 4, 4, words.shape[2]])
    return gl.permute(runs, (0, 1, 2, 4, 3))


@gluon.jit
def _squares(at, of, k, STEP: gl.constexpr, T: gl.constexpr, RAGGED: gl.constexpr, DTYPE: gl.constexpr):
    """Sums the squares of rows of x over each 8 values that a lane loads together: [S, KT / 32, 4, BM]."""
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
    """Sums the squares [S, KT / 32, 4, BM] to [BM]: first neighbours, then the S parts in order."""
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
def _step(sums, weight, inputs, left: gl.constexpr, right: gl.constexpr, DTYPE: gl.constexpr):
    """Processes one K tile. Adds weight rows^T to sums[0], and the squares of the rows to sums[1], if there is one."""
    rows = inputs[0]
    if len(inputs) == 2:
        rows = times_gamma(inputs[0], inputs[1], DTYPE)
    acc = mma_v2(weight_operand(weight, DTYPE, left), row_operand(rows, DTYPE, right), sums[0])
    if len(sums) == 2:
        return acc, add_squares(sums[1], _runs(inputs[0]), DTYPE)
    else:
        return (acc,)


@gluon.jit
def sum_of_splits(acc, PAIRWISE: gl.constexpr):
    """Adds the sums [S, R, BM] of S warps. First adds each PAIRWISE neighbouring sums, then these results in order.

    Returns [R / 16, 2, 8, BM].
    """
    S: gl.constexpr = acc.shape[0]
    R: gl.constexpr = acc.shape[1]
    BM: gl.constexpr = acc.shape[2]
    splits = gl.reshape(acc, [S, R // 16, 2, 8, BM])
    if S > 1:
        merged: gl.constexpr = gl.BlockedLayout([S, 1, 2, 1, 1], [1, 1, 1, 8, 4], [1, 1, 1, 1, S], [0, 2, 3, 4, 1])
        splits = gl.convert_layout(splits, merged)
    flat = gl.reshape(gl.permute(splits, (1, 2, 3, 4, 0)), [R * BM, S])
    return gl.reshape(by_groups(apart(flat), PAIRWISE), [R // 16, 2, 8, BM])


@gluon.jit(do_not_specialize=["M", "limit", "out_stride", "loops"])
def few_rows_kernel(
    inputs,  # Rows of launch.py
    weight_ptr,  # int32 words [N / 16, K / 32, 16, 16]
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
    XD: gl.constexpr,  # number of K tiles of x loaded ahead
    AHEAD: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Computes R weight rows by BM rows of x in one CTA."""
    x_ptr, gamma_ptr, scale_ptr, eps = inputs
    bias_ptr, residual_ptr, out_ptr, keys_ptr, _parts_ptr = epilogue
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    w: gl.constexpr = gl.DotOperandLayout(0, mma, 4)  # in words, so half as many are contiguous
    x: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    W: gl.constexpr = KT // 2
    T: gl.constexpr = (K + S * KT - 1) // (S * KT)
    RAGGED: gl.constexpr = K % (S * KT) != 0
    RUNS: gl.constexpr = PAIRWISE == 0  # True: the K tiles of a warp are neighbours
    STEP: gl.constexpr = W if RUNS else S * W
    APART: gl.constexpr = T * W if RUNS else W  # words between the first K tiles of two warps

    tile = gl.program_id(0)
    first_row = gl.program_id(1) * BM
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, w))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, w))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(1, w))), 0), 1)
    group = gl.minimum(tile * (R // 16) + r // 16, N // 16 - 1) - tile * (R // 16)
    of = (group * (8 * K) + (s * (APART * 16) + k // 16 * 256 + r % 16 * 16 + k % 16),)
    w_in = (T - 1) * STEP + s * APART + k < K // 2

    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, x))), 1), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(2, x))), 0), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(1, x))), 0), 1)
    # rows after the last one repeat it; they need no memory traffic, and their results are not stored
    of = of + (gl.minimum(m, M - 1 - first_row) * (K // 2) + s * APART + k,)
    x_in = (T - 1) * STEP + s * APART + k < K // 2
    at = (weight_ptr + tile.to(gl.int64) * (R * K // 2), x_ptr + first_row.to(gl.int64) * (K // 2))
    if gamma_ptr is not None:
        at = at + (gamma_ptr,)
        of = of + (s * APART + k,)

    ws = ()
    for i in gl.static_range(D):
        ws = ws + (_weights(at, of, i * STEP, w_in, RAGGED and i == T - 1),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = (gl.zeros([S, R, BM], gl.float32, mma),)
    like = sum_of_splits(sums[0], PAIRWISE)
    loaded = addends(like, tile, first_row, bias_ptr, residual_ptr, M, N, GATED)
    if scale_ptr is not None:
        factor = loaded_factor(scale_ptr, first_row, M, like)
    if gamma_ptr is not None and AHEAD:
        squares = _row_sums(_squares(at[1], of[1], x_in, STEP, T, RAGGED, DTYPE))
        factor = row_factor(root_scale(squares, K, eps), like)
    xs = ()
    for i in gl.static_range(XD):
        xs = xs + (_rows(at, of, i * STEP, x_in, RAGGED and i == T - 1),)
    if gamma_ptr is not None and not AHEAD:
        sums = sums + (no_squares(_runs(xs[0][0])),)

    LOOPS: gl.constexpr = (T - D - 1) // D if T > UNROLLED else 0
    REST: gl.constexpr = T - LOOPS * D
    if LOOPS > 0:
        for _turn in range(loops):
            for i in gl.static_range(D):
                sums = _step(sums, ws[0], xs[0], left, right, DTYPE)
                ws = ws[1:] + (_weights(at, of, (i + D) * STEP, w_in, False),)
                xs = xs[1:] + (_rows(at, of, (i + XD) * STEP, x_in, False),)
            at = _moved(at, D * STEP)
    for i in gl.static_range(REST):
        sums = _step(sums, ws[0], xs[0], left, right, DTYPE)
        ws, xs = ws[1:], xs[1:]
        if i + D < REST:
            ws = ws + (_weights(at, of, (i + D) * STEP, w_in, RAGGED and i + D == REST - 1),)
        if i + XD < REST:
            xs = xs + (_rows(at, of, (i + XD) * STEP, x_in, RAGGED and i + XD == REST - 1),)

    total = sum_of_splits(sums[0], PAIRWISE)
    if gamma_ptr is not None and not AHEAD:
        factor = row_factor(root_scale(_row_sums(sums[1]), K, eps), total)
    if gamma_ptr is not None or scale_ptr is not None:
        total = total * factor
    if keys_ptr is not None:
        enter_keys(total, tile, first_row, keys_ptr, M, N, limit)
        write_argmax(keys_ptr, out_ptr, out_stride, M, S)
    else:
        write_tile(total, loaded, tile, first_row, out_ptr, M, N, GATED, bias_ptr is not None, residual_ptr is not None)
