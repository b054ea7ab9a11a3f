"""Launch plans of decoding attention: which kernel decodes which rows, and with what grid, tile sizes and registers.

Integers alone, without Triton. A plan depends on a GPU's compute capability and its number of SMs, on the model, and on
the sizes of a pass. The bits of a row depend on the model and on the room of its cache, on nothing else here: which
kernel runs (`uses_mma`), where it splits the keys (`SPLIT`, `split_keys_for`, LATE_SPLITS), and the order of its sums.

| kernel            | file                | rows                                                           |
|-------------------|---------------------|----------------------------------------------------------------|
| `_decode_kernel`  | decode/portable.py  | all, where `uses_mma` is false                                 |
| `fragment_kernel` | decode/mma.py       | at positions before LATE_FROM; a CTA has one split             |
| `batch_kernel`    | decode/mma_batch.py | the same rows; a CTA has several splits                        |
| `shares_kernel`   | decode/tma_sm90.py  | at LATE_FROM and later; `gather_kernel` combines their splits  |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastspec.kernels.gpu import Gpu
from fastspec.shapes import EARLY_BLOCKS, KEY_BLOCK

# What the kernels have under the names in brackets; test_plan.py holds them together
ROW_GROUP = 8  # query rows that tiles of decode/mma.py are made of [EIGHT]
PARTS = 4  # parts of a split of decode/mma.py, each with a softmax of its own [PARTS]
SPLIT = PARTS * 32  # keys of a split of decode/mma.py [PARTS * KEYS]
TMA_TILE_ROWS = 64  # query rows of a tile of decode/tma_sm90.py [ROWS]
TMA_WARPS = 4  # of its CTA that multiply [WARPS]
GATHER_WARPS = 4  # of a CTA of combine.py [GATHER_WARPS]
FAN = 16  # partial sums that `_decode_kernel` combines at a time [FAN]

# of a thread, of eight warps at most: an SM has no more. Without this limit the assembler spills to keep one more CTA
MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class Pass:
    """Sizes of a decoding pass.

    Attributes:
        num_rows: query rows of one kv head, Q * H / Hkv.
        pairs: (row of the batch, kv head), B * Hkv of them.
        dim: of a head.
    """

    num_rows: int
    pairs: int
    dim: int


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """One launch of the kernel of that name; `constants` are its constexpr arguments, `options` those of the launch."""

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
    """a / b, rounded up."""
    return -(-a // b)


def padded_dim(dim: int) -> int:
    """head_dim as tiles have it: a power of two, 16 or more."""
    return max(16, 1 << (dim - 1).bit_length())


# --- which kernel ---

MMA_DIMS = (64, 128)  # head_dim that decode/mma.py and decode/tma_sm90.py are used for
# position: rows at this one and later ones are decoded by decode/tma_sm90.py. A block after 4096, so that with
# max_length 4096 the drafts of a last step are early, too
LATE_FROM = EARLY_BLOCKS * KEY_BLOCK


def uses_tma(gpu: Gpu, page_size: int) -> bool:
    """Whether decode/tma_sm90.py can read a cache: with wgmma, and 8 keys or more of a page to each TMA copy."""
    return page_size % 8 == 0 and gpu.hopper


def uses_mma(
    gpu: Gpu, itemsize: int, dim: int, page_size: int, capacity: int, cached: int | None = None
) -> bool:  # fmt: skip
    """Whether a model's decoding passes run by the kernels for tensor cores; else `_decode_kernel` has all rows.

    Args:
        gpu: the device.
        itemsize: bytes of an element of queries.
        dim: of a head.
        page_size: of the cache.
        capacity: positions that a row of the cache has room for. Where some lie at LATE_FROM or later, `uses_tma` must
            hold, for no other kernel decodes those.
        cached: bytes of an element of K and V, 1 or as many as `itemsize`; None: as many.
    """
    fits = itemsize == 2 and dim in MMA_DIMS and gpu.pdl
    return fits and (capacity <= LATE_FROM or uses_tma(gpu, page_size))


def described(
    gpu: Gpu, itemsize: int, dim: int, page_size: int, capacity: int, cached: int | None = None
) -> str:  # fmt: skip
    """Which kernels decode, and where it is the portable one why; arguments as of `uses_mma`."""
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

# (first position, keys of a split from there on): whole splits of whole blocks, 128 keys, up to the next position.
# The bits of a late row depend on all of it but not on how long a cache or a pass is
LATE_SPLITS: tuple[tuple[int, int], ...] = ((0, 128), (1024, 256), (4096, 512), (16384, 1024), (65536, 2048))


def split_sizes() -> tuple[tuple[int, int, int], ...]:
    """LATE_SPLITS as (first position, keys of a split, number of the first split)."""
    found: list[tuple[int, int, int]] = []
    for position, keys in LATE_SPLITS:
        before = found[-1] if found else (0, 1, 0)
        found.append((position, keys, before[2] + (position - before[0]) // before[1]))
    return tuple(found)


def early_splits(room: int) -> int:
    """Splits of decode/mma.py that the positions below `room` lie in."""
    return cdiv(room, SPLIT)


def late_splits(room: int) -> int:
    """Splits of decode/tma_sm90.py that the positions below `room` lie in."""
    position, keys, number = [each for each in split_sizes() if each[0] < room][-1]
    return number + cdiv(room - position, keys)


def early_and_late(begin: int, room: int) -> tuple[int, int]:
    """Splits of a pass over rows at positions begin .. room-1: (of its early rows, of its late rows); 0 for no rows."""
    early = early_splits(min(room, LATE_FROM)) if begin < LATE_FROM else 0
    return early, late_splits(room) if room > LATE_FROM else 0


def partial_sums(*splits: int) -> int:
    """Partial sums that are left of a row: as many as the most splits, none of a single one."""
    return max(each if each > 1 else 0 for each in splits)


def split_keys_for(max_positions: int, dim: int) -> int:
    """Keys of a split of `_decode_kernel` in a cache of rows of `max_positions`: never by how many are in use."""
    if max_positions <= 4096:
        return 64 if padded_dim(dim) == 256 else 128
    return 256 if max_positions <= 8192 else 512


def work_sizes(max_rows: int, max_positions: int, heads: tuple[int, int, int]) -> tuple[int, int]:
    """Elements of (counters, partial sums) that are enough for every decoding pass, by whichever kernel.

    Args:
        max_rows: B * Q of the largest pass.
        max_positions: that the block table has room for.
        heads: (query heads, kv heads, head_dim).
    """
    num_heads, kv_heads, dim = heads
    room = cdiv(max_positions, KEY_BLOCK) * KEY_BLOCK
    splits = cdiv(room, split_keys_for(max_positions, dim))
    groups = cdiv(splits, FAN)
    tiles = max_rows * kv_heads * cdiv(num_heads // kv_heads, ROW_GROUP)  # no tile has fewer rows
    sums = splits + groups if splits > 1 else 0
    sums = max(sums, partial_sums(*early_and_late(0, room)))
    return tiles * (1 + groups), max_rows * num_heads * sums * (dim + 1)


# --- `_decode_kernel` ---

# by (element size, padded head_dim); never by the number of rows
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
EARLY = {(2, 256)}  # tiles of kernels that read positions, writes and the table before their wait


def tiles_plan(sizes: Pass, itemsize: int, splits: int) -> LaunchPlan:
    """The launch of `_decode_kernel`."""
    block_d = padded_dim(sizes.dim)
    tile = TILES[itemsize, block_d]
    constants = {"HEAD_DIM": sizes.dim, "BLOCK_D": block_d}
    constants |= {"ROWS": tile.rows, "BLOCK_N": tile.block_n, "STAGES": tile.num_stages}
    constants["EARLY"] = (itemsize, block_d) in EARLY
    options = {"num_warps": tile.num_warps, "maxnreg": MAX_REGISTERS}
    return LaunchPlan("_decode_kernel", (sizes.pairs * cdiv(sizes.num_rows, tile.rows), splits), constants, options)


# --- decode/mma.py and decode/mma_batch.py ---

# by head_dim: registers of a thread, and CTAs that run on one SM with as many
MMA_REGISTERS, CTAS_PER_SM = {64: 168, 128: MAX_REGISTERS}, {64: 3, 128: 2}
MAX_ROW_GROUPS = 4  # of 8 query rows in a tile
# (capability, SMs) of a GPU, by head_dim: up to so many groups of 8 rows in a whole pass, a tile has one group.
# Timed on H100 and H200; other GPUs: half their SMs, not timed
MAX_SINGLE_GROUPS = {((9, 0), 132): {64: 64, 128: 63}}
# splits that a CTA that owns its SM reads concurrently, each by warps of its own: fewer CTAs leave sums to be combined,
# and where one has all splits of a tile, none does
CONCURRENT_SPLITS = 2


def max_ctas_alone(gpu: Gpu) -> int:
    """Up to so many CTAs have two warps for each part of a split, and an SM to themselves.

    With fewer threads, what starts early on the same SM slows them down.
    """
    return gpu.sms // 2


def early_plan(gpu: Gpu, sizes: Pass, splits: int, narrow: bool = False) -> LaunchPlan:
    """The launch of `fragment_kernel` or `batch_kernel`, which give a row the same bits.

    Args:
        gpu: the device.
        sizes: of the pass.
        splits: that the pass has room for.
        narrow: K and V are in 8 bits, which `batch_kernel` alone reads, be it a split to a CTA.
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
    """Groups of 8 rows in a tile, at most `max_groups`: tiles of about the same size."""
    groups = cdiv(num_rows, ROW_GROUP)
    return cdiv(groups, cdiv(groups, max_groups))


def tile_groups(gpu: Gpu, sizes: Pass) -> int:
    """Groups of 8 query rows in a tile, for which K and V are read once.

    As few of 2 .. MAX_ROW_GROUPS as leave no more tiles than SMs, or MAX_ROW_GROUPS; tiles of about the same size.
    """
    groups = cdiv(sizes.num_rows, ROW_GROUP)
    single = MAX_SINGLE_GROUPS.get((gpu.capability, gpu.sms), {}).get(sizes.dim, gpu.sms // 2)
    if groups == 1 or sizes.pairs * groups <= single:
        return 1
    enough = (each for each in range(2, MAX_ROW_GROUPS + 1) if sizes.pairs * cdiv(groups, each) <= gpu.sms)
    return next(enough, even_groups(sizes.num_rows, MAX_ROW_GROUPS))


def reads_concurrently(gpu: Gpu, dim: int, tiles: int, groups: int, splits: int) -> bool:
    """Whether CTAs read CONCURRENT_SPLITS splits concurrently, each CTA on an SM of its own.

    They do where one then has all splits of a tile, or where as many warps run otherwise, too. Not CTAs of few tiles
    of one group, which are faster with more CTAs. Nor where there is room for CONCURRENT_SPLITS splits alone: what they
    gain with all of them they lose with the first.
    """
    as_many_warps = groups > 1 and CTAS_PER_SM[dim] <= CONCURRENT_SPLITS
    return splits > CONCURRENT_SPLITS and tiles <= gpu.sms and (as_many_warps or tiles > gpu.sms // 2)


def ctas_of_early_tile(gpu: Gpu, dim: int, tiles: int, splits: int, concurrent: bool) -> int:
    """CTAs that share the splits of a tile, so that all CTAs run at a time; 0: each split has a CTA of its own.

    Args:
        gpu: the device.
        dim: of a head.
        tiles: of the pass.
        splits: that the pass has room for.
        concurrent: as `reads_concurrently` returned; then there are no more tiles than SMs.
    """
    if concurrent:
        return min(cdiv(splits, CONCURRENT_SPLITS), gpu.sms // tiles)
    resident = gpu.sms * CTAS_PER_SM[dim]
    return max(1, resident // tiles) if tiles * splits > resident else 0


# --- decode/tma_sm90.py and decode/combine.py ---

TMA_TILE_KEYS = {64: 128, 128: 64}  # of a tile by head_dim; splits are whole tiles. Part of the bits as well
# (CTAs per SM, bytes of K and V in the pipeline of each): for passes of up to MAX_DEEP_TILES tiles, which have few
# splits for many CTAs, and of more, where one of two reads while the other one begins or ends
TMA_PIPELINES, MAX_DEEP_TILES = ((1, 112 * 1024), (2, 64 * 1024)), 31
# the same of K and V in 8 bits (CTAs per SM, tiles in the pipeline of each, tiles of 16 bits made of them), where one
# CTA to an SM leaves each two splits at most, and elsewhere
NARROW_PIPELINES = ((1, 8, 6), (2, 4, 4))
TMA_REGISTERS = 128  # of five warps; the one that loads leaves most of its own to the others
MAX_CTAS_PER_TILE = 8  # unless there are too few tiles for the device
CTA_OVERHEAD = 0.02  # of the time for a tile's keys: what a CTA takes before and after its part of them
GATHER_REGISTERS = 255  # of warps that load two sets of partial sums at a time


def ctas_of_late_tile(tiles: int, resident: int) -> int:
    """CTAs that share the splits of a tile, by how many times the device fills with `resident` CTAs."""
    max_ctas = max(resident // tiles, MAX_CTAS_PER_TILE)
    return min(range(1, max_ctas + 1), key=lambda ctas: cdiv(tiles * ctas, resident) * (1 / ctas + CTA_OVERHEAD))


def late_plan(gpu: Gpu, sizes: Pass, splits: int, narrow: bool = False) -> LaunchPlan:
    """The launch of `shares_kernel`; arguments as of `early_plan`."""
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
    """The launch of `gather_kernel` after `late_plan`."""
    constants = {"SPLIT_SIZES": split_sizes(), "LATE_FROM": LATE_FROM, "D": sizes.dim, "TILE": TMA_TILE_ROWS}
    options = {"num_warps": GATHER_WARPS, "maxnreg": GATHER_REGISTERS}
    return LaunchPlan("gather_kernel", (sizes.pairs * sizes.num_rows,), constants, options)
