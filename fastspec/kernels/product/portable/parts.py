"""Device code of the portable products: the norm before them, the epilogue of a tile, and the argmax of logits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def column_sums(x, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Sums x [SIZE, C] over axis 0 as a binary tree, in the same order in any layout. SIZE is 2^STEPS."""
    for step in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, (2, SIZE >> (step + 1), x.shape[1])), axis=0)
    return tl.reshape(x, (x.shape[1],))


@triton.jit
def rms_scale(squares, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, SHRINK: tl.constexpr):
    """Returns 1 / (sqrt(mean(x^2) + eps) SHRINK) for every row of x.

    squares: fp32 [BLOCK_K, rows], partial sums of x^2.
    """
    return tl.rsqrt(column_sums(squares, BLOCK_K, STEPS) / K + eps) / SHRINK


@triton.jit
def weighted(x, gamma, SHRINK: tl.constexpr):
    """Returns x * gamma * SHRINK in x's dtype, not yet divided by the root mean square. x: [K, rows]. gamma: [K].

    SHRINK, a power of two, prevents overflow in fp16.
    """
    return (x.to(tl.float32) * (gamma.to(tl.float32) * SHRINK)[:, None]).to(x.dtype)


@triton.jit
def norm_kernel(
    x_ptr,  # [R, K]
    gamma_ptr,
    out_ptr,  # [R, K]: result of `weighted`
    scale_ptr,  # fp32 [R]: result of `rms_scale`
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    SHRINK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes the norm of one row in each CTA. Squares are added in the same order as in `tile_kernel` with a norm."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    squares = tl.zeros((BLOCK_K, 1), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = first + k < K
        x = tl.load(x_ptr + row * K + first + k, mask=inside, other=0.0)[:, None]
        gamma = tl.load(gamma_ptr + first + k, mask=inside, other=0.0)
        squares = tl.fma(x.to(tl.float32), x.to(tl.float32), squares)
        tl.store(out_ptr + row * K + (first + k)[:, None], weighted(x, gamma, SHRINK), mask=inside[:, None])
    scale = rms_scale(squares, eps, K, BLOCK_K, STEPS, SHRINK)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


@triton.jit
def finish(out, up, m, n, bias_ptr, residual_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, GATED: tl.constexpr):
    """Adds the bias to `out`, computes silu(out) * up if GATED, adds the residual, and stores the result at [m, n].

    out, up: fp32 [BLOCK_N, ROWS]. n, m: columns [BLOCK_N] and rows [ROWS] of the result.
    """
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, mask=n < WIDTH, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias_ptr + WIDTH + n, mask=n < WIDTH, other=0.0).to(tl.float32)[:, None]
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * up
    at = m.to(tl.int64)[None, :] * WIDTH + n[:, None]
    inside = (m < num_rows)[None, :] & (n < WIDTH)[:, None]
    if residual_ptr is not None:
        out += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def offer(logits, m, n, scratch_ptr, num_rows, limit):
    """Combines each row's largest logit and its id, as a uint64 key, with the scratch by an atomic maximum.

    logits: fp32 [BLOCK_N, ROWS], for ids n and rows m. The order of CTAs does not change the result.
    """
    # upper half of a key: bits of the logit that order as integers. Lower half: 2^32 - 1 - id. So the largest key has
    # the lowest id of the largest logit
    bits = logits.to(tl.uint32, bitcast=True)
    code = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    code = tl.where(logits == 0.0, 0x80000000, code)  # equal for both signs of zero
    code = tl.where(logits != logits, 0xFFFFFFFF, code)  # NaN counts as the largest, as in torch.argmax
    entry = (code.to(tl.uint64) << 32) | (0xFFFFFFFF - n.to(tl.uint32)).to(tl.uint64)[:, None]
    best = tl.max(tl.where((n < limit)[:, None], entry, 0), axis=0)
    tl.atomic_max(scratch_ptr + m, best, mask=m < num_rows, sem="relaxed")


@triton.jit
def write_ids(scratch_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    """Writes every row's id from its key, and sets the scratch to zero. Only the last CTA that calls it does so."""
    tl.debug_barrier()  # one thread increments the counter, after the maxima of all threads
    done = tl.atomic_add(scratch_ptr + num_rows, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:
        for first in range(0, num_rows, BLOCK):
            row = first + tl.arange(0, BLOCK)
            best = tl.atomic_xchg(scratch_ptr + row, tl.zeros((BLOCK,), tl.uint64), mask=row < num_rows)
            tl.store(out_ptr + row, 0xFFFFFFFF - (best & 0xFFFFFFFF).to(tl.int64), mask=row < num_rows)
        tl.atomic_xchg(scratch_ptr + num_rows, 0)
