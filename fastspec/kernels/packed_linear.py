"""Matrix product with a packed weight for the few rows of a decode pass, fused with what stands before and after it.

    out = act(rms_norm(x) weight^T + bias) + residual,    act(gate, up) = silu(gate) * up where gated

| argument | shape, dtype                            | notes                                             |
|----------|-----------------------------------------|---------------------------------------------------|
| x        | [..., K] bf16 or fp16                   | any number of rows                                |
| weight   | [N/16, K/32, 16, 32], x's dtype         | `packing.pack`, gated or not as the call is       |
| bias     | [N], x's dtype                          | gate first, as in the weight before packing       |
| norm     | (gamma [K] in x's dtype, eps)           | of x, arXiv 1910.07467                            |
| residual | [..., N or N/2], x's dtype              |                                                   |
| out      | [..., N or N/2], x's dtype or fp32      | one rounding, from fp32                           |

Products accumulate in fp32. With a norm the operands are x * gamma, each rounded once, while the squares of x are
summed in fp32 beside them, and the sum is scaled at the end.

Row invariance: a sum over K is S sums, of every S-th slab of KT values, each in ascending order, then added in order.
S and KT belong to the weight's shape. How many rows run together, which kernel runs them and how they are cut into
tiles has no say, so a row's bits depend on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl

from fastspec.kernels.packed_narrow import narrow_kernel
from fastspec.kernels.packed_wide import wide_kernel

GLUON_TYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True, slots=True)
class Split:
    """How a sum over K is cut: what a row's bits depend on.

    Attributes:
        ways: S, a power of two. slab: KT, 64 or 128.
    """

    ways: int
    slab: int


@dataclass(frozen=True, slots=True)
class Tile:
    """How a launch is cut: no bit depends on it.

    Attributes:
        weight_rows: rows of the weight of one program, or of one cluster of programs.
        rows: rows of x that are multiplied together.
        depth: slabs of the weight in flight in each warp. row_depth: slabs of x.
        groups: of `rows` rows of x in one program. warps, registers: of the wide kernel; 0 is no limit.
        cluster: programs that share weight rows: one for each way of the split, or 1; 0 is the narrow kernel.
    """

    weight_rows: int
    rows: int
    depth: int
    row_depth: int
    groups: int = 1
    warps: int = 0
    cluster: int = 0
    registers: int = 0


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: tuple[Tensor, float] | None, residual: Tensor | None,
    gated: bool, out: Tensor, keys: Tensor | None, limit: int, pdl: bool, split: Split, tile: Tile,
) -> None:
    rows, k = x.shape
    n = weight.shape[0] * 16
    steps = triton.cdiv(k, split.ways * split.slab)
    depth = min(tile.depth, steps)
    grid = (triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows * tile.groups))
    gamma, eps = (norm[0].view(torch.int32), norm[1]) if norm is not None else (None, 0.0)
    shared = [x.view(torch.int32), weight.view(torch.int32), gamma, bias, residual, out, keys]
    numbers = [rows, n, eps, limit, 0 if keys is None else out.stride(0)]
    options: dict[str, Any] = {"launch_pdl": pdl, "enable_fp_fusion": False}
    if tile.registers:
        options["maxnreg"] = tile.registers
    shape = {"K": k, "S": split.ways, "KT": split.slab, "R": tile.weight_rows, "D": depth,
             "XD": min(tile.row_depth, steps), "GATED": gated, "PDL": pdl, "DTYPE": GLUON_TYPE[x.dtype]}
    if tile.cluster == 0:
        loops = max(0, (steps - depth - 1) // depth)
        narrow_kernel[grid](*shared, *numbers, loops, **shape, BM=tile.rows, num_warps=split.ways, **options)
        return
    parts = None
    if tile.cluster > 1:
        parts = x.new_empty(grid[0] * grid[1] * tile.groups * split.ways * tile.rows * (tile.weight_rows + 1), dtype=torch.float32)
    loops = max(0, (steps - depth) // depth)
    wide_kernel[grid](*shared, parts, *numbers, loops, **shape, C=tile.cluster, GROUP=tile.rows, GROUPS=tile.groups, WARPS=tile.warps,
                      num_warps=tile.warps, num_ctas=tile.cluster, **options)
