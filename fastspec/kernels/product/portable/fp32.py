"""Kernels of `tile_linear` for fp32, on CUDA cores. Weights are read once for up to 8 rows of x.

A thread holds four neighbouring values of every row of the weight and of x. It adds their four products, in order, to
its own sum for that weight row and row of x. At the end these sums are added over threads. So the order of the sum over
K is the same for any number of rows of x. Weights are loaded 16 bytes at a time, directly into registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.product.portable.parts import finish, offer, write_ids


@triton.jit
def _of_four(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Splits x [ROWS, SIZE] into four tensors: columns 0, 4, 8, ..., columns 1, 5, 9, ..., and so on.

    One thread has four neighbouring columns, so no data moves.
    """
    even, odd = tl.split(tl.reshape(x, (ROWS, SIZE // 2, 2)))
    zeroth, second = tl.split(tl.reshape(even, (ROWS, SIZE // 4, 2)))
    first, third = tl.split(tl.reshape(odd, (ROWS, SIZE // 4, 2)))
    return zeroth, first, second, third


@triton.jit
def _product(
    x_ptr,
    weight_ptr,
    scale_ptr,
    n,  # [BLOCK_N]: rows of the weight; all exist
    first_m,
    num_rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiplies weight rows n with ROWS rows of x, starting at row first_m. Returns fp32 [BLOCK_N, 1] for each row."""
    k = tl.arange(0, BLOCK_K)[None, :]
    weight_at = weight_ptr + n.to(tl.int64)[:, None] * K + k
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((BLOCK_N, BLOCK_K // 4), tl.float32),)  # type: ignore[assignment]
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        weight = tl.load(weight_at + at) if K % BLOCK_K == 0 else tl.load(weight_at + at, mask=at + k < K, other=0.0)
        w0, w1, w2, w3 = _of_four(weight, BLOCK_N, BLOCK_K)
        added = ()
        for row in tl.static_range(ROWS):
            # rows after the last one repeat it and are not stored
            x_at = x_ptr + tl.minimum(first_m + row, num_rows - 1).to(tl.int64) * K + at + k
            x = tl.load(x_at) if K % BLOCK_K == 0 else tl.load(x_at, mask=at + k < K, other=0.0)
            x0, x1, x2, x3 = _of_four(x, 1, BLOCK_K)
            total = tl.fma(w0, tl.broadcast_to(x0, w0.shape), sums[row])
            total = tl.fma(w1, tl.broadcast_to(x1, w0.shape), total)
            total = tl.fma(w2, tl.broadcast_to(x2, w0.shape), total)
            added += (tl.fma(w3, tl.broadcast_to(x3, w0.shape), total),)  # type: ignore[assignment]
        sums = added
    outs = ()
    for row in tl.static_range(ROWS):
        out = tl.sum(sums[row], axis=1, keep_dims=True)
        if scale_ptr is not None:
            out *= tl.load(scale_ptr + tl.minimum(first_m + row, num_rows - 1))
        outs += (out,)  # type: ignore[assignment]
    return outs


@triton.jit(do_not_specialize=["num_rows"])
def fp32_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,  # None, or fp32 [R]: factor of each row's sums
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    WIDTH: tl.constexpr,  # columns of the result
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes one tile of an fp32 product in each CTA. For the parameters see `tile_kernel` of products.py."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # CTAs with the same weights and different rows run side by side
    blocks = tl.cdiv(num_rows, ROWS)
    first_m = tl.program_id(0) % blocks * ROWS
    n = tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    last_n = tl.minimum(n, WIDTH - 1)
    outs = _product(x_ptr, weight_ptr, scale_ptr, last_n, first_m, num_rows, K, ROWS, BLOCK_N, BLOCK_K, STAGES)
    ups = outs
    if GATED:
        last_n += WIDTH
        ups = _product(x_ptr, weight_ptr, scale_ptr, last_n, first_m, num_rows, K, ROWS, BLOCK_N, BLOCK_K, STAGES)
    for row in tl.static_range(ROWS):
        m = first_m + row + tl.arange(0, 1)
        finish(outs[row], ups[row], m, n, bias_ptr, residual_ptr, out_ptr, num_rows, WIDTH, GATED)


@triton.jit(do_not_specialize=["num_rows", "limit"])
def fp32_argmax_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    scratch_ptr,  # uint64 [R + 1]: the largest key of every row, and the number of finished CTAs
    out_ptr,  # int64 [R]
    num_rows,
    limit,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finds the largest fp32 logits of one tile; the last CTA writes the ids of the whole launch.

    For the parameters see `tile_argmax_kernel` of products.py.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(num_rows, ROWS)
    first_m = tl.program_id(0) % blocks * ROWS
    n = tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    last_n = tl.minimum(n, WIDTH - 1)
    outs = _product(x_ptr, weight_ptr, scale_ptr, last_n, first_m, num_rows, K, ROWS, BLOCK_N, BLOCK_K, STAGES)
    for row in tl.static_range(ROWS):
        offer(outs[row], first_m + row + tl.arange(0, 1), n, scratch_ptr, num_rows, limit)
    write_ids(scratch_ptr, out_ptr, num_rows, ROWS)
