"""Product of a prefill chunk with a quantised weight, which is dequantised to bf16 in slices of rows.

The multiplied values are those of `Weight.unpack`, rounded to bf16. (The product for few rows applies scales to its
sums in fp32 instead.) A dequantised slice has at most SLICE_BYTES, if COLUMNS rows fit into them.

On sm_90 a slice is dequantised while the previous kernel still runs, on SM resources that it leaves free (programmatic
dependent launch). The previous kernel may be the product with the previous slice. So slices use two buffers in turn.
The process keeps the buffers, because torch could give freed memory to another tensor while a kernel still reads it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from fastspec.kernels.common.code_values import blocks_of, column_of, scaled, source_of
from fastspec.kernels.common.codes import BITS
from fastspec.kernels.common.launch import launch, pdl_options
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.gpu import has_pdl, multiprocessors
from fastspec.kernels.product.prefill import multiply, prepared
from fastspec.kernels.product.prefill_sm90 import tile_of, time_of

EARLY = True  # False: no kernel starts before the previous one ends, also on GPUs with programmatic dependent launch
SLICE_BYTES = 64 * 2**20
COLUMNS = 256  # a slice has a multiple of this many rows of the weight
BETWEEN = 8.0  # estimated microseconds between the products of two slices
BESIDE = 2  # number of dequantising CTAs that fit on an SM beside a CTA of a product
RUN = 8  # consecutive 16-bit halves of words that a thread reads: 16 bytes, a run
RUNS, NUM_WARPS = 256, 4  # runs that a CTA dequantises at a time, and its warps


@triton.jit
def _dequantise_runs(
    turn,
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
    """Dequantises RUNS runs of codes, from run number turn * RUNS on.

    A run is RUN consecutive 16-bit halves of 32-bit words. A half has codes of several blocks of 32 columns. For the
    other arguments see `_dequantise_kernel`.
    """
    BLOCKS: tl.constexpr = blocks_of(FORM)
    SIDE: tl.constexpr = 4 if FORM == "int4" and GROUP == 32 else RUN  # columns side by side
    run = turn * RUNS + tl.arange(0, RUNS)[:, None]
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
        at = tl.max_contiguous(tl.multiple_of(at, (1, SIDE)), (1, SIDE))  # the compiler does not detect this
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)


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
    PDL: tl.constexpr,
):
    """Dequantises `count` rows of the weight, starting at row `first`, to packed 16-bit values.

    `count` and `first` are multiples of 16. source: tensors of the codes, see `source_of`.
    """
    turns = tl.cdiv(count.to(tl.int64) * K, RUNS * RUN * blocks_of(FORM))
    for turn in range(tl.program_id(0).to(tl.int64), turns, tl.num_programs(0)):
        _dequantise_runs(turn, source, out_ptr, first, count, K, FORM, GROUP, PAIRS, LOWER, RUNS, RUN)
    if PDL:
        gdc_wait()  # so that everything before this kernel is complete when the next one starts


def dequantise(weight: Weight, first: int, count: int, scratch: Tensor, early: bool = False) -> Weight:
    """Dequantises rows first .. first + count - 1 of a quantised weight to a packed weight.

    Args:
        first, count: multiples of 16. Rows are counted as they are stored: gate and up rows of a gated weight alternate
            in eights.
        scratch: bf16, count * K values or more, to which the result is written.
        early: True to begin while the previous kernel runs, which must not use scratch; needs sm_90.
    """
    assert weight.codes is not None
    k = weight.shape[1]
    source, constants = source_of(weight.codes)
    data = scratch[: count * k].view(count // 16, k // 32, 16, 32)
    turns = triton.cdiv(count * k, RUNS * RUN * (4 if BITS[weight.codes.kind.format] == 4 else 2))
    programs = min(turns, BESIDE * multiprocessors(weight.device)) if early else turns
    options: dict[str, Any] = {**constants, "RUNS": RUNS, "RUN": RUN, "num_warps": NUM_WARPS, **pdl_options(early)}
    if early:
        options["least_shared"] = (
            100  # equal to the product's: with another division of an SM's memory this kernel would wait for idle SMs
        )
    launch(_dequantise_kernel, (programs,), source, data, first, count, K=k, **options)
    return Weight(data, "packed", weight.gated)


class _Buffers:
    """Two buffers for dequantised slices on one CUDA stream, used alternately.

    Buffers that became too small are kept: captured CUDA graphs may still write to them.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []  # the last two are in use
        self._turn = 0

    def next(self, nbytes: int, device: torch.device) -> tuple[Tensor, bool]:
        """Returns the next buffer, uint8 [nbytes or more], and False if this call has allocated it, else True."""
        size = len(self._held[-1]) if self._held else 0
        if known := size >= nbytes:
            self._turn = 1 - self._turn
        else:
            more = max(nbytes, 2 * size)  # so all that are kept together take no more bytes than the last two
            self._held += [torch.empty(more, dtype=torch.uint8, device=device) for _ in range(2)]
        return self._held[-2:][self._turn], known


# state of the process and not of a generator: a closed generator's kernels may still read them, see above
_BUFFERS: dict[tuple[torch.device, int], _Buffers] = {}


def _buffers(device: torch.device) -> _Buffers:
    return _BUFFERS.setdefault((device, torch.cuda.current_stream(device).cuda_stream), _Buffers())


def slice_of(n: int, k: int, rows: int, programs: int) -> int:
    """Returns the number of weight rows in a slice of a weight [N, K] that takes the least estimated time.

    rows: number of rows of x. programs: number of CTAs of a product.
    """
    max_columns = max(COLUMNS, SLICE_BYTES // (2 * k) // COLUMNS * COLUMNS)
    if n <= max_columns:
        return n

    def time(size: int) -> float:
        return BETWEEN + time_of(tile_of(rows, size, programs), rows, size, programs) * k / 4096

    def whole(size: int) -> float:
        return n // size * time(size) + (time(n % size) if n % size else 0.0)

    return min(range(COLUMNS, max_columns + 1, COLUMNS), key=whole)


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
    """Multiplies the rows of a prefill chunk with a quantised weight. For arguments and errors see `prefill_linear`."""
    (n, k), each = weight.shape, 2 if gated else 1
    size = slice_of(n, k, x.numel() // k, multiprocessors(x.device) if x.is_cuda else 1)
    part = _slice(weight, 0, size)  # launched before the norm, because it need not wait for it
    rows, residual, out = prepared(x, weight, bias, norm, residual, gated, out_dtype)
    for first in range(0, n, size) if len(rows) > 0 else ():
        if first > 0:
            part = _slice(weight, first, size)
        columns = slice(first // each, (first + part.shape[0]) // each)
        own_bias = None if bias is None else bias[columns]
        own_residual = None if residual is None else residual[..., columns]
        multiply(rows, part, own_bias, own_residual, out[..., columns], gated)
    return out


def _slice(weight: Weight, first: int, size: int) -> Weight:
    """Dequantises `size` rows of a weight, or those that exist, from row `first` on, to a packed weight."""
    n, k = weight.shape
    if EARLY and has_pdl(weight.device):
        held, early = _buffers(weight.device).next(size * k * weight.dtype.itemsize, weight.device)
        scratch = held.view(weight.dtype)
    else:
        scratch, early = torch.empty(size * k, dtype=weight.dtype, device=weight.device), False
    return dequantise(weight, first, min(size, n - first), scratch, early)
