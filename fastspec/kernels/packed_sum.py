"""The end of a packed product whose ways were left apart: adds them up in order, then bias, residual, one rounding."""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.device import launch
from fastspec.kernels.packed_parts import in_order

COLUMNS = 512  # of one program
WARPS = 4


@gluon.jit(do_not_specialize=["M", "N"])
def sum_kernel(
    parts_ptr,  # fp32 [S, M, N]
    scale_ptr,  # fp32 [M] or None
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N] or None
    out_ptr,  # [M, N]
    M,
    N,
    S: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """COLUMNS columns of a row."""
    lay: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    row = gl.program_id(0)
    n = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=lay)
    at = row.to(gl.int64) * N + n
    there = n < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ways = ()
    for i in gl.static_range(S):
        ways = ways + (gl.load(parts_ptr + (i * M).to(gl.int64) * N + at, mask=there, other=0.0),)
    total = in_order(ways)
    if scale_ptr is not None:
        total = total * gl.load(scale_ptr + row)
    if bias_ptr is not None:
        total += gl.load(bias_ptr + n, mask=there, other=0.0).to(gl.float32)
    if residual_ptr is not None:
        total += gl.load(residual_ptr + at, mask=there, other=0.0).to(gl.float32)
    gl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=there)


def add_up(
    parts: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None, out: Tensor, pdl: bool
) -> None:
    """out [M, N] = rounded(the sum of parts fp32 [S, M, N], in order, * scale [M] + bias [N] + residual [M, N])."""
    ways, rows, n = parts.shape
    launch(
        sum_kernel,
        (rows, triton.cdiv(n, COLUMNS)),
        *(parts, scale, bias, residual, out, rows, n),
        **{"S": ways, "COLUMNS": COLUMNS, "WARPS": WARPS, "PDL": pdl},
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
