"""The products of chosen experts: an expert's weights are read once for all rows that chose it; others are not read.

A pair is a row and one of its chosen experts; its number is row * CHOSEN + place.

| call                       | expert of a program                          | its pairs                              |
|----------------------------|----------------------------------------------|----------------------------------------|
| few pairs                  | that of pair `slot`; nothing is done where   | all rows are searched for those that   |
|                            | an earlier pair has the same expert          | chose the expert                       |
| as many pairs as experts   | expert `slot` (BY_EXPERT)                    | likewise                               |
| many rows (SORTED)         | that of its tile                             | up to ROWS pairs of the sorted order   |

Row invariance: as in `linear.portable`. The weights are the left operand, in tiles of at most 32 rows, and an element
is one chain over k, whatever the number of rows and wherever a row lies. Of mxfp4 the 32 values of a scale are one
product, and that times the scale is added to the sum. fp32 has one tile for every call.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _pairs_of_all(
    ids_ptr,
    slot,
    m,
    num_rows,
    CHOSEN: tl.constexpr,
    PLACES: tl.constexpr,
    SLOTS: tl.constexpr,
    BY_EXPERT: tl.constexpr,
):
    """The expert of a slot; for each row m the pair that chose it, and whether there is one."""
    place = tl.arange(0, PLACES)
    inside = (m < num_rows)[:, None] & (place < CHOSEN)[None, :]
    ids = tl.load(ids_ptr + m[:, None] * CHOSEN + place[None, :], mask=inside, other=-1)
    if BY_EXPERT:
        expert = slot
        at = tl.max(tl.where(ids == expert, place[None, :], -1), axis=1)
        return expert, m * CHOSEN + at, at >= 0
    else:
        expert = tl.load(ids_ptr + slot)
        before = tl.arange(0, SLOTS)
        earlier = tl.load(ids_ptr + before, mask=before < slot, other=-1)
        seen = tl.max((earlier == expert).to(tl.int32), axis=0)
        at = tl.max(tl.where(ids == expert, place[None, :], -1), axis=1)
        return expert, m * CHOSEN + at, (at >= 0) & (seen == 0)


@triton.jit
def _pairs_of_tile(order_ptr, starts_ptr, ends_ptr, tile, E: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile of sorted pairs, its pairs, and which of them are valid."""
    e = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + e, mask=e < E, other=2147483647)  # of tiles
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    there = expert < E
    expert = tl.minimum(expert, E - 1)
    first_tile = tl.where(expert > 0, tl.load(ends_ptr + tl.maximum(expert - 1, 0)), 0)
    at = tl.load(starts_ptr + expert) + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    valid = (at < tl.load(starts_ptr + expert + 1)) & there
    return expert, tl.load(order_ptr + at, mask=valid, other=0), valid


@triton.jit
def _numbers(codes, DTYPE: tl.constexpr):
    """e2m1 codes 0..15 as 16-bit floats: the bits of a bf16 are computed with integer arithmetic."""
    code = codes.to(tl.int16)
    size = code & 7
    bits = tl.where(size > 1, size + 252, size * 252) << 6
    return (bits | ((code & 8) << 12)).to(tl.bfloat16, bitcast=True).to(DTYPE)


@triton.jit
def _factor(exponents):
    """2^(e - 127) in fp32; e = 0 is the subnormal 2^-127."""
    bits = exponents.to(tl.int32) << 23
    return tl.where(bits == 0, 0x400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _values_product(x_at, weight_at, here, out, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """out + weight rows x rows^T; x_at [1, ROWS] and weight_at [BLOCK_N, 1] point to the rows' starts."""
    k = tl.arange(0, BLOCK_K)
    for at in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + at + k[:, None], mask=here[None, :], other=0.0)
            weight = tl.load(weight_at + at + k[None, :])
        else:
            inside = at + k < K
            x = tl.load(x_at + at + k[:, None], mask=here[None, :] & inside[:, None], other=0.0)
            weight = tl.load(weight_at + at + k[None, :], mask=inside[None, :], other=0.0)
        out = tl.dot(weight, x, out, input_precision="ieee")
    return out


@triton.jit
def _gated_values_product(x_at, weight_at, here, up_of, gate, up, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """As `_values_product`, of gate rows and of up rows, which lie `up_of` elements behind the gate rows."""
    k = tl.arange(0, BLOCK_K)
    for at in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + at + k[:, None], mask=here[None, :], other=0.0)
            weight = tl.load(weight_at + at + k[None, :])
            other = tl.load(weight_at + up_of + at + k[None, :])
        else:
            inside = at + k < K
            x = tl.load(x_at + at + k[:, None], mask=here[None, :] & inside[:, None], other=0.0)
            weight = tl.load(weight_at + at + k[None, :], mask=inside[None, :], other=0.0)
            other = tl.load(weight_at + up_of + at + k[None, :], mask=inside[None, :], other=0.0)
        gate = tl.dot(weight, x, gate, input_precision="ieee")
        up = tl.dot(other, x, up, input_precision="ieee")
    return gate, up


@triton.jit
def _add_run(out, codes, factors, low, high):
    """out + the product of one run of 64 mxfp4 values, which has two scales."""
    first = tl.dot(_numbers(codes & 15, low.dtype), low)
    out = tl.fma(first, tl.broadcast_to(_factor(factors[0])[:, None], out.shape), out)
    second = tl.dot(_numbers(codes >> 4, low.dtype), high)
    return tl.fma(second, tl.broadcast_to(_factor(factors[1])[:, None], out.shape), out)


@triton.jit
def _scales_from(scales_at, run, RUNS: tl.constexpr):
    """The scales of RUNS runs from `run` on, two each."""
    found = ()
    for i in tl.static_range(2 * RUNS):
        found += (tl.load(scales_at + run * 2 + i),)  # type: ignore[assignment]
    return found


@triton.jit
def _codes_product(
    x_at, weight_at, scales_at, here, up_of, out, up, K: tl.constexpr, RUNS: tl.constexpr, GATED: tl.constexpr
):
    """As `_gated_values_product`, of mxfp4; scales_at [BLOCK_N] points to each row's, `up_of` counts rows.

    Scales are single bytes, which are loaded into registers directly: those of the next RUNS runs are loaded while the
    tensor cores multiply the current ones (prefetch).
    """
    b = tl.arange(0, 32)
    LAST: tl.constexpr = K // 64 - RUNS
    factors = _scales_from(scales_at, 0, RUNS)
    up_factors = factors
    if GATED:
        up_factors = _scales_from(scales_at + up_of * (K // 32), 0, RUNS)
    for run in range(0, K // 64, RUNS):
        coming = _scales_from(scales_at, tl.minimum(run + RUNS, LAST), RUNS)
        up_coming = coming
        if GATED:
            up_coming = _scales_from(scales_at + up_of * (K // 32), tl.minimum(run + RUNS, LAST), RUNS)
        for i in tl.static_range(RUNS):
            at = run + i
            codes = tl.load(weight_at + at * 32 + b[None, :])
            low = tl.load(x_at + at * 64 + b[:, None], mask=here[None, :], other=0.0)
            high = tl.load(x_at + at * 64 + 32 + b[:, None], mask=here[None, :], other=0.0)
            out = _add_run(out, codes, (factors[2 * i], factors[2 * i + 1]), low, high)
            if GATED:
                codes = tl.load(weight_at + up_of * (K // 2) + at * 32 + b[None, :])
                up = _add_run(up, codes, (up_factors[2 * i], up_factors[2 * i + 1]), low, high)
        factors, up_factors = coming, up_coming
    return out, up


@triton.jit(do_not_specialize=["num_rows"])
def expert_kernel(
    x_ptr,  # [R, K], or with OF_PAIRS [R * CHOSEN, K]
    weight_ptr,  # [E, N, K], or with CODES uint8 [E, N, K / 2]
    scales_ptr,  # with CODES uint8 [E, N, K / 32]
    bias_ptr,  # [E, N]
    ids_ptr,  # int32 [R, CHOSEN]
    order_ptr,  # SORTED: int32 [R * CHOSEN], pairs by expert
    starts_ptr,  # SORTED: int32 [E + 1], where an expert's begin in `order`
    ends_ptr,  # SORTED: int32 [E], where its tiles of ROWS pairs end
    out_ptr,  # [R * CHOSEN, WIDTH]
    num_rows,
    alpha,
    limit,
    E: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of the result: N, or N / 2 with GATED
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUNS: tl.constexpr,  # for mxfp4: runs of 64 values in one iteration of the loop, a divisor of K / 64
    PLACES: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    OF_PAIRS: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    SORTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of the result for up to ROWS pairs of one expert."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if SORTED:
        expert, pair, valid = _pairs_of_tile(order_ptr, starts_ptr, ends_ptr, tl.program_id(1), E, EXPERTS, ROWS)
    else:
        m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        expert, pair, valid = _pairs_of_all(ids_ptr, tl.program_id(1), m, num_rows, CHOSEN, PLACES, SLOTS, BY_EXPERT)
    if tl.max(valid.to(tl.int32), axis=0) > 0:
        ROWS_OF: tl.constexpr = 2 * WIDTH if GATED else WIDTH
        row = pair if OF_PAIRS else pair // CHOSEN
        x_at = x_ptr + tl.where(valid, row, 0).to(tl.int64)[None, :] * K
        last = expert.to(tl.int64) * ROWS_OF + tl.minimum(n, WIDTH - 1)  # columns beyond the end repeat the last one
        out = tl.zeros((BLOCK_N, ROWS), tl.float32)
        up = out
        if scales_ptr is not None:
            codes_at, scales_at = weight_ptr + last[:, None] * (K // 2), scales_ptr + last * (K // 32)
            out, up = _codes_product(x_at, codes_at, scales_at, valid, WIDTH, out, up, K, RUNS, GATED)
        elif GATED:
            out, up = _gated_values_product(x_at, weight_ptr + last[:, None] * K, valid, WIDTH * K, out, up, K, BLOCK_K)
        else:
            out = _values_product(x_at, weight_ptr + last[:, None] * K, valid, out, K, BLOCK_K)
        if bias_ptr is not None:
            out += tl.load(bias_ptr + last).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias_ptr + last + WIDTH).to(tl.float32)[:, None]
        if CLAMPED:
            gate = tl.minimum(out, limit)
            out = gate / (1.0 + tl.exp(-alpha * gate)) * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)
        elif GATED:
            out = out / (1.0 + tl.exp(-out)) * up
        at = out_ptr + pair.to(tl.int64)[None, :] * WIDTH + n[:, None]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=valid[None, :] & (n < WIDTH)[:, None])


@triton.jit
def sum_kernel(
    given_ptr,  # [R * CHOSEN, K]
    factors_ptr,  # fp32 [R, CHOSEN]
    shared_ptr,  # [R, K]
    shared_logits_ptr,  # fp32 [R]
    residual_ptr,  # [R, K]
    out_ptr,  # [R, K]
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual + the outputs of a row's experts times their factors, in the order of ids [+ shared expert's output]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(CHOSEN):
        given = tl.load(given_ptr + (row * CHOSEN + i) * K + k, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(given, tl.zeros_like(given) + tl.load(factors_ptr + row * CHOSEN + i), total)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
        if shared_logits_ptr is not None:
            shared = shared / (1.0 + tl.exp(-tl.load(shared_logits_ptr + row)))
        total += shared
    total += tl.load(residual_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * K + k, total.to(out_ptr.dtype.element_ty), mask=inside)
