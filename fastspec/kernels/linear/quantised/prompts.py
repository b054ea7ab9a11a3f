"""The product of prompts with quantised weights: dequantised slice by slice, then multiplied as 16-bit weights are.

The values that are multiplied are those of `Weight.unpack`, rounded to bf16, where the product for few rows applies
scales to its sums in fp32. A slice of the weight, packed, has at most SCRATCH_BYTES.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common.code_values import blocks_of, column_of, scaled, source_of
from fastspec.kernels.common.codes import BITS
from fastspec.kernels.common.launch import launch
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.linear.prefill import prefill_linear

SCRATCH_BYTES = 256 * 2**20
RUN = 8  # halves of a word's row that a thread takes, 16 bytes
RUNS, NUM_WARPS = 256, 4


@triton.jit(do_not_specialize=["first", "count"])
def _dequantise_kernel(
    source,
    out_ptr,
    first,
    count,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    LOWER: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Packed 16-bit values of `count` rows from row `first` on, a multiple of 16.

    A program has RUNS runs of halves, each of which holds codes of as many blocks of 32 columns.
    """
    BLOCKS: tl.constexpr = blocks_of(FORM)
    SIDE: tl.constexpr = 4 if FORM == "int4" and GROUP == 32 else RUN  # columns side by side
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)[:, None]
    place = (run * RUN % 32).to(tl.int32) + tl.arange(0, RUN)[None, :]
    chunk, row = run // (512 // RUN), (run % (512 // RUN) // (32 // RUN)).to(tl.int32)
    inside = run < count.to(tl.int64) * K // (RUN * BLOCKS)
    begin = first.to(tl.int64) * K // (RUN * BLOCKS)
    half = tl.load(source.halves + (begin + run) * RUN + tl.arange(0, RUN)[None, :], mask=inside, other=0)
    within = column_of(place, FORM, GROUP)
    tile = chunk // (K // (32 * BLOCKS))
    n = (first // 16 + tile) * 16 + row
    k = (chunk % (K // (32 * BLOCKS))).to(tl.int32) * (32 * BLOCKS)
    for i in tl.static_range(BLOCKS):
        column = (run * RUN % 32).to(tl.int32) if FORM == "fp4" else tl.zeros_like(row)
        value = scaled(
            half.to(tl.int32) & 0xFFFF, source, n, k + 32 * i + column, i, inside, K, FORM, GROUP, PAIRS, LOWER
        )
        at = (chunk * BLOCKS + i) * 512 + row * 32 + within
        at = tl.max_contiguous(tl.multiple_of(at, (1, SIDE)), (1, SIDE))  # the compiler does not see it
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)


def dequantise(weight: Weight, first: int, count: int, scratch: Tensor) -> Weight:
    """Rows first .. first + count - 1 of a quantised weight, multiples of 16 in the order of its words, packed.

    Args:
        scratch: bf16, of count * K values or more, which the result lies in.
    """
    assert weight.codes is not None
    k = weight.shape[1]
    source, constants = source_of(weight.codes)
    data = scratch[: count * k].view(count // 16, k // 32, 16, 32)
    blocks = 4 if BITS[weight.codes.kind.format] == 4 else 2
    grid = (triton.cdiv(count * k, RUNS * RUN * blocks),)
    options: dict[str, Any] = {**constants, "RUNS": RUNS, "RUN": RUN, "num_warps": NUM_WARPS}
    launch(_dequantise_kernel, grid, source, data, first, count, K=k, **options)
    return Weight(data, "packed", weight.gated)


def prefill_quantised(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As `prefill_linear`, whose arguments and errors it has, with a weight of codes."""
    n, k = weight.shape
    rows = max(16, SCRATCH_BYTES // (2 * k) // 16 * 16)
    rows = -(-n // (16 * -(-n // rows))) * 16  # slices of about the same size
    scratch = torch.empty(min(rows, n) * k, dtype=weight.dtype, device=weight.device)
    if rows >= n:
        whole = dequantise(weight, 0, n, scratch)
        return prefill_linear(x, whole, bias, norm=norm, residual=residual, gated=gated, out_dtype=out_dtype)
    each = 2 if gated else 1
    out = torch.empty(*x.shape[:-1], n // each, dtype=out_dtype or x.dtype, device=x.device)
    for first in range(0, n, rows):
        count = min(rows, n - first)
        part = dequantise(weight, first, count, scratch)
        columns = slice(first // each, (first + count) // each)
        out[..., columns] = prefill_linear(
            x,
            part,
            None if bias is None else bias[columns],
            norm=norm,
            residual=None if residual is None else residual[..., columns],
            gated=gated,
            out_dtype=out_dtype,
        )
    return out
