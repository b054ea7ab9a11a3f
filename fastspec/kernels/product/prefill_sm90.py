"""`prefill_linear` on sm_90: TMA loads tiles, wgmma multiplies, one CTA per SM.

For meaning, shapes and dtypes of the arguments see `prefill_linear` of prefill.py. It calls `run` with rows of x to
which the norm is already applied.

A packed row has 32 values of one weight row, 64 bytes. TMA loads two packed rows as one row of 128 bytes. Rows of 64
bytes would need twice as many requests to the L2 cache. TMA writes shared memory with the swizzle of 128-byte rows, but
wgmma reads it with the swizzle of 64-byte rows. The two swizzles differ only in weight rows 8..15 of every 16.
There wgmma reads row r ^ 1 instead of row r.

Weight rows are columns of the result. So columns 8..15 of every 16 are exchanged in pairs (2 i, 2 i + 1). The epilogue
exchanges them back. This moves no data between threads, because one thread has both columns of a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from fastspec.kernels.common.gluon_compat import REINTERPRETS, load_block, thread_barrier
from fastspec.kernels.common.launch import described
from fastspec.kernels.common.launch import launch as start
from fastspec.kernels.common.weights import Weight

HELD = gl.constexpr(128 * 256)  # number of sums in the largest tile
# number of tiles, of different rows and the same columns, that run together. So their weights are read once from device
# memory
GROUP = gl.constexpr(16)


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Tile of the result that a CTA computes at a time, and its estimated time.

    Attributes:
        rows, columns: rows and columns of the result, before the gate.
        stages: pipeline stages in shared memory.
        cost: microseconds for one tile with K = 4096.
    """

    rows: int
    columns: int
    stages: int
    cost: float


# the costs are for an H100 or H200, with a tile on every SM. Other tiles were slower: 128 rows by 128, 64 or (as two
# products) 192 columns; 64 by 64, except for 64 rows in all
TILES = (PrefillTile(128, 256, 4, 42.8), PrefillTile(64, 256, 4, 24.5), PrefillTile(64, 128, 6, 17.0))


@gluon.jit
def _place(tile, num_rows, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TILES_N: gl.constexpr):
    """Returns the first row and the first column of tile number `tile`.

    Up to GROUP consecutive tiles have the same columns and different rows. TILES_N: number of tiles along the columns.
    """
    per_group: gl.constexpr = GROUP * TILES_N
    first = tile // per_group * GROUP
    rows = gl.minimum(gl.cdiv(num_rows, ROWS) - first, GROUP)
    tile_m = first + tile % per_group % rows
    return tile_m * ROWS, tile % per_group // rows * COLUMNS


@gluon.jit
def _fetch(x_desc, weight_desc, xs, ws, full, slot, m, n, step, there):
    """Starts the TMA copies of one step's x and weights to slot `slot` of the ring buffer in shared memory.

    m, n: first row and column of the tile. full: barriers of the slots. there: False to copy nothing.
    """
    mbarrier.expect(full.index(slot), (xs.shape[1] + ws.shape[1] * 16) * 128, pred=there)
    load_block(x_desc, [m, step * 64], full.index(slot), xs.index(slot), pred=there)
    for half in gl.static_range(2):
        block = [n // 16, (2 * step + half) * 8, 0]
        load_block(weight_desc, block, full.index(slot), ws.index(slot * 2 + half), pred=there)


@gluon.jit
def _multiply(out, x, ws, slot):
    """Returns `out` plus the product of x [ROWS, 64] with the weights in slot `slot`: two products over 32 values."""
    columns: gl.constexpr = out.shape[1]
    lay: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    for half in gl.static_range(2):
        if REINTERPRETS:
            rows = ws.index(slot * 2 + half).reinterpret(ws.dtype, [columns, 32], lay)
        else:
            rows = ws.index(slot * 2 + half)._reinterpret(ws.dtype, [columns, 32], lay)
        out = warpgroup_mma(x.slice(32 * half, 32, 1), rows.permute((1, 0)), out, is_async=True)
    return out


@gluon.jit
def _exchanged(x):
    """Exchanges each element 2 i with element 2 i + 1 along the last axis of x [R, n, 8]."""
    even, odd = gl.split(gl.reshape(x, (x.shape[0], x.shape[1], 4, 2)))
    return gl.reshape(gl.join(odd, even), (x.shape[0], x.shape[1], 8))


@gluon.jit
def _places(part, SLOT: gl.constexpr):
    """Returns the offsets at which the sums `part` [R, 64] are stored in slot SLOT of a CTA's device memory.

    This memory has two slots of HELD sums each.
    """
    row = gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, part.type.layout))
    column = gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, part.type.layout))
    return SLOT * HELD + gl.expand_dims(row, 1) * part.shape[1] + gl.expand_dims(column, 0)


@gluon.jit
def _held(part, held, SLOT: gl.constexpr):
    return gl.load(held + _places(part, SLOT))


@gluon.jit
def _hold(part, held, PART: gl.constexpr):
    """Stores `part`, the sums over part number PART of K, in the CTA's device memory `held`.

    Slot 0 receives the sums over part 0, and later those over parts 0 and 1. Slot 1 receives the sums over part 2.
    """
    if PART == 1:
        part = _held(part, held, 0) + part
    gl.store(held + _places(part, PART // 2), part)


@gluon.jit
def _store(
    part, m, n, bias_ptr, residual_ptr, out_ptr, held, num_rows,
    WIDTH: gl.constexpr, STRIDE: gl.constexpr, WARPS: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Adds bias and residual to the sums `part` [R, C] and stores the result, 64 columns at a time.

    If K has several parts, the sums over all parts before the last are stored in device memory, `held`. The call for
    the last part adds all of them as a binary tree. A thread reads only sums that it stored itself.
    """
    rows: gl.constexpr = part.shape[0]
    columns: gl.constexpr = part.shape[1]
    if columns > 64:
        left, right = gl.split(gl.permute(gl.reshape(part, (rows, 2, columns // 2)), (0, 2, 1)))
        half: gl.constexpr = columns // 2
        _store(left, m, n, bias_ptr, residual_ptr, out_ptr, held, num_rows, WIDTH, STRIDE, WARPS, PART, PARTS)
        if PARTS > 1:
            held += rows * half
        _store(right, m, n + half, bias_ptr, residual_ptr, out_ptr, held, num_rows, WIDTH, STRIDE, WARPS, PART, PARTS)
    elif PART < PARTS - 1:
        _hold(part, held, PART)
    else:
        if PARTS == 4:
            part = _held(part, held, 1) + part
        if PARTS > 1:
            part = _held(part, held, 0) + part
        lanes: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [WARPS, 1], [1, 0])
        row = m + gl.arange(0, rows, layout=gl.SliceLayout(1, lanes))
        column = n + gl.arange(0, columns, layout=gl.SliceLayout(0, lanes))
        at = gl.expand_dims(row.to(gl.int64), 1) * STRIDE + gl.expand_dims(column, 0)
        inside = gl.expand_dims(row < num_rows, 1) & gl.expand_dims(column < WIDTH, 0)
        if bias_ptr is not None:
            column = n + gl.arange(0, columns, layout=gl.SliceLayout(0, part.type.layout))
            bias = gl.load(bias_ptr + column, mask=column < WIDTH, other=0.0)
            part += gl.expand_dims(bias.to(gl.float32), 0)
        if residual_ptr is not None:
            residual = gl.load(residual_ptr + at, mask=inside, other=0.0)
            part += gl.convert_layout(residual, part.type.layout).to(gl.float32)
        gl.store(out_ptr + at, gl.convert_layout(part.to(out_ptr.dtype.element_ty), lanes), mask=inside)


@gluon.jit
def _finish(
    out, m, n, bias_ptr, residual_ptr, out_ptr, held, num_rows,
    N: gl.constexpr, STRIDE: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr, PART: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Runs the epilogue of an accumulator [R, C], in which columns 8..15 of every 16 are exchanged in pairs.

    The accumulator has the sums over part PART, of PARTS equal parts of K.
    """
    rows: gl.constexpr = out.shape[0]
    columns: gl.constexpr = out.shape[1]
    straight, crossed = gl.split(gl.permute(gl.reshape(out, (rows, columns // 16, 2, 8)), (0, 1, 3, 2)))
    crossed = _exchanged(crossed)
    straight = gl.convert_layout(straight, crossed.type.layout)
    if GATED:
        gated = gl.reshape(straight / (1.0 + gl.exp(-straight)) * crossed, (rows, columns // 2))
        _store(gated, m, n // 2, None, None, out_ptr, held, num_rows, N // 2, STRIDE, WARPS, PART, PARTS)
    else:
        whole = gl.reshape(gl.permute(gl.join(straight, crossed), (0, 1, 3, 2)), (rows, columns))
        _store(whole, m, n, bias_ptr, residual_ptr, out_ptr, held, num_rows, N, STRIDE, WARPS, PART, PARTS)


@gluon.jit(do_not_specialize=["num_rows"])
def _hopper_kernel(
    x_desc,  # [R, K] in blocks of [ROWS, 64]
    weight_desc,  # [N/16, K/4, 64] in blocks of [COLUMNS/16, 8, 64]
    bias_ptr,
    residual_ptr,
    out_ptr,
    held_ptr,  # fp32 [programs, 2, HELD], for the sums of parts of K; None: one part
    num_rows,
    N: gl.constexpr,
    K: gl.constexpr,
    STRIDE: gl.constexpr,  # elements between rows of the result and of the residual
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    WARPS: gl.constexpr,
    PARTS: gl.constexpr,  # equal parts of K whose sums are added as one binary tree: 1, 2 or 4
):
    # the next kernel may start early: it dequantises the next weight, which does not depend on this kernel
    gdc_launch_dependents()
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, 64], gl.NVMMASharedLayout(128, 16, 2))
    ws = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, COLUMNS // 16, 8, 64], gl.NVMMASharedLayout(128, 16, 3))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()

    STEPS: gl.constexpr = K // 64
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    TILES_N: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tiles = gl.cdiv(num_rows, ROWS) * TILES_N
    programs = gl.num_programs(0)
    # the ring continues from tile to tile: the first steps of the next tile are loaded while this one is stored
    ahead = gl.program_id(0)
    ahead_step = 0
    ahead_m, ahead_n = _place(ahead, num_rows, ROWS, COLUMNS, TILES_N)
    for stage in gl.static_range(STAGES - 1):
        _fetch(x_desc, weight_desc, xs, ws, full, stage, ahead_m, ahead_n, ahead_step, ahead < tiles)
        ahead_step += 1
        if ahead_step == STEPS:
            ahead_step = 0
            ahead += programs
            ahead_m, ahead_n = _place(ahead, num_rows, ROWS, COLUMNS, TILES_N)
    at = 0
    for tile in range(gl.program_id(0), tiles, programs):
        m, n = _place(tile, num_rows, ROWS, COLUMNS, TILES_N)
        held = None
        if PARTS > 1:
            held = held_ptr + gl.program_id(0) * (2 * HELD)
        for part in gl.static_range(PARTS):
            out = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
            for _ in range(STEPS // PARTS):
                slot = at % STAGES
                mbarrier.wait(full.index(slot), at // STAGES % 2)
                out = _multiply(out, xs.index(slot), ws, slot)
                # all products before this step's are complete, and after the barrier in every warp: the previous slot
                # is free
                out = warpgroup_mma_wait(2, deps=(out,))
                thread_barrier()
                free = (at + STAGES - 1) % STAGES
                _fetch(x_desc, weight_desc, xs, ws, full, free, ahead_m, ahead_n, ahead_step, ahead < tiles)
                ahead_step += 1
                if ahead_step == STEPS:
                    ahead_step = 0
                    ahead += programs
                    ahead_m, ahead_n = _place(ahead, num_rows, ROWS, COLUMNS, TILES_N)
                at += 1
            out = warpgroup_mma_wait(0, deps=(out,))
            _finish(out, m, n, bias_ptr, residual_ptr, out_ptr, held, num_rows, N, STRIDE, GATED, WARPS, part, PARTS)


def time_of(tile: PrefillTile, num_rows: int, n: int, programs: int) -> float:
    """Returns the estimated microseconds of a product of `num_rows` rows with n columns and K = 4096.

    programs: number of CTAs.
    """
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns)
    return int(triton.cdiv(tiles, programs)) * tile.cost


def tile_of(num_rows: int, n: int, programs: int, parts: int = 1) -> PrefillTile:
    """Returns the tile with the least estimated time for `num_rows` rows and n columns.

    For `programs` and `parts` see `run`.
    """

    def time(tile: PrefillTile) -> float:
        return time_of(tile, num_rows, n, programs)

    # four warps have too few registers to add parts with more columns
    return min((tile for tile in TILES if parts < 4 or tile.rows == 128 or tile.columns == 128), key=time)


def row_stride(out: Tensor) -> int:
    """Returns the stride, in elements, between rows of `out` [..., width]. It must be the same between all rows."""
    return out.stride(-2) if out.dim() > 1 else out.shape[-1]


def run(
    rows: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool,
    tile: PrefillTile,
    programs: int,
    parts: int = 1,
) -> None:
    """Launches the product of a prefill chunk with a given tile. For the other arguments see `prefill_linear`.

    Args:
        rows: [R, K]. The addresses of rows and of the packed weight are multiples of 16.
        residual, out: [..., N or N/2], or these columns of tensors with one common width.
        programs: number of CTAs, at most.
        parts: number of equal parts of K, each a multiple of 64, whose sums are added as one binary tree: 1, 2 or 4.
    """
    n, k = weight.shape
    pairs = weight.data.view(n // 16, k // 4, 64)
    tiles = triton.cdiv(rows.shape[0], tile.rows) * triton.cdiv(n, tile.columns)
    warps = tile.rows // 16
    held = None
    if parts > 1:
        held = torch.empty(min(tiles, programs) * 2 * HELD.value, dtype=torch.float32, device=out.device)
    start(_hopper_kernel, (min(tiles, programs),),
        described(rows, [tile.rows, 64]), described(pairs, [tile.columns // 16, 8, 64]), bias, residual, out, held,
        rows.shape[0], N=n, K=k, STRIDE=row_stride(out), ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages,
        GATED=gated, WARPS=warps, PARTS=parts, num_warps=warps,
    )  # fmt: skip
