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

from fastspec.kernels.common.launch import described, launch
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.linear.large_m import wide_kernel
from fastspec.kernels.linear.norm import norm_rows
from fastspec.kernels.linear.small_m import narrow_kernel
from fastspec.kernels.linear.split_k import Parts, add_up, given_rows
from fastspec.kernels.linear.tma_sm90 import boxes, ring_kernel

GLUON_TYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
FUSED_ROWS = 8  # up to here a norm costs less on the way than as a kernel of its own
RING_ROWS = 160  # of x at most in one program of the ring's kernel: two sums of each fill the registers
ALONE_ROWS = 64  # of x that a program has room for (so 49 and more): from here on weights in ALONE have other tiles
SOME_ROWS = 128  # up to here programs are shared out: with more of them what multiplies is busy, whatever it is given
MANY_WEIGHT_ROWS = 16384  # from here on one program does all of K for its weight rows
WIDE_ROWS = 128  # of the weight: 32 for each warp
STEP = 64  # values of K that the wide kernel multiplies at a time
RING_BYTES = (224_000, 115_000)  # of shared memory for the ring of one program on a multiprocessor, and of two
TURNED_BYTES = 4096  # of those at most, through which the compiler puts a tile's values in rows
ONE_EACH = 132  # programs that have a multiprocessor each on an H200, and all of its shared memory
ROUND_ROWS = 16  # weight rows that take as long as the beginning and the end of one program more
LONG = 16  # slabs: longer sums take a loop, and with it registers
# bytes of shared memory that one program may have; 99 KiB elsewhere (CUDA programming guide, compute capabilities)
ROOMY = {(8, 0), (9, 0), (10, 0), (10, 3)}


@dataclass(frozen=True, slots=True)
class Split:
    """How a sum over K is cut. A row's bits depend on this.

    Attributes:
        ways: S, a power of two. slab: KT, 64 or 128.
        together: ways whose sums are added up before those of others are.
    """

    ways: int
    slab: int
    together: int = 1


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
    """A launch of the wide kernel: groups of 32 rows of x, steps in shared memory."""

    groups: int
    depth: int
    weight_rows: int = WIDE_ROWS
    rows: int = 32
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Ring:
    """A launch of the ring's kernel: rows of x and of the weight, steps in shared memory.

    Attributes:
        rest: more rows of x, which a second product multiplies.
        weight_rows: of a program, a multiple of 16 and the sum of at most three powers of two.
        ways: through K that a program takes, one or those that belong together; another kernel adds up what they give.
            None for all of them.
        registers: a thread may have on average, so that two programs fit on a multiprocessor.
        programs: that share the weight's tiles, each going on to the next; None for one to a tile.
    """

    rows: int
    weight_rows: int
    warps: int
    stages: int
    rest: int = 0
    ways: int | None = None
    registers: int | None = None
    programs: int | None = None

    @property
    def room(self) -> int:
        """Weight rows that there is shared memory for: a power of two, of which warp groups multiply 64."""
        whole: int = triton.next_power_of_2(self.weight_rows)
        return max(64, whole)

    @property
    def boxes(self) -> list[int]:
        """`boxes` of the weight rows, three with zeros behind."""
        sizes: list[int] = boxes(self.weight_rows)
        return sizes + [0] * (3 - len(sizes))


Tile = Narrow | Wide | Ring
Norm = tuple[Tensor, float]  # weight [K] and epsilon

# by (N, K)
SPLITS = {
    (4096, 4096): Split(4, 128, 2),
    (4096, 14336): Split(8, 128, 2),
    (2048, 8192): Split(8, 64),
}
# by the split, whatever is added up together, and the rows of x
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


# weight rows, by (N, K), of programs that leave ways apart and have a multiprocessor each: from ALONE_ROWS of x on
ALONE = {(4096, 4096): 64, (4096, 14336): 128}

# weights, by (N, K), that the narrow kernel reads faster with all the L1 there is than without dividing it anew
L1_FIRST = {(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)}


def supported(capability: tuple[int, int]) -> bool:
    """Whether the packed products run on a GPU of this compute capability: sm_80 and newer."""
    return capability >= (8, 0)


def split_of(n: int, k: int) -> Split:
    """The split that belongs to a weight [N, K]: that of the table, or one for how long its sums are."""
    return SPLITS.get((n, k)) or (Split(8, 128) if k >= 8192 and n < k else Split(4, 64))


def tile_of(n: int, k: int, rows: int, capability: tuple[int, int], whole: bool = False, gated: bool = False) -> Tile:
    """The launch for `rows` rows of x and a weight [N, K].

    Args:
        whole: no two programs may share weight rows, as where one takes the largest of its sums.
        gated: sums are multiplied by each other.
    """
    split = split_of(n, k)
    if rows > narrow_rows(capability):
        ring = capability == (9, 0)
        return _ring_of(n, k, rows, split, whole, gated) if ring else _wide_of(rows, split, capability)
    block = 8 if rows <= 8 else 16
    steps = triton.cdiv(k, split.ways * split.slab)
    own = NARROW_OWN.get((n, k)) if block == 8 else None
    weight_rows, depth, row_depth = own or NARROW[replace(split, together=1), block]
    ahead = n >= MANY_WEIGHT_ROWS or steps > LONG
    if steps > LONG and split.slab == 64:
        depth = min(depth, 6)
    return Narrow(weight_rows, block, min(depth, steps), min(row_depth, steps), ahead)


def narrow_rows(capability: tuple[int, int]) -> int:
    """Rows of x up to which the narrow kernel does best; with more the ring's does, or where there is none the wide."""
    return 8 if capability == (9, 0) else 16


def _wide_of(rows: int, split: Split, capability: tuple[int, int]) -> Wide:
    """The wide kernel's tile: one program does all of K for its weight rows."""
    roomy = capability in ROOMY
    tight = not roomy and split.together > 1  # whose sums need room of their own
    return Wide(2 if rows > 32 and roomy else 1, 3 if tight else 4)


def _ring_of(n: int, k: int, rows: int, split: Split, whole: bool, gated: bool) -> Ring:
    """The ring's tile: one program on a multiprocessor, or two; where weight rows are few, ways are apart."""
    rows = triton.cdiv(rows, triton.cdiv(rows, RING_ROWS))
    group = 1 << (rows.bit_length() - 1)
    rest = 0 if group == rows else max(8, 1 << (rows - group - 1).bit_length())
    if rest == group:
        group, rest = 2 * group, 0
    few, some = group + rest <= 64, group + rest <= SOME_ROWS
    ways = None
    if n >= MANY_WEIGHT_ROWS:
        weight_rows, roomy = _shared_out(n, 1, few) if some else 128, not few
    elif whole or gated or n >= 64 * ONE_EACH * 2 // 3:
        weight_rows, roomy = 48 if n <= 48 * ONE_EACH else 64, n <= 64 * ONE_EACH
    else:
        weight_rows, ways, roomy = _ways_apart(n, k, group + rest, split)
    warps = 8 if roomy and weight_rows > 64 else 4
    tile = Ring(group, weight_rows, warps, 0, rest, ways, None if roomy else 128)
    # of a pick, the registers do not hold a tile's end and what comes next
    if warps == 8 and not whole and ways is None:
        tiles = triton.cdiv(n, weight_rows)
        tile = replace(tile, programs=triton.cdiv(tiles, triton.cdiv(tiles, ONE_EACH)))
    space = RING_BYTES[not roomy] - (TURNED_BYTES if ways is None else 0)
    return replace(tile, stages=min(20, space // ((tile.room + group + rest) * 128)))


def _ways_apart(n: int, k: int, rows: int, split: Split) -> tuple[int, int, bool]:
    """Weight rows and ways of a program that leaves its sums, and whether it has a multiprocessor to itself."""
    if (n, k) in ALONE and rows >= ALONE_ROWS:
        return ALONE[n, k], split.together, True
    ways = 1 if triton.cdiv(n, 64) * split.ways <= 2 * ONE_EACH else split.together
    return _shared_out(n, split.ways // ways) if rows <= SOME_ROWS else 64, ways, False


def _shared_out(n: int, ways: int, two: bool = True) -> int:
    """Weight rows of a program of n: as many as leave no multiprocessor more than its share.

    Args:
        two: programs of 64 to 128 weight rows on a multiprocessor, or one of more than 64.
    """
    places, sizes = (2 * ONE_EACH, (128, 112, 96, 80, 64)) if two else (ONE_EACH, (128, 112, 96, 80))
    return min(sizes, key=lambda own: triton.cdiv(triton.cdiv(n, own) * ways, places) * (own + ROUND_ROWS))


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True, slots=True)
class Call:
    """Operands of one product, x [M, K] contiguous; None is absent."""

    x: Tensor
    weight: Weight
    out: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    keys: Tensor | None = None
    limit: int = 0
    gated: bool = False


def _constants(call: Call, split: Split, pdl: bool) -> dict[str, Any]:
    """Constants that all kernels of products have."""
    cut = {"K": call.x.shape[1], "S": split.ways, "KT": split.slab, "TOGETHER": split.together}
    return {**cut, "GATED": call.gated, "PDL": pdl, "DTYPE": GLUON_TYPE[call.x.dtype]}


def run(call: Call, pdl: bool, tile: Tile | None = None) -> None:
    """Launches a product, and before it its norm, where that is a kernel of its own."""
    rows, k = call.x.shape
    n, _ = call.weight.shape
    tile = tile or tile_of(n, k, rows, capability_of(call.x.device), call.keys is not None, call.gated)
    split = split_of(n, k)
    if isinstance(tile, Ring):
        _, given, squares = given_to(call.weight, call.x, call.norm, pdl)
        whole_ring(tile, replace(call, x=given), squares, pdl)
        return
    gamma = scale = None
    if call.norm is not None and isinstance(tile, Narrow) and tile.rows <= FUSED_ROWS:
        gamma = call.norm[0].view(torch.int32)
    elif call.norm is not None:
        x, scale = norm_rows(call.x, *call.norm, split.ways, split.slab, GLUON_TYPE[call.x.dtype], pdl)
        call = replace(call, x=x)
    ends = (scale, call.bias, call.residual, call.out, call.keys)
    numbers = (call.limit, 0 if call.keys is None else call.out.stride(0))
    shape = _constants(call, split, pdl) | {"R": tile.weight_rows, "D": tile.depth}
    # no contraction that the kernels do not ask for: two of them must round alike
    options: dict[str, Any] = {"launch_pdl": pdl, "enable_fp_fusion": False}
    words = (call.x.view(torch.int32), call.weight.words())
    steps = triton.cdiv(k, split.ways * split.slab)
    if isinstance(tile, Narrow):
        grid = (triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows))
        loops = max(0, (steps - tile.depth - 1) // tile.depth)
        eps = 0.0 if call.norm is None else call.norm[1]
        shape |= {"BM": tile.rows, "XD": tile.row_depth, "AHEAD": tile.ahead, "num_warps": split.ways}
        if (n, k) in L1_FIRST:
            options["least_shared"] = 0
        launch(narrow_kernel, grid, *words, gamma, *ends, rows, n, eps, *numbers, loops, **shape, **options)
        return
    grid = (triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows * tile.groups))
    turns = triton.cdiv(steps * (split.slab // STEP), tile.depth)
    shape |= {"GROUP": tile.rows, "GROUPS": tile.groups, "WARPS": tile.warps}
    options |= {"num_warps": tile.warps}
    launch(wide_kernel, grid, *words, *ends, rows, n, *numbers, turns, **shape, **options)


def given_to(
    weight: Weight, x: Tensor, norm: Norm | None, pdl: bool, parts: Parts | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`given_rows` for a product of the ring's kernel with `weight`."""
    split = split_of(*weight.shape)
    return given_rows(x, norm, (split.ways, split.slab), GLUON_TYPE[x.dtype], pdl, parts, bias)


def whole_ring(tile: Ring, call: Call, squares: Tensor | None, pdl: bool) -> None:
    """`ring`, and behind it what adds up ways that were left apart."""
    parts = ring(tile, call, squares, pdl)
    if parts is not None:
        add_up(parts, squares, call.norm, call.bias, call.residual, call.out, pdl)


def ring(tile: Ring, call: Call, squares: Tensor | None, pdl: bool, regroup_out: bool = False) -> Parts | None:
    """Launches the ring's kernel.

    Args:
        call: x as `given_to` makes it.
        squares: what comes with it.
        regroup_out: the result is regrouped as x is.

    Returns:
        Where ways are apart, what they come to: for `add_up`, with all `call` asks for but the product.
    """
    rows, k = call.x.shape
    n, _ = call.weight.shape
    split = split_of(n, k)
    ways, parts = split.together, None
    if tile.ways is not None:
        ways = tile.ways
        sums = call.x.new_empty(split.ways // ways, rows, n, dtype=torch.float32)
        parts = Parts(sums, split.together // ways)
    blocks = triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows + tile.rest)
    eps = 0.0 if call.norm is None else call.norm[1]
    stride = 0 if call.keys is None else call.out.stride(0)
    words = call.weight.words(n // 16, k // 4, 32)
    shape = _constants(call, split, pdl) | {"R": tile.room, "OWN": tile.weight_rows, "WARPS": tile.warps}
    shape |= {"TOGETHER": ways, "GROUP": tile.rows, "REST": tile.rest, "STAGES": tile.stages}
    shape |= {"STAY": tile.programs is not None, "REGROUP": regroup_out}
    launch(
        ring_kernel,
        (tile.programs or blocks[0], blocks[1], 1 if parts is None else len(parts.sums)),
        described(call.x, [tile.rows, 64]),
        described(call.x, [tile.rest, 64]) if tile.rest else None,
        *[described(words, [box // 16, 16, 32]) if box else None for box in tile.boxes],
        *(squares if parts is None else None, call.bias, call.residual, call.out, call.keys),
        *(None if parts is None else parts.sums, rows, n, eps, call.limit, stride),
        **shape,
        num_warps=tile.warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
        maxnreg=tile.registers,
    )
    return parts
