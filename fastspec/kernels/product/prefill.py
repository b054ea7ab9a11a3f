"""Product of a prefill chunk with a packed weight: tens to thousands of rows, limited by the tensor cores.

    out[m, n] = epilogue(sum_k normed[m, k] W[n, k]),    normed = x / sqrt(mean(x^2) + eps) * gamma, or x

| argument | shape, dtype                     | notes                                                          |
|----------|----------------------------------|----------------------------------------------------------------|
| x        | [..., K] bf16 or fp16            | any number of rows, without a new compilation                  |
| weight   | `Weight` [N, K] in x's dtype     | packed; gated if the call is gated                             |
| bias     | [N], any float dtype             | added in fp32; not with `gated`                                |
| norm     | gamma [K], eps                   | RMSNorm of x (arXiv 1910.07467) by a kernel before the product |
| residual | [..., N], any float dtype        | added in fp32; not with `gated`                                |

Accumulators, statistics and the epilogue are fp32. Normed rows are rounded to x's dtype, the result once at the end.
The bits of a row depend on the number of rows in the call. So a prompt is always cut into chunks in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common.checks import check
from fastspec.kernels.common.launch import launch as start
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.gpu import has_warp_groups, multiprocessors, shared_memory
from fastspec.kernels.product import prefill_sm90 as hopper
from fastspec.kernels.product.plan import tree_parts


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch configuration: tile of one CTA, warps, and pipeline stages.

    Attributes:
        block_m: rows of x.
        block_n: columns of the result, before the gate.
        block_k: values of K in a stage.
        num_warps, num_stages: number of warps, and of pipeline stages in shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory for the pipeline, at most."""
        return (self.block_m + self.block_n) * self.block_k * 2 * self.num_stages


# by bytes of shared memory that a CTA may use, at least: (largest number of rows, tile). The last tile of a list serves
# any number of rows
LAUNCH = {
    200_000: (
        (64, Launch(64, 64, 64, 4, 4)),
        (128, Launch(128, 64, 64, 4, 4)),
        (256, Launch(128, 128, 64, 8, 4)),
        (0, Launch(128, 256, 64, 8, 4)),
    ),
    150_000: (
        (64, Launch(64, 64, 64, 4, 4)),
        (128, Launch(128, 64, 64, 4, 4)),
        (0, Launch(128, 128, 64, 8, 4)),
    ),
    0: (
        (64, Launch(64, 64, 64, 4, 4)),
        (0, Launch(128, 128, 64, 8, 3)),
    ),
}
# number of tiles, of different rows and the same columns, that run together. So their weights are read once from device
# memory
GROUP = 16


@triton.jit
def _rms_norm_kernel(x_ptr, gamma_ptr, out_ptr, eps, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    x = tl.load(x_ptr + row * K + k, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(gamma_ptr + k, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * gamma
    tl.store(out_ptr + row * K + k, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _finish(out, m, n, bias_ptr, residual_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Adds bias and residual to `out` [BLOCK_M, columns] and stores it at rows m and columns n."""
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * STRIDE + n[None, :]
    inside = (m < num_rows)[:, None] & (n < WIDTH)[None, :]
    if residual_ptr is not None:
        out += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _prefill_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,  # elements between rows of the result and of the residual
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
):
    # CTAs process the rows of a group before the next columns
    tile = tl.program_id(0)
    per_group = GROUP * tl.cdiv(N, BLOCK_N)
    first_m = tile // per_group * GROUP
    group_rows = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first_m, GROUP)
    tile_m = first_m + tile % per_group % group_rows
    tile_n = tile % per_group // group_rows

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns after the last one repeat it and are not stored, so the loop needs no mask
    last_m, last_n = tl.minimum(m, num_rows - 1).to(tl.int64), tl.minimum(n, N - 1).to(tl.int64)
    x_at = x_ptr + last_m[:, None] * K + k[None, :]
    weight_at = weight_ptr + (last_n // 16 * (16 * K) + last_n % 16 * 32)[None, :] + (k // 32 * 512 + k % 32)[:, None]
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(K // BLOCK_K):
        out = tl.dot(tl.load(x_at), tl.load(weight_at), out)
        x_at += BLOCK_K
        weight_at += BLOCK_K * 16

    if GATED:
        # 8 columns of gate, 8 of up: an accumulator's fragments have 8 columns, so both of a pair are in one thread
        gate, up = tl.split(tl.permute(tl.reshape(out, (BLOCK_M, BLOCK_N // 16, 2, 8)), (0, 1, 3, 2)))
        out = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (BLOCK_M, BLOCK_N // 2))
        n = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        _finish(out, m, n, bias_ptr, residual_ptr, out_ptr, num_rows, N // 2, STRIDE)
    else:
        # in halves: a whole tile of the residual and the accumulator do not fit into the registers
        left, right = tl.split(tl.permute(tl.reshape(out, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N // 2)
        _finish(left, m, n, bias_ptr, residual_ptr, out_ptr, num_rows, N, STRIDE)
        _finish(right, m, n + BLOCK_N // 2, bias_ptr, residual_ptr, out_ptr, num_rows, N, STRIDE)


def launch_of(num_rows: int, shared: int) -> Launch:
    """Returns the launch configuration for a chunk of `num_rows` rows. shared: bytes of shared memory of a CTA."""
    table = next(table for least, table in LAUNCH.items() if shared >= least)
    return next((launch for rows, launch in table if num_rows <= rows), table[-1][1])


def prefill_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes [residual +] [silu(gate) * up of] norm(x) @ weight.T [+ bias], as `reference.prefill_linear`.

    Args:
        x: [..., K].
        weight: packed, K a multiple of 64; if `gated` with interleaved rows.
        bias: [N], contiguous. None: no bias.
        norm: weight [K], contiguous, and epsilon of an RMSNorm of x. None: no norm.
        residual: [..., N]. None: no residual.
        gated: True if the result is [..., N/2].
        out_dtype: dtype of the result. Default: x's.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit each other.
    """
    if weight.format != "packed":
        raise ValueError(f"weight is stored as {weight.format}; pack it first, with `Weight.pack`")
    rows, residual, out = prepared(x, weight, bias, norm, residual, gated, out_dtype)
    if len(rows) > 0:
        multiply(rows, weight, bias, residual, out, gated)
    return out


def prepared(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    residual: Tensor | None,
    gated: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Checks the arguments of `prefill_linear`, and applies the norm to x.

    Returns the normed rows [R, K], the residual as contiguous tensor or None, and an empty tensor for the result.
    """
    _check(x, weight, norm)
    if gated and (bias is not None or residual is not None):
        raise ValueError("a gated product has no bias and no residual; leave them out or gate later")
    n, k = weight.shape
    if bias is not None:
        check("bias", bias, (n,))
    rows = x.reshape(-1, k).contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()  # a view at an unaligned address: rows are loaded 16 bytes at a time
    out = torch.empty(*x.shape[:-1], n // 2 if gated else n, dtype=out_dtype or x.dtype, device=x.device)
    if residual is not None:
        if residual.shape != out.shape:
            raise ValueError(f"residual is {tuple(residual.shape)}, the product {tuple(out.shape)}")
        residual = residual.contiguous()
    if norm is not None and len(rows) > 0:
        rows = _rms_norm(rows, *norm)
    return rows, residual, out


def multiply(
    rows: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, out: Tensor, gated: bool
) -> None:
    """Launches the product kernel on results of `prepared`. `residual` and `out` may be columns of wider tensors."""
    n, _ = weight.shape
    if has_warp_groups(rows.device):
        programs, parts = multiprocessors(rows.device), tree_parts(weight.shape, weight.whole) if weight.tree else 1
        tile = hopper.tile_of(rows.shape[0], n, programs, parts)
        hopper.run(rows, weight, bias, residual, out, gated, tile, programs, parts)
    else:
        tiles = launch_of(rows.shape[0], shared_memory(rows.device) or max(LAUNCH))
        run(rows, weight, bias, residual, out, gated, tiles)


def run(
    rows: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool,
    launch: Launch,
) -> None:
    """Launches the product kernel without wgmma, with a given configuration. A search over tiles may call it."""
    n, k = weight.shape
    tiles = triton.cdiv(rows.shape[0], launch.block_m) * triton.cdiv(n, launch.block_n)
    start(_prefill_kernel, (tiles,),
        rows, weight.data, bias, residual, out, rows.shape[0],
        N=n, K=k, STRIDE=hopper.row_stride(out), BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k, GROUP=GROUP, GATED=gated,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


def _check(x: Tensor, weight: Weight, norm: tuple[Tensor, float] | None) -> None:
    _, k = weight.shape
    if k % 64 or x.shape[-1] != k:
        raise ValueError(f"x is {tuple(x.shape)}, the weight's K {k}; wanted [..., K], K a multiple of 64")
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}; wanted both bfloat16 or both float16")
    if norm is not None:
        check("norm[0]", norm[0], (k,))


def _rms_norm(rows: Tensor, gamma: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(rows)
    block = triton.next_power_of_2(rows.shape[1])
    warps = min(max(block // 1024, 1), 8)
    start(_rms_norm_kernel, (rows.shape[0],), rows, gamma, out, eps, K=rows.shape[1], BLOCK=block, num_warps=warps)
    return out
