"""Portable product for decode passes: row-major weights of any shape, 16-bit or fp32. Rows do not change others' bits.

    out[m, n] = epilogue(sum_k normed[m, k] weight[n, k]),    normed = x / sqrt(mean(x^2) + eps) * gamma, or x

| argument | shape, dtype                                | notes                                              |
|----------|---------------------------------------------|----------------------------------------------------|
| x        | [..., K] bf16, fp16 or fp32                 | any number of rows                                 |
| weight   | [N, K], x's dtype                           | contiguous; gated: [gate; up], N/2 rows each       |
| bias     | [N], any float dtype                        | added in fp32                                      |
| norm     | gamma [K], eps                              | RMSNorm of x before the product (arXiv 1910.07467) |
| residual | shape of the result, any float dtype        | added in fp32                                      |
| scratch  | int64 [R + 1], zero                         | `tile_argmax` only; zero again after the kernel    |

Accumulators, statistics and the epilogue are fp32 (fp32 operands: IEEE products, no tf32), rounded once at the end. The
accumulator is multiplied by 1 / sqrt(...), so that x is read only once. Masked loads give zero.

Batch invariance, 16-bit. The weights are the left operand, in tiles of at most 32 rows. Then tensor cores use the same
instruction for any number of rows of x, and an element is one chain of sums over k. For more rows of x, tiles grow in
rows and columns, never in k. The order in which squares are added is written in the code, so it does not depend on a
layout. For fp32 see fp32.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, check_room
from fastspec.kernels.common.launch import launch, new_ids, pdl_options
from fastspec.kernels.product.portable.fp32 import fp32_argmax_kernel, fp32_kernel
from fastspec.kernels.product.portable.parts import finish, norm_kernel, offer, rms_scale, weighted, write_ids


@dataclass(frozen=True, slots=True)
class PortableTile:
    """Tile of one CTA: rows of x, rows of the weight (block_n), warps, and pipeline stages."""

    rows: int
    block_n: int
    num_warps: int
    num_stages: int


# by bytes of an element: values of K in a step. The order of every sum depends on it, and in fp32 also on the number of
# warps. So both are the same for any number of rows
BLOCK_K = {2: 128, 4: 512}
# by (bytes of an element, True for WIDE or more columns): a call uses the first tile that holds all its rows of x, or
# several of the last
LAUNCH = {
    (2, False): (
        PortableTile(8, 16, 1, 6),
        PortableTile(16, 32, 2, 5),
        PortableTile(32, 32, 2, 4),
        PortableTile(64, 32, 4, 4),
    ),
    (2, True): (
        PortableTile(8, 32, 2, 5),
        PortableTile(16, 32, 2, 5),
        PortableTile(32, 32, 2, 4),
        PortableTile(64, 32, 4, 3),
    ),
    (4, False): (
        PortableTile(1, 8, 4, 4),
        PortableTile(2, 8, 4, 3),
        PortableTile(4, 8, 4, 4),
        PortableTile(8, 8, 4, 3),
    ),
    (4, True): (PortableTile(1, 8, 4, 4), PortableTile(2, 8, 4, 3), PortableTile(4, 8, 4, 4), PortableTile(8, 8, 4, 3)),
}
WIDE = 8192  # number of columns from which larger tiles still fill a GPU
# up to this number of rows a 16-bit product computes the norm itself; with more another kernel does, once
FUSED_ROWS = 16
NORM_STAGES = 6
NORM_WARPS = {2: 1, 4: 4}  # a row's step of BLOCK_K has 16 bytes per thread
# x * gamma is rounded before the division by the norm; in fp16 this power of two prevents overflow
SHRINK = {torch.float16: 2.0**-4}


@triton.jit
def _product(
    x_ptr,
    weight_ptr,
    gamma_ptr,
    scale_ptr,
    eps,
    n,  # [BLOCK_N]: rows of the weight
    m,  # [ROWS]: rows of x
    num_rows,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    SHRINK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Returns two products with rows m of x, each fp32 [BLOCK_N, ROWS].

    The first is for weight rows n. With GATED the second is for weight rows WIDTH + n. Without GATED the second has no
    meaning.
    """
    k = tl.arange(0, BLOCK_K)
    here = (m < num_rows)[None, :]
    x_at = x_ptr + m.to(tl.int64)[None, :] * K + k[:, None]
    weight_at = weight_ptr + tl.minimum(n, WIDTH - 1).to(tl.int64)[:, None] * K + k[None, :]
    out = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    squares = tl.zeros((BLOCK_K, ROWS), tl.float32)
    for at in range(0, K, BLOCK_K):
        inside = at + k < K
        if K % BLOCK_K == 0:
            x = tl.load(x_at + at, mask=here, other=0.0)
            weight = tl.load(weight_at + at)
        else:
            x = tl.load(x_at + at, mask=here & inside[:, None], other=0.0)
            weight = tl.load(weight_at + at, mask=inside[None, :], other=0.0)
        if gamma_ptr is not None:
            squares = tl.fma(x.to(tl.float32), x.to(tl.float32), squares)
            x = weighted(x, tl.load(gamma_ptr + at + k, mask=inside, other=0.0), SHRINK)
        out = tl.dot(weight, x, out)
        if GATED:
            if K % BLOCK_K == 0:
                weight = tl.load(weight_at + at + WIDTH * K)
            else:
                weight = tl.load(weight_at + at + WIDTH * K, mask=inside[None, :], other=0.0)
            up = tl.dot(weight, x, up)
    if gamma_ptr is not None:
        scale = rms_scale(squares, eps, K, BLOCK_K, STEPS, SHRINK)[None, :]
        out, up = out * scale, up * scale
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + m, mask=m < num_rows, other=0.0)[None, :]
        out, up = out * scale, up * scale
    return out, up


@triton.jit(do_not_specialize=["num_rows"])
def tile_kernel(
    x_ptr,
    weight_ptr,
    gamma_ptr,  # None: x is already normed, or there is no norm
    scale_ptr,  # None, or fp32 [R]: factor of each row's accumulator
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    WIDTH: tl.constexpr,  # columns of the result
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    SHRINK: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes one tile of the result in each CTA. CTAs with the same weight rows have consecutive numbers."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(num_rows, ROWS)
    m = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    out, up = _product(
        x_ptr, weight_ptr, gamma_ptr, scale_ptr, eps, n, m, num_rows,
        WIDTH, K, ROWS, BLOCK_N, BLOCK_K, STEPS, SHRINK, GATED,
    )  # fmt: skip
    finish(out, up, m, n, bias_ptr, residual_ptr, out_ptr, num_rows, WIDTH, GATED)


@triton.jit(do_not_specialize=["num_rows", "limit"])
def tile_argmax_kernel(
    x_ptr,
    weight_ptr,
    gamma_ptr,
    scale_ptr,
    scratch_ptr,  # uint64 [R + 1]: the largest key of every row, and the number of finished CTAs
    out_ptr,  # int64 [R]
    num_rows,
    limit,
    eps,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    SHRINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finds the largest logits of one tile in each CTA. The last CTA writes the ids of the whole launch."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(num_rows, ROWS)
    m = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    logits, _ = _product(
        x_ptr, weight_ptr, gamma_ptr, scale_ptr, eps, n, m, num_rows,
        WIDTH, K, ROWS, BLOCK_N, BLOCK_K, STEPS, SHRINK, False,
    )  # fmt: skip
    offer(logits, m, n, scratch_ptr, num_rows, limit)
    write_ids(scratch_ptr, out_ptr, num_rows, ROWS)


def tile_of(itemsize: int, width: int, rows: int) -> PortableTile:
    """Returns the tile for `rows` rows of x and `width` columns of the result. itemsize: bytes of an element of x."""
    tiles = LAUNCH[itemsize, width >= WIDE]
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


def tile_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """Computes [residual +] [silu(gate) * up of] norm(x) @ weight.T [+ bias], as `reference.tile_linear`.

    Args:
        x: [..., K].
        weight: [N, K]; if `gated` the N/2 gate rows first, then the N/2 up rows.
        bias: [N], contiguous. None: no bias.
        norm: weight [K], contiguous, and epsilon of an RMSNorm of x. None: no norm.
        residual: [..., N]. None: no residual.
        gated: True if the result is [..., N/2].
        out_dtype: dtype of the result. Default: x's.
        pdl: True for programmatic dependent launch (sm_90 on). All kernels of the pass must then be launched with it.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit each other.
    """
    _check(x, weight, norm)
    if bias is not None:
        check("bias", bias, weight.shape[:1])
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight is {tuple(weight.shape)}; wanted [gate; up] of equally many rows each")
    width, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty(*x.shape[:-1], width, dtype=out_dtype or x.dtype, device=x.device)
    if residual is not None:
        if residual.shape != out.shape:
            raise ValueError(f"residual is {tuple(residual.shape)}, the result {tuple(out.shape)}")
        residual = residual.contiguous()
    if out.numel() == 0:
        return out
    rows, gamma, scale, eps = _normed(x, norm, pdl)
    tile = tile_of(x.element_size(), width, rows.shape[0])
    grid = (triton.cdiv(width, tile.block_n) * triton.cdiv(rows.shape[0], tile.rows),)
    shape = {"WIDTH": width, "K": k, "GATED": gated, **_constants(x.dtype, tile, pdl)}
    if x.dtype == torch.float32:
        launch(fp32_kernel, grid, rows, weight, scale, bias, residual, out, rows.shape[0], **shape)
    else:
        launch(tile_kernel, grid, rows, weight, gamma, scale, bias, residual, out, rows.shape[0], eps, **shape)
    return out


def tile_argmax(
    x: Tensor,
    weight: Tensor,
    limit: int,
    scratch: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    pdl: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the argmax over ids < limit of `tile_linear`'s fp32 logits, int64 [R]. Does not store the logits.

    Args:
        x: [R, K].
        weight: [N, K].
        limit: in 1..N.
        scratch: int64 zeros, R + 1 or more; zeros again after the kernel, so one scratch serves all calls.
        norm: weight [K] and epsilon of an RMSNorm of x. None: no norm.
        pdl: see `tile_linear`.
        out: contiguous int64 [R] to write to. None: a new tensor.

    Returns:
        The lowest id of the largest logit. NaN counts as the largest, as in `torch.argmax`.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit each other, or a limit outside 1..N.
    """
    _check(x, weight, norm)
    num_rows, (width, k) = x.shape[0], weight.shape
    if x.dim() != 2 or not 1 <= limit <= width:
        raise ValueError(f"x is {tuple(x.shape)} and limit {limit}; wanted [R, K] and 1..{width}")
    check_room("scratch", scratch, num_rows + 1, "make it of zeros")
    if out is None:
        out = new_ids(num_rows, x.device)
    check("out", out, (num_rows,), torch.int64, step="leave it out, and copy the result")
    if num_rows == 0:
        return out
    rows, gamma, scale, eps = _normed(x, norm, pdl)
    tile = tile_of(x.element_size(), width, num_rows)
    grid = (triton.cdiv(limit, tile.block_n) * triton.cdiv(num_rows, tile.rows),)
    shape = {"WIDTH": width, "K": k, **_constants(x.dtype, tile, pdl)}
    best = scratch.view(torch.uint64)
    if x.dtype == torch.float32:
        launch(fp32_argmax_kernel, grid, rows, weight, scale, best, out, num_rows, limit, **shape)
    else:
        launch(tile_argmax_kernel, grid, rows, weight, gamma, scale, best, out, num_rows, limit, eps, **shape)
    return out


def _check(x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None) -> None:
    if weight.dim() != 2 or not weight.is_contiguous() or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; wanted [..., K] and contiguous [N, K]")
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; wanted one dtype: bfloat16, float16 or float32")
    if norm is not None:
        check("norm[0]", norm[0], weight.shape[1:])


def _normed(
    x: Tensor, norm: tuple[Tensor, float] | None, pdl: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
    """Returns x as rows [R, K], gamma, scales fp32 [R] and eps, as arguments of the product's kernel.

    With few 16-bit rows the product's kernel computes the norm, and scales are None. Else this function launches a
    kernel that multiplies the rows by gamma and computes the scales. Then gamma is None. Without a norm both are None.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if norm is None:
        return rows, None, None, 0.0
    gamma, eps = norm
    if rows.shape[0] <= FUSED_ROWS and x.dtype != torch.float32:
        return rows, gamma, None, eps
    weighted_rows = torch.empty_like(rows)
    scale = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    constants = {**_sums(x.dtype), "STAGES": NORM_STAGES, **pdl_options(pdl), "num_warps": NORM_WARPS[x.element_size()]}
    launch(norm_kernel, (rows.shape[0],), rows, gamma, weighted_rows, scale, eps, K=rows.shape[1], **constants)
    return weighted_rows, None, scale, eps


def _sums(dtype: torch.dtype) -> dict[str, Any]:
    """Returns the constexpr arguments of the kernels for the norm: BLOCK_K, STEPS and SHRINK."""
    block_k = BLOCK_K[dtype.itemsize]
    return {"BLOCK_K": block_k, "STEPS": block_k.bit_length() - 1, "SHRINK": SHRINK.get(dtype, 1.0)}


def _constants(dtype: torch.dtype, tile: PortableTile, pdl: bool) -> dict[str, Any]:
    """Returns the constexpr arguments and launch options for a tile, for the product kernel of this dtype."""
    shared = {"ROWS": tile.rows, "BLOCK_N": tile.block_n, "num_warps": tile.num_warps, **pdl_options(pdl)}
    if dtype == torch.float32:
        return {**shared, "BLOCK_K": BLOCK_K[4], "STAGES": tile.num_stages}
    return {**shared, **_sums(dtype), "num_stages": tile.num_stages}
