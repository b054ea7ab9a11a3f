"""Products with the quantised weights (codes) of chosen experts. Codes are converted to operands in registers.

A pair is a row of x and one of its chosen experts. A CTA has R weight rows of one expert, and up to 8 * BLOCKS pairs
with that expert. Each of S warps takes every S-th chunk of 128 values of K. A lane's 16 bytes are 16 or 32 codes of a
row:

    K        | chunk 0: 128 values | chunk 1 | ... | chunk S-1 | chunk S | ...
    warp     | 0                   | 1       | ... | S-1       | 0       | ...

Codes of mxfp4 are multiplied by their scale, a power of two, before the product. The other forms are those of
`product.reader`, with the same conversion and the same sums. If the last chunk reaches beyond K, its weights there are
padding, and x counts as zero.

Batch invariance. An element of the result is the sum of S partial sums, one of each warp. Each is in ascending order of
k, and they are added in order. A pair's bits do not depend on the number of pairs with its expert, nor on its index
among them.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.gluon_compat import thread_barrier
from fastspec.kernels.product.epilogue import (
    column_layout,
    sum_of_splits,
    times_gamma,
    weight_numbers,
    weight_operand,
)
from fastspec.kernels.product.quantised.conversion import code_halves, joined_halves, offset_of, ones, words_layout
from fastspec.kernels.product.reader import (
    block_sums,
    k_tile_of,
    less_offset,
    no_sums,
    operands_of,
    scales_of,
    starts_of,
    unit_of,
    weight_offsets,
    words_at,
)

BLOCK = gl.constexpr(8)  # pairs in one product of the tensor core
CHUNK = gl.constexpr(128)  # values of K in a chunk
# sums of mxfp4 are 2^62 times too small: codes read as bf16 are 2^126 times too small, stored scales 2^64 times too
# large
TIMES = gl.constexpr(2.0**62)
PIECE = gl.constexpr(256)  # words of codes of 16 rows in a chunk
BOTH = gl.constexpr(0x00800080)  # times an exponent: a pair of bf16 powers of two with that exponent


class ExpertEpilogue(NamedTuple):
    """Bias and output of a product with the experts, as kernel arguments.

    Attributes:
        bias: [E, N]. None: no bias.
        out: a row for each pair: [R * CHOSEN, N], or [R * CHOSEN, N / 2] with a gate.
    """

    bias: Any
    out: Any


@gluon.jit
def _chunk(at, of, i: gl.constexpr, inside, RAGGED: gl.constexpr, S: gl.constexpr, FORM: gl.constexpr,
           GROUP: gl.constexpr, PER: gl.constexpr):  # fmt: skip
    """Loads the words of the i-th chunk (128 values of K) of each of S warps.

    With mxfp4 returns codes [S, R, 16] and scales [S, R]. With other forms returns the result of `k_tile_of`. at, of,
    inside: results of `_weights`. RAGGED: True to use the masks `inside`.
    """
    if FORM == "mxfp4":
        codes = words_at(at[0], of[0] + i * (S * PIECE), inside[0], RAGGED, "evict_first")
        return codes, words_at(at[1], of[1] + i * (S * 16), inside[1], RAGGED, "")
    else:
        return k_tile_of(at, of, i, inside, RAGGED, S, CHUNK, FORM, GROUP, PER)


@gluon.jit
def _scaled(pairs, scales, i: gl.constexpr):
    """Multiplies bf16 pairs of codes [S, R, 16] by the power of two whose exponent is byte i of scales [S, R]."""
    factor = gl.expand_dims(((scales >> (8 * i)) & 0xFF) * BOTH, 2)
    factor, _ = gl.broadcast(factor, pairs)
    return times_gamma(pairs, factor, gl.bfloat16)


@gluon.jit
def _operands(chunk, left: gl.constexpr, mma: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr):
    """Converts a chunk, as `_chunk` returns it, to left operands [S, R, values] of the tensor core, one for each unit.

    Also returns the scales [S, R, 1] for the sums of each group of K. They are an empty tuple if the sums need none.
    """
    if FORM == "mxfp4":
        codes, scales = chunk
        first, second = code_halves(codes, "fp4", 0)
        third, fourth = code_halves(codes, "fp4", 1)
        low = joined_halves(_scaled(first, scales, 0), _scaled(second, scales, 1))
        high = joined_halves(_scaled(third, scales, 2), _scaled(fourth, scales, 3))
        return (weight_operand(low, gl.bfloat16, left), weight_operand(high, gl.bfloat16, left)), ()
    else:
        factors = scales_of(chunk, mma, FORM, GROUP, CHUNK)
        return operands_of(chunk, left, FORM, GROUP, CHUNK, gl.bfloat16), factors


@gluon.jit
def _pair_of(chosen, first, count, j):
    """Returns the pairs at indices j of a CTA's `count` pairs, each as row * CHOSEN + (index among the row's experts).

    first: index of the CTA's first pair in `chosen.order`; without `order`, the CTA's only pair. Indices beyond the
    last pair give the last pair again.
    """
    if chosen.order is None:
        return first + j * 0
    else:
        return gl.load(chosen.order + (first + gl.minimum(j, count - 1)))


@gluon.jit
def _activated(total, alpha, limit, GATED: gl.constexpr, ACTIVATION: gl.constexpr):
    """Applies the activation to sums [A, 2, 8, BM]. With a gate the result is [A, 8, BM].

    alpha, limit: fields of `ClampedGate`, for ACTIVATION "clamped".
    """
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
    """Adds the bias to sums [R / 16, 2, 8, BM], applies the activation, rounds once and stores the results.

    pair: [BM], the output row of each column. valid: mask [BM] of pairs that exist. For the others see `codes_kernel`.
    """
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
def codes_kernel(
    x_ptr,  # int32 words [R, K / 2] of bf16, or a row for each pair
    weight,  # WeightParts: codes of an `ExpertStack`, with scales and factors of `PackedCodes`, or exponents of mxfp4
    chosen,  # Chosen of products.py
    epilogue,  # ExpertEpilogue
    alpha,
    limit,
    N: gl.constexpr,
    K: gl.constexpr,
    S: gl.constexpr,  # number of warps, among which K is divided
    R: gl.constexpr,  # weight rows of a CTA
    BLOCKS: gl.constexpr,  # groups of 8 pairs of a CTA
    D: gl.constexpr,  # number of chunks of weights loaded ahead
    CHOSEN: gl.constexpr,
    OF_PAIRS: gl.constexpr,  # x has a row for each pair
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,  # see `expert_kernel`
    FORM: gl.constexpr,  # "mxfp4", or the form of `PackedCodes`
    GROUP: gl.constexpr,  # values of K that share a scale; 0: all
    PER: gl.constexpr,  # words that hold the scales of 16 weight rows for one group; with fp4, for one chunk
    PDL: gl.constexpr,
):
    """Multiplies R weight rows of one expert with the rows of x of up to 8 * BLOCKS of its pairs, in each CTA.

    With OF_PAIRS (the second product) it loads weights and the list of pairs before it waits for x. This is safe. The
    first product writes only x, and lets this kernel start only after the list of pairs is complete.
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
            x_ptr, weight, chosen, epilogue, alpha, limit, tile, expert, first, count,
            N, K, S, R, BLOCKS, D, CHOSEN, OF_PAIRS, GATED, ACTIVATION, FORM, GROUP, PER, PDL,
        )  # fmt: skip


@gluon.jit
def _multiply(
    x_ptr, weight, chosen, epilogue, alpha, limit, tile, expert, first, count,
    N: gl.constexpr, K: gl.constexpr, S: gl.constexpr, R: gl.constexpr, BLOCKS: gl.constexpr, D: gl.constexpr,
    CHOSEN: gl.constexpr, OF_PAIRS: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, FORM: gl.constexpr,
    GROUP: gl.constexpr, PER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Computes the output tile of a CTA that has `count` pairs, at least one.

    tile: index of the R weight rows. first: see `_pair_of`. For the other arguments see `codes_kernel`.
    """
    UNIT: gl.constexpr = unit_of(FORM, GROUP, CHUNK)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[S, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, UNIT // 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, UNIT // 8)
    x: gl.constexpr = gl.DotOperandLayout(1, mma, UNIT // 16)  # in words, so half as many are contiguous
    CHUNKS: gl.constexpr = (K + CHUNK - 1) // CHUNK
    T: gl.constexpr = (CHUNKS + S - 1) // S
    RAGGED: gl.constexpr = K % (CHUNK * S) != 0
    OWN_SUM: gl.constexpr = GROUP == 0 and offset_of(FORM) > 0  # True: x is summed over all of K

    at, of, inside = _weights(weight, tile, expert, N, K, S, R, FORM, GROUP, PER)
    ws = ()
    for i in gl.static_range(min(D, T)):
        ws = ws + (_chunk(at, of, i, inside, RAGGED and i == T - 1, S, FORM, GROUP, PER),)
    if PDL and OF_PAIRS:
        gdc_wait()
    else:
        thread_barrier()  # without the barrier the assembler would move these loads down to their use

    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, x))), 1), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, UNIT // 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, x))), 0), 2)
    m = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, x)))
    word = s * (CHUNK // 2) + k
    rows = ()
    for b in gl.static_range(BLOCKS):
        pair = _pair_of(chosen, first, count, b * BLOCK + m)
        row = pair if OF_PAIRS else pair // CHOSEN
        rows = rows + (gl.expand_dims(gl.expand_dims(row, 0), 1) * (K // 2) + word,)
    sums = no_sums(S, R, BLOCK, BLOCKS, OWN_SUM, mma)
    ones_of = ()
    if offset_of(FORM) > 0:
        ones_of = weight_operand(ones(S, words_layout(S, 16)), gl.bfloat16, left)
    for i in gl.static_range(T):
        units, factors = _operands(ws[0], left, mma, FORM, GROUP)
        ws = ws[1:]
        if i + D < T:
            ws = ws + (_chunk(at, of, i + D, inside, RAGGED and i + D == T - 1, S, FORM, GROUP, PER),)
        new = ()
        for b in gl.static_range(BLOCKS):
            words = ()
            for u in gl.static_range(CHUNK // UNIT):
                next_word = i * (S * CHUNK // 2) + u * (UNIT // 2)
                there = word + next_word < K // 2
                words = words + (words_at(x_ptr, rows[b] + next_word, there, RAGGED and i == T - 1, ""),)
            new = new + (block_sums(sums[b], units, words, factors, ones_of, right, FORM, gl.bfloat16),)
        sums = new

    for b in gl.static_range(BLOCKS):
        acc = sums[b][0]
        if OWN_SUM:
            acc = less_offset(acc, sums[b][1], FORM)
        total = sum_of_splits(acc, 1)
        if FORM == "mxfp4":
            total = total * TIMES
        else:
            total = total * gl.load(weight.factors + (expert * N + weight_numbers(total, tile * R, 16, 8)))
        j = b * BLOCK + gl.arange(0, BLOCK, layout=column_layout(total.type.layout))
        pair = _pair_of(chosen, first, count, j)
        _write(total, tile, expert, pair, j < count, epilogue, alpha, limit, N, R, GATED, ACTIVATION)


@gluon.jit
def _weights(weight, tile, expert, N: gl.constexpr, K: gl.constexpr, S: gl.constexpr, R: gl.constexpr,
             FORM: gl.constexpr, GROUP: gl.constexpr, PER: gl.constexpr):  # fmt: skip
    """Returns the addresses of a weight tile's codes and scales, offsets from these addresses, and masks.

    The masks are for the last chunk of each warp. They are False for warps that have no such chunk, if the number of
    chunks is no multiple of S. tile: index of the R weight rows of `expert`.
    """
    w: gl.constexpr = words_layout(S, R)
    CHUNKS: gl.constexpr = (K + CHUNK - 1) // CHUNK
    T: gl.constexpr = (CHUNKS + S - 1) // S
    if FORM == "mxfp4":
        s = gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, w))), 1)
        r = gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, w))), 0)
        k = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, w))), 0), 1)
        group = gl.minimum(tile * (R // 16) + r // 16, N // 16 - 1)  # row groups after the last one repeat it
        scales_of = (group * CHUNKS + s) * 16 + r % 16
        there = (T - 1) * S + s < CHUNKS
        before = expert.to(gl.int64) * (N * CHUNKS)
        at = (weight.words + before * 16, weight.scales + before)
        return at, (gl.expand_dims(scales_of, 2) * 16 + k, scales_of), (gl.expand_dims(there, 2), there)
    else:
        of, inside = weight_offsets(tile, N, CHUNKS * CHUNK, S, CHUNK, R, FORM, GROUP, PER, w, T)
        first_tile = expert.to(gl.int64) * (N // R) + tile
        return starts_of(weight, first_tile, CHUNKS * CHUNK, R, FORM, GROUP, PER), of, inside
