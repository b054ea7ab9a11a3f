"""How packed products are launched: the split of K that belongs to a weight, and tiles by the number of rows.

Measured on one NVIDIA H200, bf16, weights cold: Llama 3.1 8B and Llama 3.2 1B shapes. Other shapes take the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl

from fastspec.kernels.device import launch
from fastspec.kernels.packed_alone import alone_kernel
from fastspec.kernels.packed_held import held_kernel
from fastspec.kernels.packed_narrow import narrow_kernel
from fastspec.kernels.packed_norm import norm_rows
from fastspec.kernels.packed_wide import wide_kernel

GLUON_TYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
FUSED_ROWS = 8  # up to here a norm costs less on the way than as a kernel of its own
NARROW_ROWS = 16
LEAST_HELD = 1024  # weight rows that clusters which hold x find work in
MANY_WEIGHT_ROWS = 16384  # from here on one program does all of K for its weight rows
WIDE_ROWS = 128  # of the weight: 32 for each warp
STEP = 64  # values of K that the wide kernel multiplies at a time
ONE_EACH = 132  # programs that have a multiprocessor each on an H200, and all of its shared memory
LONG = 16  # slabs: longer sums take a loop, and with it registers
# bytes of shared memory that one program may have; 99 KiB elsewhere (CUDA programming guide, compute capabilities)
ROOMY = {(8, 0), (9, 0), (10, 0), (10, 3)}


@dataclass(frozen=True, slots=True)
class Split:
    """How a sum over K is cut. A row's bits depend on this.

    Attributes:
        ways: S, a power of two. slab: KT, 64 or 128.
    """

    ways: int
    slab: int


@dataclass(frozen=True, slots=True)
class Narrow:
    """A launch of the narrow kernel: rows of the weight and of x, slabs of either in flight, squares ahead."""

    weight_rows: int
    rows: int
    depth: int
    row_depth: int
    ahead: bool


@dataclass(frozen=True, slots=True)
class Wide:
    """A launch of the wide kernel: groups of 32 rows of x, steps in shared memory, programs of a cluster."""

    groups: int
    depth: int
    cluster: int
    weight_rows: int = WIDE_ROWS
    rows: int = 32
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Held:
    """A launch of the held kernel: clusters at work, rows of x and of the weight, steps of weights and of x in flight.

    Attributes:
        slots: steps of x in shared memory; 0 for all of them, which are then held.
        wgmma: warp groups multiply, else warps.
        norm: on the way, and not as a kernel of its own, where a cluster has a program for every way.
        registers: a thread may have, so that more programs fit; None for as many as it likes.
        programs: of a cluster; None for one to every way.
    """

    clusters: int
    rows: int
    weight_rows: int
    warps: int
    depth: int
    row_depth: int
    slots: int = 0
    wgmma: bool = False
    norm: bool = True
    registers: int | None = None
    programs: int | None = None


@dataclass(frozen=True, slots=True)
class Alone:
    """A launch of the kernel whose programs share nothing: as Held, with steps of x in shared memory by `slots`."""

    rows: int
    weight_rows: int
    warps: int
    depth: int
    row_depth: int
    slots: int = 4
    registers: int | None = None


Tile = Narrow | Wide | Held | Alone

# by (N, K)
SPLITS = {
    (4096, 4096): Split(4, 128),
    (4096, 14336): Split(8, 128),
    (2048, 8192): Split(8, 64),
}
# by the split and the rows of x
NARROW = {
    (Split(4, 64), 8): (16, 8, 2),
    (Split(4, 128), 8): (16, 4, 1),
    (Split(8, 64), 8): (16, 6, 2),
    (Split(8, 128), 8): (16, 2, 1),
    (Split(4, 64), 16): (16, 5, 1),
    (Split(4, 128), 16): (16, 3, 1),
    (Split(8, 64), 16): (16, 4, 1),
    (Split(8, 128), 16): (16, 2, 1),
}
# weights that another tile suits better for up to 8 rows, by (N, K)
NARROW_OWN = {
    (6144, 4096): (32, 4, 1),
    (16384, 2048): (32, 4, 2),
    (128256, 2048): (32, 4, 2),
}


# two programs to a multiprocessor
ALONE = {rows: Alone(rows, 128, 8, 2, 2, registers=128) for rows in (32, 64)}
# weights for which more than 8 rows have a tile of their own, by (N, K) and the rows of x in a block: 16, 32 or 64
MANY: dict[tuple[int, int, int], Held | Narrow | Alone] = {
    (6144, 4096, 16): Narrow(32, 16, 4, 1, False),
    (6144, 4096, 32): Held(24, 32, 256, 8, 2, 2, 4, True),
    (6144, 4096, 64): Held(48, 64, 128, 8, 2, 2, 4, True, norm=False, registers=128),
    (4096, 4096, 16): Narrow(32, 16, 2, 1, False),
    (4096, 4096, 32): Held(64, 32, 64, 4, 4, 2, 4, True, registers=168),
    (4096, 4096, 64): Held(32, 64, 128, 8, 2, 2, 4, True, registers=128),
    (28672, 4096, 16): Narrow(32, 16, 4, 1, True),
    (28672, 4096, 32): ALONE[32],
    (28672, 4096, 64): ALONE[64],
    (4096, 14336, 16): Narrow(32, 16, 1, 1, False),
    (4096, 14336, 32): Narrow(32, 32, 1, 1, False),
    # of clusters of 8 only 30 fit on an H200: two of 32 would run behind the others
    (4096, 14336, 64): Held(32, 64, 128, 8, 2, 2, 4, True, registers=128, programs=4),
    (128256, 4096, 16): Narrow(32, 16, 4, 1, True),
    (128256, 4096, 32): ALONE[32],
    (128256, 4096, 64): ALONE[64],
    (3072, 2048, 16): Narrow(32, 16, 4, 1, False),
    (3072, 2048, 32): Narrow(16, 32, 4, 1, False),
    (3072, 2048, 64): Held(24, 64, 128, 8, 4, 2, 4, True),
    (2048, 2048, 16): Narrow(32, 16, 4, 1, False),
    (2048, 2048, 32): Held(16, 32, 128, 8, 4, 4, 0, True),
    (2048, 2048, 64): Held(16, 64, 128, 8, 4, 4, 4, True),
    (16384, 2048, 32): Narrow(32, 32, 3, 1, True),
    (16384, 2048, 64): Alone(64, 64, 4, 4, 2),
    (2048, 8192, 16): Narrow(32, 16, 3, 1, False),
    (2048, 8192, 32): Narrow(32, 32, 3, 1, False),
    (2048, 8192, 64): Held(16, 64, 128, 4, 2, 2, 4, True),
}


def supported(capability: tuple[int, int]) -> bool:
    """Whether the packed products run on a GPU of this compute capability: sm_80 and newer."""
    return capability >= (8, 0)


def split_of(n: int, k: int) -> Split:
    """The split that belongs to a weight [N, K]: that of the table, or one for how long its sums are."""
    return SPLITS.get((n, k)) or (Split(8, 128) if k >= 8192 and n < k else Split(4, 64))


def tile_of(n: int, k: int, rows: int, capability: tuple[int, int], whole: bool = False) -> Tile:
    """The launch for `rows` rows of x and a weight [N, K].

    Args:
        whole: no cluster may share weight rows, as where a program takes the largest of its rows.
    """
    split = split_of(n, k)
    many = MANY.get((n, k, 16 if rows <= 16 else 32 if rows <= 32 else 64))
    if rows > FUSED_ROWS and capability == (9, 0) and many is not None and not (whole and isinstance(many, Held)):
        return many
    if rows > NARROW_ROWS and capability == (9, 0) and n >= MANY_WEIGHT_ROWS:
        return ALONE[32 if rows <= 32 else 64]
    if rows > NARROW_ROWS and capability == (9, 0) and not whole and n >= LEAST_HELD:
        return Held(min(triton.cdiv(n, 128), 128 // split.ways), 32 if rows <= 32 else 64, 128, 8, 4, 2, 4, True)
    if rows > NARROW_ROWS:
        cluster = split.ways if capability >= (9, 0) and n < MANY_WEIGHT_ROWS and not whole else 1
        roomy = capability in ROOMY
        groups = 2 if rows > 32 and (roomy or cluster > 1) else 1
        alone = roomy and cluster > 1 and triton.cdiv(n, WIDE_ROWS) * cluster <= ONE_EACH
        return Wide(groups, 8 if alone else 4, cluster)
    steps = triton.cdiv(k, split.ways * split.slab)
    block = 8 if rows <= 8 else 16
    own = NARROW_OWN.get((n, k)) if block == 8 else None
    weight_rows, depth, row_depth = own or NARROW[split, block]
    ahead = n >= MANY_WEIGHT_ROWS or steps > LONG
    if steps > LONG and split.slab == 64:
        depth = min(depth, 6)
    return Narrow(weight_rows, block, min(depth, steps), min(row_depth, steps), ahead)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True, slots=True)
class Call:
    """Operands of one product, x [M, K] contiguous; None is absent."""

    x: Tensor
    weight: Tensor
    out: Tensor
    bias: Tensor | None = None
    norm: tuple[Tensor, float] | None = None
    residual: Tensor | None = None
    keys: Tensor | None = None
    limit: int = 0
    gated: bool = False


def _norms(tile: Tile) -> bool:
    """Whether the kernel norms x on the way."""
    if isinstance(tile, Held):
        return tile.norm and tile.programs is None  # a program has the squares of one way
    return isinstance(tile, Narrow) and tile.rows <= FUSED_ROWS


def _turns(k: int, split: Split, depth: int) -> int:
    """Turns of `depth` steps in one way through K."""
    return int(triton.cdiv(triton.cdiv(k, split.ways * split.slab) * (split.slab // STEP), depth))


def run(call: Call, pdl: bool, tile: Tile | None = None) -> None:
    """Launches a product, and before it its norm, where that is a kernel of its own."""
    rows, k = call.x.shape
    n = call.weight.shape[0] * 16
    tile = tile or tile_of(n, k, rows, capability_of(call.x.device), call.keys is not None)
    split = split_of(n, k)
    gamma = scale = None
    if call.norm is not None and _norms(tile):
        gamma = call.norm[0].view(torch.int32)
    elif call.norm is not None:
        x, scale = norm_rows(call.x, *call.norm, split.ways, split.slab, GLUON_TYPE[call.x.dtype], pdl)
        call = replace(call, x=x)
    ends = (scale, call.bias, call.residual, call.out, call.keys)
    numbers = (call.limit, 0 if call.keys is None else call.out.stride(0))
    shape: dict[str, Any] = {"K": k, "S": split.ways, "KT": split.slab, "R": tile.weight_rows, "D": tile.depth}
    shape |= {"GATED": call.gated, "PDL": pdl, "DTYPE": GLUON_TYPE[call.x.dtype]}
    # no contraction that the kernels do not ask for: two of them must round alike
    options: dict[str, Any] = {"launch_pdl": pdl, "enable_fp_fusion": False}
    words = (call.x.view(torch.int32), call.weight.view(torch.int32))
    steps = triton.cdiv(k, split.ways * split.slab)
    if isinstance(tile, Narrow):
        grid = (triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows))
        loops = max(0, (steps - tile.depth - 1) // tile.depth)
        eps = 0.0 if call.norm is None else call.norm[1]
        shape |= {"BM": tile.rows, "XD": tile.row_depth, "AHEAD": tile.ahead, "num_warps": split.ways}
        launch(narrow_kernel, grid, *words, gamma, *ends, rows, n, eps, *numbers, loops, **shape, **options)
        return
    if isinstance(tile, Held):
        _run_held(tile, split, call, (*words, gamma, *ends[:-1]), shape, options)
        return
    turns = _turns(k, split, tile.depth)
    if isinstance(tile, Alone):
        grid = (triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows))
        shape |= {"GROUP": tile.rows, "XD": tile.row_depth, "SLOTS": tile.slots, "WARPS": tile.warps}
        options |= {"num_warps": tile.warps, "maxnreg": tile.registers}
        launch(alone_kernel, grid, *words, *ends, rows, n, *numbers, turns, **shape, **options)
        return
    grid = (triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows * tile.groups))
    parts = None
    if tile.cluster > 1:
        size = tile.cluster * tile.groups * tile.rows * tile.weight_rows
        parts = call.x.new_empty(grid[0] * grid[1] * size, dtype=torch.float32)
    shape |= {"C": tile.cluster, "GROUP": tile.rows, "GROUPS": tile.groups, "WARPS": tile.warps}
    options |= {"num_warps": tile.warps, "num_ctas": tile.cluster}
    launch(wide_kernel, grid, *words, *ends, parts, rows, n, *numbers, turns, **shape, **options)


def _run_held(
    tile: Held, split: Split, call: Call, given: tuple[Any, ...], shape: dict[str, Any], options: dict[str, Any]
) -> None:
    """A product by clusters that hold x: `given` are the kernel's operands."""
    rows, k = call.x.shape
    n = call.weight.shape[0] * 16
    count = triton.cdiv(n, tile.weight_rows)
    grid = (min(count, tile.clusters), triton.cdiv(rows, tile.rows))
    turns = _turns(k, split, tile.depth)
    size = grid[0] * grid[1] * split.ways * tile.rows * (2 * tile.weight_rows + 1)
    parts = call.x.new_empty(size, dtype=torch.float32)
    eps = 0.0 if call.norm is None else call.norm[1]
    group = tile.rows if tile.wgmma else min(tile.rows, 32)
    shape |= {"GROUP": group, "GROUPS": tile.rows // group, "XD": tile.row_depth, "WGMMA": tile.wgmma}
    shape |= {"SLOTS": tile.slots or turns * tile.depth, "HELD": tile.slots == 0, "WARPS": tile.warps}
    programs = tile.programs or split.ways
    shape |= {"EVEN": n % tile.weight_rows == 0, "C": programs}
    shape["ONE"] = count <= tile.clusters and programs == split.ways
    options |= {"num_warps": tile.warps, "num_ctas": programs, "maxnreg": tile.registers}
    launch(held_kernel, grid, *given, parts, rows, n, eps, count, turns, **shape, **options)
