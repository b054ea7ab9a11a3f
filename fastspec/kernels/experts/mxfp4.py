"""Products of chosen experts in mxfp4. Codes are converted to operands of the tensor core in registers.

A CTA has R weight rows of one expert, and up to 8 BLOCKS of the pairs (row, chosen expert) with that expert. S warps
take every S-th chunk of 128 values of K. A lane's 16 bytes are 32 codes of a row:

    K        | chunk 0: 128 values | chunk 1 | ... | chunk S-1 | chunk S | ...
    warp     | 0                   | 1       | ... | S-1       | 0       | ...

Masks and shifts convert codes to bf16, which are multiplied by the scale, a power of two. Both steps are exact, because
these numbers have few bits.

Row invariance: an element consists of S sums, each in ascending order of k, which are then added in order. A pair's
bits do not depend on the number of its expert's pairs, nor on its index among them.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.gluon_compat import thread_barrier
from fastspec.kernels.product.epilogue import (
    column_layout,
    row_operand,
    times_gamma,
    weight_numbers,
    weight_operand,
)
from fastspec.kernels.product.few_rows import sum_of_splits, words_at
from fastspec.kernels.product.quantised.conversion import code_halves, joined_halves, words_layout

BLOCK = gl.constexpr(8)  # pairs per product
TIMES = gl.constexpr(2.0**62)  # sums are 2^-62 too small: codes as bf16 by 2^-126, stored scales 2^64 too large
PIECE = gl.constexpr(256)  # words of 16 rows in a chunk
BOTH = gl.constexpr(0x00800080)  # multiplied by an exponent it gives a pair of bf16 with that exponent


class ExpertOperands(NamedTuple):
    """Operands of a product.

    Attributes:
        x: int32 words [R, K / 2] of bf16, or a row for each pair.
        words, scales: tensors of an `ExpertStack`.
    """

    x: Any
    words: Any
    scales: Any


class ExpertEpilogue(NamedTuple):
    """Bias and output of a product.

    Attributes:
        bias: [E, N] or None.
        out: [R * CHOSEN, N], or N / 2 where gated.
    """

    bias: Any
    out: Any


@gluon.jit
def _chunk(at, of, i: gl.constexpr, inside, RAGGED: gl.constexpr, S: gl.constexpr):
    """Loads codes [S, R, 16] and scales [S, R] of chunk number i of every split of K."""
    codes = words_at(at[0], of[0] + i * (S * PIECE), inside[0], RAGGED, "evict_first")
    return codes, words_at(at[1], of[1] + i * (S * 16), inside[1], RAGGED, "")


@gluon.jit
def _scaled(pairs, scales, i: gl.constexpr):
    """Multiplies pairs [S, R, 16] of codes by the power of two in byte i of scales [S, R]."""
    factor = gl.expand_dims(((scales >> (8 * i)) & 0xFF) * BOTH, 2)
    factor, _ = gl.broadcast(factor, pairs)
    return times_gamma(pairs, factor, gl.bfloat16)


@gluon.jit
def _operands(codes, scales, left: gl.constexpr):
    """Builds the two left operands [S, R, 64] of a chunk."""
    first, second = code_halves(codes, "fp4", 0)
    third, fourth = code_halves(codes, "fp4", 1)
    low = joined_halves(_scaled(first, scales, 0), _scaled(second, scales, 1))
    high = joined_halves(_scaled(third, scales, 2), _scaled(fourth, scales, 3))
    return weight_operand(low, gl.bfloat16, left), weight_operand(high, gl.bfloat16, left)


@gluon.jit
def _pair_of(chosen, first, count, j):
    """Returns the pair numbers at indices j of a CTA's pairs. Indices beyond the last pair give the last pair again."""
    if chosen.order is None:
        return first + j * 0
    else:
        return gl.load(chosen.order + (first + gl.minimum(j, count - 1)))


@gluon.jit
def _activated(total, alpha, limit, GATED: gl.constexpr, ACTIVATION: gl.constexpr):
    """Applies the activation to sums [A, 2, 8, BM]. With a gate the result is [A, 8, BM]."""
    if GATED:
        gate, up = gl.split(gl.permute(total, (0, 2, 3, 1)))
        if ACTIVATION == "clamped":
            gate = gl.where(gate > limit, limit, gate)
            up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
            return gate / (1.0 + gl.exp(-alpha * gate)) * (up + 1.0)
        else:
            return gate / (1.0 + gl.exp(-gate)) * up
    elif ACTIVATION == "relu2":
        total = gl.where(total < 0.0, 0.0, total)
        return total * total
    else:
        return total


@gluon.jit
def _write(
    total, tile, expert, pair, valid, epilogue, alpha, limit,
    N: gl.constexpr, R: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Adds the bias, applies the activation, rounds once and stores: sums [R / 16, 2, 8, BM] of pairs [BM]."""
    WIDTH: gl.constexpr = N // 2 if GATED else N
    if GATED:
        column = weight_numbers(total, tile * (R // 2), 8, 0)
        place = weight_numbers(total, tile * (R // 2), 8, N // 2)
    else:
        column = weight_numbers(total, tile * R, 16, 8)
        place = column
    if epilogue.bias is not None:
        total += gl.load(epilogue.bias + (expert * N + place), mask=column < WIDTH, other=0.0).to(gl.float32)
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 0), 0)
    valid = gl.expand_dims(gl.expand_dims(gl.expand_dims(valid, 0), 0), 0) & (column < WIDTH)
    at = pair * WIDTH + column
    if GATED:
        at, _ = gl.split(gl.permute(at, (0, 2, 3, 1)))
        valid, _ = gl.split(gl.permute(valid, (0, 2, 3, 1)))
    out = _activated(total, alpha, limit, GATED, ACTIVATION)
    gl.store(epilogue.out + at, out.to(epilogue.out.dtype.element_ty), mask=valid, eviction_policy="evict_last")


@gluon.jit
def mxfp4_kernel(
    operands,  # ExpertOperands
    chosen,  # Chosen of products.py
    epilogue,  # ExpertEpilogue
    alpha,
    limit,
    N: gl.constexpr,
    K: gl.constexpr,
    S: gl.constexpr,
    R: gl.constexpr,  # weight rows of a CTA
    BLOCKS: gl.constexpr,  # groups of 8 pairs
    D: gl.constexpr,  # number of chunks of weights loaded ahead
    CHOSEN: gl.constexpr,
    OF_PAIRS: gl.constexpr,  # x has a row for each pair
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,  # see `expert_kernel`
    PDL: gl.constexpr,
):
    """Multiplies R weight rows of an expert with up to 8 BLOCKS of its pairs.

    With OF_PAIRS (the second product) it loads weights and the list of pairs before it waits for x. The first product
    writes only x, and lets this kernel start only after the list of pairs is complete.
    """
    if PDL:
        if not OF_PAIRS:
            gdc_wait()
        gdc_launch_dependents()
    tile, number = gl.program_id(0), gl.program_id(1)
    if chosen.tiles is None:
        expert, first, count = gl.load(chosen.ids + number), number, 1
    else:
        at = chosen.tiles + number * 3
        expert, first, count = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    if count > 0:
        _multiply(
            operands, chosen, epilogue, alpha, limit, tile, expert, first, count,
            N, K, S, R, BLOCKS, D, CHOSEN, OF_PAIRS, GATED, ACTIVATION, PDL,
        )  # fmt: skip


@gluon.jit
def _multiply(
    operands, chosen, epilogue, alpha, limit, tile, expert, first, count,
    N: gl.constexpr, K: gl.constexpr, S: gl.constexpr, R: gl.constexpr, BLOCKS: gl.constexpr, D: gl.constexpr,
    CHOSEN: gl.constexpr, OF_PAIRS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Runs a CTA that has pairs."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    x: gl.constexpr = gl.DotOperandLayout(1, mma, 4)  # in words, so half as many are contiguous
    w: gl.constexpr = words_layout(S, R)
    CHUNKS: gl.constexpr = (K + 127) // 128
    T: gl.constexpr = (CHUNKS + S - 1) // S
    RAGGED: gl.constexpr = K % (128 * S) != 0

    s = gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, w))), 1)
    r = gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, w))), 0)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, w))), 0), 1)
    group = gl.minimum(tile * (R // 16) + r // 16, N // 16 - 1)  # row groups after the last one repeat it
    scales_of = (group * CHUNKS + s) * 16 + r % 16
    of = (gl.expand_dims(scales_of, 2) * 16 + k, scales_of)
    there = (T - 1) * S + s < CHUNKS
    inside = (gl.expand_dims(there, 2), there)
    before = expert.to(gl.int64) * (N * CHUNKS)
    at = (operands.words + before * 16, operands.scales + before)
    ws = ()
    for i in gl.static_range(min(D, T)):
        ws = ws + (_chunk(at, of, i, inside, RAGGED and i == T - 1, S),)
    if PDL and OF_PAIRS:
        gdc_wait()
    else:
        thread_barrier()  # without the barrier the assembler would move these loads down to their use

    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, x))), 1), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, x))), 0), 2)
    m = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, x)))
    word = s * 64 + k
    rows, sums = (), ()
    for b in gl.static_range(BLOCKS):
        pair = _pair_of(chosen, first, count, b * BLOCK + m)
        row = pair if OF_PAIRS else pair // CHOSEN
        rows = rows + (gl.expand_dims(gl.expand_dims(row, 0), 1) * (K // 2) + word,)
        sums = sums + (gl.zeros([S, R, BLOCK], gl.float32, mma),)
    for i in gl.static_range(T):
        units = _operands(ws[0][0], ws[0][1], left)  # two of [S, R, 64]
        ws = ws[1:]
        if i + D < T:
            ws = ws + (_chunk(at, of, i + D, inside, RAGGED and i + D == T - 1, S),)
        new = ()
        for b in gl.static_range(BLOCKS):
            acc = sums[b]
            for u in gl.static_range(2):
                next_word = i * (S * 64) + u * 32
                words = words_at(operands.x, rows[b] + next_word, word + next_word < K // 2, RAGGED and i == T - 1, "")
                acc = mma_v2(units[u], row_operand(words, gl.bfloat16, right), acc)
            new = new + (acc,)
        sums = new

    for b in gl.static_range(BLOCKS):
        total = sum_of_splits(sums[b], 1) * TIMES
        j = b * BLOCK + gl.arange(0, BLOCK, layout=column_layout(total.type.layout))
        pair = _pair_of(chosen, first, count, j)
        _write(total, tile, expert, pair, j < count, epilogue, alpha, limit, N, R, GATED, ACTIVATION)
