"""Launch plans of decode attention: kernel, grid, tile sizes and registers.

This module computes with integers and does not import Triton. A plan depends on a GPU's compute capability and number
of SMs, on the model, and on the sizes of a pass. The bits of a row depend only on the model and the size of its cache:
through the kernel (`uses_mma`), the splits (`SPLIT`, `split_keys_for`, LATE_SPLITS), and the order of sums.

A row is *early* if its position is below LATE_FROM, else *late*: a long row.

| kernel            | file                | rows                                                           |
|-------------------|---------------------|----------------------------------------------------------------|
| `_decode_kernel`  | decode/portable.py  | all, where `uses_mma` is false                                 |
| `fragment_kernel` | decode/mma.py       | early; a CTA has one split                                     |
| `batch_kernel`    | decode/mma_batch.py | early; a CTA has several splits                                |
| `shares_kernel`   | decode/tma_sm90.py  | late; `gather_kernel` combines their splits                    |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastspec.kernels.gpu import Gpu
from fastspec.shapes import EARLY_BLOCKS, KEY_BLOCK

# constants of kernels, with their names there in brackets; test_plan.py compares them
ROW_GROUP = 8  # query rows in a group of decode/mma.py [EIGHT]
PARTS = 4  # parts of a split of decode/mma.py, each with its own softmax [PARTS]
SPLIT = PARTS * 32  # keys in a split of decode/mma.py [PARTS * KEYS]
TMA_TILE_ROWS = 64  # query rows in a tile of decode/tma_sm90.py [ROWS]
TMA_WARPS = 4  # multiplying warps of its CTA [WARPS]
GATHER_WARPS = 4  # warps in a CTA of `gather_kernel` [GATHER_WARPS]
FAN = 16  # partial sums that `_decode_kernel` combines at a time [FAN]

# the largest number of registers per thread with up to eight warps. Without this limit the assembler spills registers,
# to fit one more CTA on an SM
MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class Pass:
    """Sizes of a decode pass.

    Attributes:
        num_rows: query rows of one KV head, Q * H / Hkv.
        pairs: number of pairs (row of the batch, KV head), B * Hkv.
        dim: head_dim.
    """

    num_rows: int
    pairs: int
    dim: int


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Plan of one launch.

    Attributes:
        kernel: name of the kernel.
        grid: number of CTAs by axis.
        constants: constexpr arguments of the kernel.
        options: launch options, such as num_warps.
    """

    kernel: str
    grid: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of one launch: query rows and keys of a product, warps, pipeline stages."""

    rows: int
    block_n: int
    num_warps: int
    num_stages: int


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def padded_dim(dim: int) -> int:
    """Returns head_dim padded to a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


# --- which kernel ---

MMA_DIMS = (64, 128)  # head_dim of models that use decode/mma.py and decode/tma_sm90.py
# decode/tma_sm90.py decodes rows from this position on. It is one block more than 4096: with max_length 4096 the drafts
# of the last step are still early
LATE_FROM = EARLY_BLOCKS * KEY_BLOCK


def uses_tma(gpu: Gpu, page_size: int) -> bool:
    """True if decode/tma_sm90.py can run: the GPU has wgmma, and the page size is a multiple of 8 keys."""
    return page_size % 8 == 0 and gpu.hopper


def uses_mma(
    gpu: Gpu, itemsize: int, dim: int, page_size: int, capacity: int, cached: int | None = None
) -> bool:  # fmt: skip
    """True if the tensor-core kernels run a model's decode passes. Else `_decode_kernel` runs all rows.

    Args:
        gpu: the device.
        itemsize: bytes of an element of queries.
        dim: head_dim.
        page_size: page size of the cache.
        capacity: largest number of positions of a row. If it exceeds LATE_FROM, `uses_tma` must hold, because no other
            kernel decodes late rows.
        cached: bytes of an element of K and V, 1 or `itemsize`; None: `itemsize`.
    """
    fits = itemsize == 2 and dim in MMA_DIMS and gpu.pdl
    return fits and (capacity <= LATE_FROM or uses_tma(gpu, page_size))


def described(
    gpu: Gpu, itemsize: int, dim: int, page_size: int, capacity: int, cached: int | None = None
) -> str:  # fmt: skip
    """Names the decode kernels; for the portable one also the reason. For the arguments see `uses_mma`."""
    if uses_mma(gpu, itemsize, dim, page_size, capacity, cached):
        early = "decode_mma" if cached in (None, itemsize) else "decode_mma_batch, K and V in 8 bits"
        if capacity <= LATE_FROM:
            return f"tensor-core kernels ({early})"
        return f"tensor-core kernels ({early}, from position {LATE_FROM} on decode_tma_sm90)"
    fast = "the tensor-core kernels"
    if itemsize != 2:
        why = f"{fast} take queries of 16 bits alone"
    elif dim not in MMA_DIMS:
        why = f"head_dim is {dim}, and {fast} take {' and '.join(map(str, MMA_DIMS))}"
    elif not gpu.pdl:
        why = f"{fast} run on sm_90 and later"
    else:
        why = f"rows have room for {capacity} positions, and beyond {LATE_FROM} {fast} need sm_90 and pages of 8 n keys"
    return f"the portable kernel (decode): {why}"


# --- where keys are split ---

# (first position, keys in a split from there on). Splits are whole blocks of 128 keys and end at the next position. The
# bits of a late row depend on this table, but not on the length of a cache or a pass
LATE_SPLITS: tuple[tuple[int, int], ...] = ((0, 128), (1024, 256), (4096, 512), (16384, 1024), (65536, 2048))


def split_sizes() -> tuple[tuple[int, int, int], ...]:
    """Returns LATE_SPLITS as (first position, keys of a split, number of the first split)."""
    found: list[tuple[int, int, int]] = []
    for position, keys in LATE_SPLITS:
        before = found[-1] if found else (0, 1, 0)
        found.append((position, keys, before[2] + (position - before[0]) // before[1]))
    return tuple(found)


def early_splits(room: int) -> int:
    """Returns the number of splits of decode/mma.py in the positions below `room`."""
    return cdiv(room, SPLIT)


def late_splits(room: int) -> int:
    """Returns the number of splits of decode/tma_sm90.py in the positions below `room`."""
    position, keys, number = [each for each in split_sizes() if each[0] < room][-1]
    return number + cdiv(room - position, keys)


def early_and_late(begin: int, room: int) -> tuple[int, int]:
    """Returns the largest number of splits of (an early row, a late row) at positions begin .. room-1.

    The number is 0 if there are no such rows.
    """
    early = early_splits(min(room, LATE_FROM)) if begin < LATE_FROM else 0
    return early, late_splits(room) if room > LATE_FROM else 0


def partial_sums(*splits: int) -> int:
    """Returns the number of partial sums of a row: the largest of the given numbers of splits.

    0 if none is above 1, because one split needs no partial sum.
    """
    return max(each if each > 1 else 0 for each in splits)


def split_keys_for(max_positions: int, dim: int) -> int:
    """Returns the number of keys in a split of `_decode_kernel`.

    It depends on the largest number of positions, not on the number in use.
    """
    if max_positions <= 4096:
        return 64 if padded_dim(dim) == 256 else 128
    return 256 if max_positions <= 8192 else 512


def work_sizes(max_rows: int, max_positions: int, heads: tuple[int, int, int]) -> tuple[int, int]:
    """Returns the number of elements of (counters, partial sums) that are enough for every decode pass with any kernel.

    Args:
        max_rows: B * Q of the largest pass.
        max_positions: largest number of positions of a row in the block table.
        heads: (query heads, KV heads, head_dim).
    """
    num_heads, kv_heads, dim = heads
    room = cdiv(max_positions, KEY_BLOCK) * KEY_BLOCK
    splits = cdiv(room, split_keys_for(max_positions, dim))
    groups = cdiv(splits, FAN)
    tiles = max_rows * kv_heads * cdiv(num_heads // kv_heads, ROW_GROUP)  # the smallest tile has ROW_GROUP rows
    sums = splits + groups if splits > 1 else 0
    sums = max(sums, partial_sums(*early_and_late(0, room)))
    return tiles * (1 + groups), max_rows * num_heads * sums * (dim + 1)


# --- `_decode_kernel` ---

# by (element size, padded head_dim); they must not depend on the number of rows
TILES = {
    (2, 16): Tiles(32, 64, 4, 3),
    (2, 32): Tiles(32, 64, 4, 3),
    (2, 64): Tiles(32, 64, 4, 3),
    (2, 128): Tiles(32, 64, 4, 3),
    (2, 256): Tiles(16, 64, 8, 1),
    (2, 512): Tiles(16, 32, 8, 2),
    (4, 16): Tiles(32, 16, 4, 1),
    (4, 32): Tiles(32, 16, 4, 1),
    (4, 64): Tiles(32, 16, 4, 1),
    (4, 128): Tiles(16, 16, 8, 1),
    (4, 256): Tiles(16, 16, 8, 1),
    (4, 512): Tiles(16, 16, 8, 1),
}
EARLY = {(2, 256)}  # tiles with which the kernel uses positions, write mask and table that it reads before its wait


def tiles_plan(sizes: Pass, itemsize: int, splits: int) -> LaunchPlan:
    """Plans the launch of `_decode_kernel`."""
    block_d = padded_dim(sizes.dim)
    tile = TILES[itemsize, block_d]
    constants = {"HEAD_DIM": sizes.dim, "BLOCK_D": block_d}
    constants |= {"ROWS": tile.rows, "BLOCK_N": tile.block_n, "STAGES": tile.num_stages}
    constants["EARLY"] = (itemsize, block_d) in EARLY
    options = {"num_warps": tile.num_warps, "maxnreg": MAX_REGISTERS}
    return LaunchPlan("_decode_kernel", (sizes.pairs * cdiv(sizes.num_rows, tile.rows), splits), constants, options)


# --- decode/mma.py and decode/mma_batch.py ---

# by head_dim: registers per thread, and CTAs per SM with this number
MMA_REGISTERS, CTAS_PER_SM = {64: 168, 128: MAX_REGISTERS}, {64: 3, 128: 2}
MAX_ROW_GROUPS = 4  # groups of 8 query rows in a tile
# (capability, SMs) of a GPU, by head_dim: a pass of up to this many groups of 8 rows has tiles of one group. Measured
# on H100 and H200. Other GPUs use half their number of SMs, which is not measured
MAX_SINGLE_GROUPS = {((9, 0), 132): {64: 64, 128: 63}}
# splits that a CTA with its own SM reads at a time, each by its own warps. With fewer CTAs there are fewer partial sums
# to combine, and none if one CTA has all splits of a tile
CONCURRENT_SPLITS = 2


def max_ctas_alone(gpu: Gpu) -> int:
    """Returns the largest number of CTAs that have two warps per part of a split, and an SM of their own.

    With fewer threads, the next kernel's early CTAs on the same SM would slow them down.
    """
    return gpu.sms // 2


def early_plan(gpu: Gpu, sizes: Pass, splits: int, narrow: bool = False) -> LaunchPlan:
    """Plans the launch of `fragment_kernel` or `batch_kernel`. Both give a row the same bits.

    Args:
        gpu: the device.
        sizes: sizes of the pass.
        splits: number of splits of the longest row of the pass.
        narrow: True if K and V have 8 bits. Only `batch_kernel` reads these, even with one split per CTA.
    """
    groups = tile_groups(gpu, sizes)
    tiles = sizes.pairs * cdiv(cdiv(sizes.num_rows, ROW_GROUP), groups)
    constants = {"D": sizes.dim, "G": groups, "S": PARTS}
    concurrent = reads_concurrently(gpu, sizes.dim, tiles, groups, splits)
    ctas = ctas_of_early_tile(gpu, sizes.dim, tiles, splits, concurrent)
    at_once, registers = (CONCURRENT_SPLITS, MAX_REGISTERS) if concurrent else (1, MMA_REGISTERS[sizes.dim])
    options = {"num_warps": at_once * PARTS, "maxnreg": registers}
    if ctas or narrow:
        return LaunchPlan("batch_kernel", (tiles, ctas or splits), {**constants, "AT_ONCE": at_once}, options)
    if tiles * splits <= max_ctas_alone(gpu):
        options = {"num_warps": 2 * PARTS, "maxnreg": MAX_REGISTERS}
    return LaunchPlan("fragment_kernel", (tiles, splits), constants, options)


def even_groups(num_rows: int, max_groups: int) -> int:
    """Returns the number of groups of 8 rows in a tile, at most `max_groups`. Tiles then have about the same size."""
    groups = cdiv(num_rows, ROW_GROUP)
    return cdiv(groups, cdiv(groups, max_groups))


def tile_groups(gpu: Gpu, sizes: Pass) -> int:
    """Returns the number of groups of 8 query rows in a tile. A tile reads K and V once.

    It is 1 for small passes. Else it is the least of 2 .. MAX_ROW_GROUPS with no more tiles than SMs, or MAX_ROW_GROUPS
    with tiles of about the same size.
    """
    groups = cdiv(sizes.num_rows, ROW_GROUP)
    single = MAX_SINGLE_GROUPS.get((gpu.capability, gpu.sms), {}).get(sizes.dim, gpu.sms // 2)
    if groups == 1 or sizes.pairs * groups <= single:
        return 1
    enough = (each for each in range(2, MAX_ROW_GROUPS + 1) if sizes.pairs * cdiv(groups, each) <= gpu.sms)
    return next(enough, even_groups(sizes.num_rows, MAX_ROW_GROUPS))


def reads_concurrently(gpu: Gpu, dim: int, tiles: int, groups: int, splits: int) -> bool:
    """True if a CTA reads CONCURRENT_SPLITS splits at a time, on an SM of its own.

    True if one CTA then has all splits of a tile, or if the number of warps stays the same. False for few tiles of one
    group, because they are faster with more CTAs. False if there are at most CONCURRENT_SPLITS splits.
    """
    as_many_warps = groups > 1 and CTAS_PER_SM[dim] <= CONCURRENT_SPLITS
    return splits > CONCURRENT_SPLITS and tiles <= gpu.sms and (as_many_warps or tiles > gpu.sms // 2)


def ctas_of_early_tile(gpu: Gpu, dim: int, tiles: int, splits: int, concurrent: bool) -> int:
    """Returns the number of CTAs that share the splits of a tile, so that all CTAs run at once. 0: one CTA per split.

    Args:
        gpu: the device.
        dim: head_dim.
        tiles: number of tiles of the pass.
        splits: number of splits of the longest row of the pass.
        concurrent: result of `reads_concurrently`. If True, there are no more tiles than SMs.
    """
    if concurrent:
        return min(cdiv(splits, CONCURRENT_SPLITS), gpu.sms // tiles)
    resident = gpu.sms * CTAS_PER_SM[dim]
    return max(1, resident // tiles) if tiles * splits > resident else 0


# --- decode/tma_sm90.py and decode/combine.py ---

# keys in a tile, by head_dim; splits are whole tiles. The bits of a row depend on it
TMA_TILE_KEYS = {64: 128, 128: 64}
# (CTAs per SM, bytes of K and V in the pipeline of each). First entry: up to MAX_DEEP_TILES tiles, which have few
# splits for many CTAs. Second entry: more tiles; of two CTAs on an SM one reads while the other begins or ends
TMA_PIPELINES, MAX_DEEP_TILES = ((1, 112 * 1024), (2, 64 * 1024)), 31
# for 8-bit K and V (CTAs per SM, tiles in the pipeline of each, converted 16-bit tiles). First entry: if one CTA per SM
# has at most two splits. Second entry: all other passes
NARROW_PIPELINES = ((1, 8, 6), (2, 4, 4))
TMA_REGISTERS = 128  # per thread of five warps; the loading warp gives most of its own to the others
MAX_CTAS_PER_TILE = 8  # a tile has more CTAs only if the tiles are too few to fill the device
CTA_OVERHEAD = 0.02  # time of start and end of a CTA, as a fraction of the time for a tile's keys
GATHER_REGISTERS = 255  # per thread: a warp holds two sets of partial sums


def ctas_of_late_tile(tiles: int, resident: int) -> int:
    """Returns the number of CTAs that share the splits of a tile, if `resident` CTAs run at a time.

    It minimises the number of waves times the time of a CTA.
    """
    max_ctas = max(resident // tiles, MAX_CTAS_PER_TILE)
    return min(range(1, max_ctas + 1), key=lambda ctas: cdiv(tiles * ctas, resident) * (1 / ctas + CTA_OVERHEAD))


def late_plan(gpu: Gpu, sizes: Pass, splits: int, narrow: bool = False) -> LaunchPlan:
    """Plans the launch of `shares_kernel`. For the arguments see `early_plan`."""
    tiles = sizes.pairs * cdiv(sizes.num_rows, TMA_TILE_ROWS)
    keys = TMA_TILE_KEYS[sizes.dim]
    ctas_per_sm, pipeline = TMA_PIPELINES[tiles > MAX_DEEP_TILES]
    constants = {"SPLIT_SIZES": split_sizes(), "LATE_FROM": LATE_FROM, "D": sizes.dim}
    constants |= {"KEYS": keys, "STAGES": (pipeline // (keys * sizes.dim * 2), 0)}
    if narrow:
        ctas_per_sm, *stages = NARROW_PIPELINES[tiles * splits > 2 * gpu.sms]
        constants |= {"STAGES": tuple(stages)}
    grid = tiles, min(splits, ctas_of_late_tile(tiles, ctas_per_sm * gpu.sms))
    return LaunchPlan("shares_kernel", grid, constants, {"num_warps": TMA_WARPS, "maxnreg": TMA_REGISTERS})


def gather_plan(sizes: Pass) -> LaunchPlan:
    """Plans the launch of `gather_kernel` after `late_plan`."""
    constants = {"SPLIT_SIZES": split_sizes(), "LATE_FROM": LATE_FROM, "D": sizes.dim, "TILE": TMA_TILE_ROWS}
    options = {"num_warps": GATHER_WARPS, "maxnreg": GATHER_REGISTERS}
    return LaunchPlan("gather_kernel", (sizes.pairs * sizes.num_rows,), constants, options)
