"""Looks up rows of the embedding table.

| argument | shape, dtype                                | notes                            |
|----------|---------------------------------------------|----------------------------------|
| weight   | `Weight` [V, H]: rows, packed or codes      | contiguous, any float dtype      |
| ids      | [B, Q] int64                                | contiguous; clamped to the table |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, told
from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.code_values import code_values, source_of
from fastspec.kernels.common.launch import launch
from fastspec.kernels.common.weights import Weight

BLOCK, NUM_WARPS = 1024, 4  # columns per CTA: a thread copies 16 bytes


@triton.jit
def place_of(token, column, width, PACKED: tl.constexpr):
    """Returns the offsets (int64) of elements [token, column] of an embedding table [V, width].

    PACKED: True if the table has the packed layout of packing.py, False if it is row-major.
    """
    if PACKED:
        at = token // 16 * 16 * width + token % 16 * 32 + column // 32 * 512 + column % 32
    else:
        at = token * width + column
    return at


@triton.jit
def _copy_row(weight_ptr, out_ptr, token, out_row, rows, width, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Copies BLOCK columns of row `token` of an embedding table [rows, width] to row `out_row` of the output.

    The first column is program_id(1) * BLOCK. `token` is clamped to 0 .. rows - 1. PACKED: see `place_of`.
    """
    token = tl.minimum(tl.maximum(token, 0), rows - 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = place_of(token, column, width, PACKED)
    value = tl.load(weight_ptr + at, mask=column < width, other=0.0)
    tl.store(out_ptr + out_row * width + column, value, mask=column < width)


@triton.jit
def _embed_kernel(
    weight_ptr,
    ids_ptr,
    out_ptr,
    rows,
    width,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # waits before it lets the next kernel start: a later kernel of the pass reads the pass's positions before its
        # own wait (`attend` in attention/dispatch.py)
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    _copy_row(weight_ptr, out_ptr, tl.load(ids_ptr + row), row, rows, width, PACKED, BLOCK)


@triton.jit
def _embed_codes_kernel(
    source,
    ids_ptr,
    out_ptr,
    rows,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    LOWER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Dequantises BLOCK columns of one token's row of a quantised embedding table [rows, K], and writes them.

    For `source` and the constants K, FORM, GROUP, PAIRS and LOWER see `code_values`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), rows - 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.zeros((BLOCK,), tl.int64) + token
    value = code_values(source, n, column, column < K, K, FORM, GROUP, PAIRS, LOWER)
    tl.store(out_ptr + row * K + column, value.to(out_ptr.dtype.element_ty), mask=column < K)


def embed(weight: Weight, ids: Tensor) -> Tensor:
    """Returns the rows [..., H] of an embedding table at token ids [...], as `Ops.embed`, with a Triton kernel.

    Raises:
        ValueError: a shape, dtype or layout differs from the table at the top of this file.
    """
    rows, width = weight.shape
    if not weight.data.is_contiguous():
        raise ValueError(
            f"the embedding is {told(weight.data)}; wanted contiguous [V, H]: pass it as `Ops.store` made it"
        )
    check("ids", ids, ids.shape, torch.int64)
    out = torch.empty(*ids.shape, width, dtype=weight.dtype, device=weight.device)
    if weight.codes is not None:
        _embed_codes(weight.codes, ids, out)
        return out
    launch(
        _embed_kernel,
        (ids.numel(), triton.cdiv(width, BLOCK)),
        weight.data,
        ids,
        out,
        rows,
        width,
        PACKED=weight.format == "packed",
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out


def _embed_codes(codes: PackedCodes, ids: Tensor, out: Tensor) -> None:
    rows, width = codes.shape
    source, constants = source_of(codes)
    grid = (ids.numel(), triton.cdiv(width, BLOCK))
    options = {**constants, "BLOCK": BLOCK, "num_warps": NUM_WARPS}
    launch(_embed_codes_kernel, grid, source, ids, out, rows, K=width, **options)
