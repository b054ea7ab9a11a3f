"""Launch plans of attention: kernel, grid, tile sizes and registers.

This module computes with integers and does not import Triton. A plan depends on a GPU's compute capability and number
of SMs, on the model, and on the sizes of a pass. The bits of a row depend only on the model and the size of its cache:
through the kernel (`uses_mma`), the splits (`SPLIT`, `split_keys_for`, LATE_SPLITS), and the order of sums.

A *split* is a range of a row's keys that one CTA attends to at a time (split-K decoding, Flash-Decoding). A *query row*
of a KV head is one of its Q * H / Hkv pairs of new token and query head. A row is *early* if its position is below
LATE_FROM, else *late*.

| kernel            | file                | rows                                                           |
|-------------------|---------------------|----------------------------------------------------------------|
| `_decode_kernel`  | decode/portable.py  | all, where `uses_mma` is false                                 |
| `fragment_kernel` | decode/mma.py       | early; each CTA has one split                                  |
| `batch_kernel`    | decode/mma_batch.py | early; each CTA has several splits                             |
| `shares_kernel`   | decode/tma_sm90.py  | late; `gather_kernel` combines their splits                    |
| `chunk_kernel`    | prefill_sm90.py     | those of prompts, where `uses_chunks` is true                  |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastspec.kernels.gpu import Gpu
from fastspec.shapes import EARLY_BLOCKS, KEY_BLOCK

# constants of kernels, with their names there in brackets; test_plan.py compares them
ROW_GROUP = 8  # query rows in a group of decode/mma.py [EIGHT]
PARTS = 4  # parts of a split of decode/mma.py, each with an online softmax of its own [PARTS]
SPLIT = PARTS * 32  # keys in a split of decode/mma.py [PARTS * KEYS]
TMA_TILE_ROWS = 64  # query rows in a tile of decode/tma_sm90.py [ROWS]
TMA_WARPS = 4  # warps of a CTA of decode/tma_sm90.py that multiply [WARPS]
GATHER_WARPS = 4  # warps in a CTA of `gather_kernel` [GATHER_WARPS]
FAN = 16  # partial sums that `_decode_kernel` combines at a time [FAN]

# the largest number of registers per thread with up to eight warps. Without this limit the assembler spills registers,
# to fit one more CTA on an SM
MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class Pass:
    """Sizes of the attention of a decode pass: B sequences, Q tokens each, H query heads, Hkv KV heads.

    Attributes:
        num_rows: number of query vectors that share one KV head of one sequence, Q * H / Hkv.
        pairs: number of pairs (sequence, KV head), B * Hkv.
        dim: number of elements of a query or key vector, head_dim.
    """

    num_rows: int
    pairs: int
    dim: int


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Parameters of one kernel launch.

    Attributes:
        kernel: name of the kernel.
        grid: number of CTAs along each axis of the grid.
        constants: constexpr arguments of the kernel, by name.
        options: launch options, such as num_warps, by name.
    """

    kernel: str
    grid: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of one launch of an attention kernel.

    Attributes:
        rows: number of query rows in a tile.
        block_n: number of keys in a tile.
        num_warps: warps of a CTA.
        num_stages: stages of the software pipeline that loads keys and values.
    """

    rows: int
    block_n: int
    num_warps: int
    num_stages: int


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up to an integer."""
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


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """Launch of prefill_sm90.py.

    Attributes:
        groups: groups of four warps, each with CHUNK_ROWS query tokens.
        keys: keys in a tile. A token's bits depend on it.
        stages: tiles of K or V in shared memory.
        registers: mean number of registers of a thread.
    """

    groups: int
    keys: int
    stages: int
    registers: int


CHUNK_ROWS = 64  # query tokens of a group of warps [ROWS]
# by head_dim: a launch of two groups, and one of one group, of which two CTAs fit on an SM if head_dim is below 256
CHUNK_TILES = {
    64: (ChunkTile(2, 128, 8, 168), ChunkTile(1, 128, 4, 128)),
    128: (ChunkTile(2, 128, 4, 168), ChunkTile(1, 128, 2, 128)),
    256: (ChunkTile(2, 64, 4, 168), ChunkTile(1, 64, 4, 240)),
}


def chunk_tile(gpu: Gpu, dim: int, heads: int, num_queries: int) -> ChunkTile:
    """Selects the launch of prefill_sm90.py: one group where two would leave SMs idle, or have half a tile of padding.

    Args:
        gpu: the device.
        dim: head_dim.
        heads: number of batch rows times number of query heads.
        num_queries: number of query tokens of one batch row.
    """
    large, small = CHUNK_TILES[dim]
    few = num_queries <= CHUNK_ROWS or heads * cdiv(num_queries, 2 * CHUNK_ROWS) < gpu.sms
    return small if few else large


def uses_chunks(gpu: Gpu, itemsize: int, dim: int, page_size: int, converted: bool) -> bool:
    """True if prefill_sm90.py runs the prompts of a model. For the arguments see `uses_mma`.

    converted: True for an 8-bit cache.
    """
    return itemsize == 2 and dim in CHUNK_TILES and not converted and uses_tma(gpu, page_size)


def uses_mma(
    gpu: Gpu, itemsize: int, dim: int, page_size: int, capacity: int, cached: int | None = None
) -> bool:  # fmt: skip
    """True if a model's decode passes run the tensor-core attention kernels. Otherwise `_decode_kernel` runs all rows.

    Args:
        gpu: the device.
        itemsize: bytes of an element of queries.
        dim: head_dim.
        page_size: page size of the cache.
        capacity: largest number of positions of a row. If it exceeds LATE_FROM, `uses_tma` must be True, because no
            other tensor-core kernel decodes positions from LATE_FROM on.
        cached: bytes of an element of K and V in the cache, 1 or `itemsize`. None: `itemsize`.
    """
    fits = itemsize == 2 and dim in MMA_DIMS and gpu.pdl
    return fits and (capacity <= LATE_FROM or uses_tma(gpu, page_size))


def described(
    gpu: Gpu, itemsize: int, dim: int, page_size: int, capacity: int, cached: int | None = None
) -> str:  # fmt: skip
    """Names the attention kernels of decode passes in a sentence. For the portable kernel it adds the reason.

    For the arguments see `uses_mma`.
    """
    if uses_mma(gpu, itemsize, dim, page_size, capacity, cached):
        early = "decode_mma" if cached in (None, itemsize) else "decode_mma_batch, K and V in 8 bits"
        if capacity <= LATE_FROM:
            return f"tensor-core kernels ({early})"
        return f"tensor-core kernels ({early}, from position {LATE_FROM} on decode_tma_sm90)"
    fast = "the tensor-core kernels"
    if itemsize != 2:
        why = f"{fast} take only queries of 16 bits"
    elif dim not in MMA_DIMS:
        why = f"head_dim is {dim}, and {fast} take {' and '.join(map(str, MMA_DIMS))}"
    elif not gpu.pdl:
        why = f"{fast} run on sm_90 and later"
    else:
        why = f"rows have room for {capacity} positions, and beyond {LATE_FROM} {fast} need sm_90 and pages of 8 n keys"
    return f"the portable kernel (decode): {why}"


# --- where keys are split ---

# (position, number of keys in a split from there on). Splits are whole blocks of 128 keys, and none extends over the
# next position of the table. The bits of a late row depend on this table, but not on the size of a cache or a pass
LATE_SPLITS: tuple[tuple[int, int], ...] = ((0, 128), (1024, 256), (4096, 512), (16384, 1024), (65536, 2048))


def split_sizes() -> tuple[tuple[int, int, int], ...]:
    """Returns the sizes of the splits of late rows, one entry for each row of the table LATE_SPLITS.

    An entry is (position, number of keys in a split from this position on, index of the first of these splits).
    """
    found: list[tuple[int, int, int]] = []
    for position, keys in LATE_SPLITS:
        before = found[-1] if found else (0, 1, 0)
        found.append((position, keys, before[2] + (position - before[0]) // before[1]))
    return tuple(found)


def early_splits(room: int) -> int:
    """Returns the number of splits that cover the positions below `room` in an early row."""
    return cdiv(room, SPLIT)


def late_splits(room: int) -> int:
    """Returns the number of splits that cover the positions below `room` in a late row. `room` is at least 1."""
    position, keys, number = [each for each in split_sizes() if each[0] < room][-1]
    return number + cdiv(room - position, keys)


def early_and_late(begin: int, room: int) -> tuple[int, int]:
    """Returns the largest number of splits of an early row, and that of a late row, in a decode pass.

    The rows are at positions begin .. room - 1. A number is 0 if the pass can have no such row.
    """
    early = early_splits(min(room, LATE_FROM)) if begin < LATE_FROM else 0
    return early, late_splits(room) if room > LATE_FROM else 0


def partial_sums(*splits: int) -> int:
    """Returns the number of partial results for which a row needs memory.

    A row with one split needs none.

    Args:
        splits: number of splits of the row in each kernel that a pass launches.
    """
    return max(each if each > 1 else 0 for each in splits)


def split_keys_for(max_positions: int, dim: int) -> int:
    """Returns the number of keys in a split of `_decode_kernel`.

    It depends on head_dim `dim`, and on the largest number of positions that a row may have, not on the number in use.
    """
    if max_positions <= 4096:
        return 64 if padded_dim(dim) == 256 else 128
    return 256 if max_positions <= 8192 else 512


def work_sizes(max_rows: int, max_positions: int, heads: tuple[int, int, int]) -> tuple[int, int]:
    """Returns the sizes of scratch memory that are enough for every decode pass and kernel.

    Args:
        max_rows: B * Q of the largest pass.
        max_positions: largest number of positions of a batch row in the block table.
        heads: (number of query heads, number of KV heads, head_dim).

    Returns:
        The number of int32 counters, and the number of fp32 elements for partial results.
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
    """Plans the launch of `_decode_kernel`.

    Args:
        sizes: sizes of the pass.
        itemsize: bytes of an element of queries.
        splits: number of splits of the longest row of the pass.
    """
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
# largest number of groups of 8 query rows in a pass whose tiles have one group, by (capability, SMs) of the GPU, and by
# head_dim. Measured on H100 and H200. Other GPUs use half their number of SMs, which is not measured
MAX_SINGLE_GROUPS = {((9, 0), 132): {64: 64, 128: 63}}
# number of splits that a CTA with its own SM reads at a time, each by warps of its own. With fewer CTAs there are fewer
# partial results to combine, and none if one CTA has all splits of a tile
CONCURRENT_SPLITS = 2


def max_ctas_alone(gpu: Gpu) -> int:
    """Returns the largest number of CTAs with which a `fragment_kernel` launch has two warps for each part of a split.

    With so few CTAs, each has an SM of its own. CTAs of the next kernel start early on the same SM. With one warp for
    each part, they would slow these CTAs down.
    """
    return gpu.sms // 2


def early_plan(gpu: Gpu, sizes: Pass, splits: int, narrow: bool = False) -> LaunchPlan:
    """Plans the launch that computes early rows: `fragment_kernel` or `batch_kernel`. Both give a row the same bits.

    Args:
        gpu: the device.
        sizes: sizes of the pass.
        splits: number of splits of the longest early row of the pass.
        narrow: True if the cache has 8 bits. Then the kernel is `batch_kernel`, because `fragment_kernel` cannot read
            such a cache.
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
    """Returns the number of groups of 8 query rows in a tile, at most `max_groups`, that makes tiles about equal.

    `num_rows` is the number of query rows of one KV head.
    """
    groups = cdiv(num_rows, ROW_GROUP)
    return cdiv(groups, cdiv(groups, max_groups))


def tile_groups(gpu: Gpu, sizes: Pass) -> int:
    """Returns the number of groups of 8 query rows in a tile of `fragment_kernel` or `batch_kernel`.

    Each tile reads K and V once. The number is 1 for small passes. Otherwise it is the smallest of 2 .. MAX_ROW_GROUPS
    that gives no more tiles than the GPU has SMs. If there is none, it is the result of `even_groups` for
    MAX_ROW_GROUPS.
    """
    groups = cdiv(sizes.num_rows, ROW_GROUP)
    single = MAX_SINGLE_GROUPS.get((gpu.capability, gpu.sms), {}).get(sizes.dim, gpu.sms // 2)
    if groups == 1 or sizes.pairs * groups <= single:
        return 1
    enough = (each for each in range(2, MAX_ROW_GROUPS + 1) if sizes.pairs * cdiv(groups, each) <= gpu.sms)
    return next(enough, even_groups(sizes.num_rows, MAX_ROW_GROUPS))


def reads_concurrently(gpu: Gpu, dim: int, tiles: int, groups: int, splits: int) -> bool:
    """True if each CTA of `batch_kernel` is to have an SM of its own and to read CONCURRENT_SPLITS splits at a time.

    False if there are more tiles than SMs, or at most CONCURRENT_SPLITS splits. Otherwise True in two cases: if one CTA
    then has all splits of a tile, or if an SM then has as many warps as without it. Few tiles of one group are faster
    with more CTAs.

    Args:
        gpu: the device.
        dim: head_dim.
        tiles: number of tiles of the pass.
        groups: number of groups of 8 query rows in a tile.
        splits: number of splits of the longest row of the pass.
    """
    as_many_warps = groups > 1 and CTAS_PER_SM[dim] <= CONCURRENT_SPLITS
    return splits > CONCURRENT_SPLITS and tiles <= gpu.sms and (as_many_warps or tiles > gpu.sms // 2)


def ctas_of_early_tile(gpu: Gpu, dim: int, tiles: int, splits: int, concurrent: bool) -> int:
    """Returns the number of CTAs of `batch_kernel` that divide the splits of a tile, so that all CTAs run at once.

    Returns 0 if each split can have a CTA of its own.

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

# number of keys in a tile, by head_dim; splits are whole tiles. The bits of a row depend on it
TMA_TILE_KEYS = {64: 128, 128: 64}
# (CTAs per SM, bytes of K and V in the pipeline of each). First entry: for up to MAX_DEEP_TILES tiles, whose CTAs have
# few splits each. Second entry: for more tiles; of two CTAs on an SM, one reads while the other begins or ends
TMA_PIPELINES, MAX_DEEP_TILES = ((1, 112 * 1024), (2, 64 * 1024)), 31
# the same for 8-bit K and V: (CTAs per SM, tiles in the pipeline of each, tiles that are converted to 16 bits). First
# entry: if tiles have at most two splits per SM in all. Second entry: for other passes
NARROW_PIPELINES = ((1, 8, 6), (2, 4, 4))
TMA_REGISTERS = 128  # per thread of the five warps; the warp that loads gives most of its registers to the others
MAX_CTAS_PER_TILE = 8  # a tile has more CTAs only if the tiles are too few to fill the device
CTA_OVERHEAD = 0.02  # time of start and end of a CTA, as a fraction of the time for a tile's keys
GATHER_REGISTERS = 255  # per thread: a warp holds two sets of partial results


def ctas_of_late_tile(tiles: int, resident: int) -> int:
    """Returns the number of CTAs of `shares_kernel` that divide the splits of a query tile.

    It minimises the number of waves of CTAs times the time of one CTA.

    Args:
        tiles: number of query tiles of the pass.
        resident: number of CTAs that run on the GPU at a time.
    """
    max_ctas = max(resident // tiles, MAX_CTAS_PER_TILE)
    return min(range(1, max_ctas + 1), key=lambda ctas: cdiv(tiles * ctas, resident) * (1 / ctas + CTA_OVERHEAD))


def late_plan(gpu: Gpu, sizes: Pass, splits: int, narrow: bool = False) -> LaunchPlan:
    """Plans the launch of `shares_kernel`, which computes late rows.

    Args:
        gpu: the device.
        sizes: sizes of the pass.
        splits: number of splits of the longest row of the pass.
        narrow: True if the cache has 8 bits.
    """
    tiles = sizes.pairs * cdiv(sizes.num_rows, TMA_TILE_ROWS)
    keys = TMA_TILE_KEYS[sizes.dim]
    ctas_per_sm, pipeline = TMA_PIPELINES[tiles > MAX_DEEP_TILES]
    constants = {"SPLIT_SIZES": split_sizes(), "LATE_FROM": LATE_FROM, "D": sizes.dim}
    constants |= {"KEYS": keys, "STAGES": pipeline // (keys * sizes.dim * 2), "CONVERTED": 0}
    if narrow:
        ctas_per_sm, stages, converted = NARROW_PIPELINES[tiles * splits > 2 * gpu.sms]
        constants |= {"STAGES": stages, "CONVERTED": converted}
    grid = tiles, min(splits, ctas_of_late_tile(tiles, ctas_per_sm * gpu.sms))
    return LaunchPlan("shares_kernel", grid, constants, {"num_warps": TMA_WARPS, "maxnreg": TMA_REGISTERS})


def gather_plan(sizes: Pass) -> LaunchPlan:
    """Plans the launch of `gather_kernel`, which combines the partial results of `shares_kernel`."""
    constants = {"SPLIT_SIZES": split_sizes(), "LATE_FROM": LATE_FROM, "D": sizes.dim, "TILE": TMA_TILE_ROWS}
    options = {"num_warps": GATHER_WARPS, "maxnreg": GATHER_REGISTERS}
    return LaunchPlan("gather_kernel", (sizes.pairs * sizes.num_rows,), constants, options)
