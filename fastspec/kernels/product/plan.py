"""Launch configurations of products x W^T with packed weights: the split of K, and tile sizes for each number of rows.

This module needs neither Triton nor a GPU; launch.py uses its results. `MEASURED_ON` names the GPU on which
a kernel's tiles were chosen by measurement: in bf16, for the shapes of Llama 3.1 8B and 3.2 1B, with weights that were
not in the L2 cache. Other shapes use the defaults. On other GPUs results are correct, but tiles are guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastspec.kernels.gpu import Gpu

# numbers of rows of x
FUSED_ROWS = 8  # largest number for which the product computes the norm itself; with more another kernel does
# largest number that one CTA of the TMA kernel multiplies: two accumulators of each row fill the registers
TMA_ROWS = 160
# up to here weight rows are balanced over the SMs; with more rows the tensor cores are fully used anyway
SOME_ROWS = 128
# numbers of rows of the weight
MANY_WEIGHT_ROWS = 16384  # from here on one CTA sums over all of K for its weight rows
CTA_WEIGHT_ROWS = 128  # of a CTA of the many-row kernel: 32 for each warp
ROUND_ROWS = 16  # start and end of one CTA take as long as this many weight rows
# values of K
STEP = 64  # step of the many-row kernel
LONG = 16  # in K tiles; longer sums are unrolled less, because registers run out
# bytes of shared memory
TMA_BYTES = (224_000, 115_000)  # for the stages of the TMA pipeline: with one CTA on an SM, and for each of two CTAs
EXCHANGE_BYTES = 4096  # part of TMA_BYTES through which the compiler brings a tile's values into row order


@dataclass(frozen=True, slots=True)
class Split:
    """Split of a product's sum over K into partial sums (split-K). The bits of a row depend on it.

    Attributes:
        split_k: S, a power of two: number of partial sums. K tile i belongs to partial sum i % S.
        k_tile: KT, 64 or 128: number of consecutive values of K in a K tile.
        pairwise: number of neighbouring partial sums that are added to each other first. These results are then added
            in order. 1: all partial sums are added in order.
        runs: True if partial sum i is over the i-th of S equal, contiguous parts of K. All partial sums are then added
            as one binary tree.
    """

    split_k: int
    k_tile: int
    pairwise: int = 1
    runs: bool = False

    @property
    def kernel_pairwise(self) -> int:
        """PAIRWISE of kernels that add all partial sums: `pairwise`, or 0 for a binary tree."""
        return 0 if self.runs else self.pairwise

    def tile_of_k(self, k: int) -> int:
        """Returns the number of consecutive values of K that belong to the same partial sum. `k` is the length of K."""
        return k // self.split_k if self.runs else self.k_tile


@dataclass(frozen=True, slots=True)
class FewRows:
    """Launch configuration of the few-row kernel.

    Attributes:
        weight_rows, rows: rows of the weight and of x in one CTA. With codes `rows` is 8 times a power of two.
        depth, row_depth: number of K tiles of the weight and of x that are loaded ahead. row_depth 0, for codes only: x
            is loaded when it is needed.
        norms: True if the kernel can compute the norm before the product.
        ahead: True if the kernel sums the squares of x, for the norm, before it multiplies.
    """

    weight_rows: int
    rows: int
    depth: int
    row_depth: int
    norms: bool = False
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class ManyRows:
    """Launch configuration of the many-row kernel.

    Attributes:
        groups: number of groups of rows of x in one CTA.
        depth: number of steps of K, of STEP values each, whose weights are in shared memory.
        weight_rows: rows of the weight in one CTA.
        rows: rows of x in a group.
        warps: number of warps.
    """

    groups: int
    depth: int
    weight_rows: int = CTA_WEIGHT_ROWS
    rows: int = 32
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Tma:
    """Launch configuration of the TMA kernel: sm_90's pipeline of TMA loads and wgmma.

    Attributes:
        rows, rest: rows of x in a CTA's first wgmma product, and in its second. rest 0: no second product.
        weight_rows: rows of the weight in one CTA: a multiple of 16, and a sum of at most three powers of two.
        warps, stages: number of multiplying warps, and steps of K in shared memory.
        split_k: number of splits of K that a CTA sums: one, or `pairwise` of `Split`. Another kernel then adds the
            partial sums of CTAs. None: a CTA sums over all of K.
        registers: limit of registers per thread, so that two CTAs fit on an SM. None: no limit.
        programs: number of persistent CTAs, which process the weight's tiles in turn. None: one CTA per tile.
    """

    rows: int
    weight_rows: int
    warps: int
    stages: int
    rest: int = 0
    split_k: int | None = None
    registers: int | None = None
    programs: int | None = None

    @property
    def room(self) -> int:
        """Weight rows for which shared memory is allocated: a power of two, at least the 64 rows of one wgmma."""
        return max(64, 1 << (self.weight_rows - 1).bit_length())

    @property
    def boxes(self) -> list[int]:
        """Rows of the TMA boxes that load a CTA's weight rows, largest first, padded with zeros to three boxes."""
        sizes = boxes(self.weight_rows)
        return sizes + [0] * (3 - len(sizes))


@dataclass(frozen=True, slots=True)
class Wide:
    """Launch configuration of the TMA kernel for quantised weights (codes), on sm_90.

    Attributes:
        weight_rows, rows: rows of the weight and of x in one CTA.
        warps: number of multiplying warps: one for each 16 weight rows.
        stages: number of K tiles in shared memory.
        splits: number of splits of K that a CTA sums. If it is less than all, another kernel adds the partial sums.
        registers: limit of registers per thread.
    """

    weight_rows: int
    rows: int
    warps: int
    stages: int
    splits: int
    registers: int


Tile = FewRows | ManyRows | Tma | Wide
# by kernel: the GPU on which its tiles were measured; None: not measured
MEASURED_ON: dict[type, str | None] = {
    **{FewRows: "NVIDIA H200", Tma: "NVIDIA H200", Wide: "NVIDIA H100 and H200"},
    ManyRows: None,
}

# splits of some weights, by (N, K)
SPLITS = {
    (4096, 4096): Split(4, 128, 2),
    (4096, 14336): Split(8, 128, 2),
    (2048, 8192): Split(8, 64),
}
# `split_k` and `pairwise` of a weight whose K may be divided among ranks. TREE is the largest number of ranks that
# changes no bit. With few weight rows, the default split of the shape is used if it has more partial sums
TREE, TREE_PAIRWISE = 4, 2
TREE_ROWS = 4096  # a weight with more rows has TREE partial sums, because one CTA computes all of them for many rows
LONG_TILE_K = 4096  # from this K on, K tiles of a tree may have 128 values

# by split and largest number of rows of x: (weight rows, depth, row depth) of `FewRows`
FEW_ROW_TILES = {
    (Split(1, 64), 8): (16, 8, 2),
    (Split(1, 128), 8): (16, 4, 1),
    (Split(1, 64), 16): (16, 5, 1),
    (Split(1, 128), 16): (16, 3, 1),
    (Split(2, 64), 8): (16, 8, 2),
    (Split(2, 128), 8): (16, 4, 1),
    (Split(2, 64), 16): (16, 5, 1),
    (Split(2, 128), 16): (16, 3, 1),
    (Split(4, 64), 8): (16, 8, 2),
    (Split(4, 128), 8): (16, 4, 1),
    (Split(8, 64), 8): (16, 6, 2),
    (Split(8, 128), 8): (16, 2, 1),
    (Split(4, 64), 16): (16, 5, 1),
    (Split(4, 128), 16): (16, 3, 1),
    (Split(8, 64), 16): (16, 4, 1),
    (Split(8, 128), 16): (16, 2, 1),
}
# by (N, K): the same for some weights and up to 8 rows of x
OWN_TILES = {
    (6144, 4096): (32, 4, 1),
    (16384, 2048): (32, 4, 2),
    (128256, 2048): (32, 4, 2),
    # parts of some weights on ranks, measured on H100
    (14336, 4096): (32, 4, 1),
    (7168, 4096): (32, 4, 1),
    (8192, 2048): (32, 4, 1),
    (3072, 4096): (16, 6, 2),
    (1536, 4096): (16, 6, 2),
    (4096, 1024): (16, 6, 2),
}

# weights for which a CTA of the TMA kernel has an SM of its own. By (N, K): (smallest number of rows of x, weight rows
# of a CTA, number of splits that it sums; None: all)
ONE_CTA_PER_SM: dict[tuple[int, int], tuple[int, int, int | None]] = {
    (4096, 4096): (64, 64, 2),
    (4096, 14336): (64, 128, 2),
    # parts of some weights on two and four ranks, measured on H100
    (4096, 2048): (129, 64, 1),
    (4096, 7168): (96, 64, 2),
    (14336, 4096): (9, 112, None),
    (3072, 4096): (96, 96, 1),
    (4096, 1024): (129, 32, 1),
    (4096, 3584): (32, 64, 1),
    (1536, 4096): (129, 64, 1),
}

# (N, K) of weights that the few-row kernel reads faster with as much L1 as possible, in spite of changing the division
# of the SM's memory
L1_FIRST = {(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)}


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def boxes(weight_rows: int) -> list[int]:
    """Splits a number of weight rows, a multiple of 16, into the powers of two that TMA loads, largest first."""
    return [1 << bit for bit in range(weight_rows.bit_length() - 1, 3, -1) if weight_rows >> bit & 1]


def split_of(n: int, k: int) -> Split:
    """Returns the split of K for a weight [N, K]: its entry in SPLITS, or a default for its shape."""
    return SPLITS.get((n, k)) or (Split(8, 128) if k >= 8192 and n < k else Split(4, 64))


def tree_of(n: int, k: int) -> Split | None:
    """Returns the split of K for a weight [N, K] that sums over K as one binary tree over equal parts.

    None if K cannot be divided into such parts.
    """
    usual = split_of(n, k)
    many = usual.split_k if n <= TREE_ROWS else TREE
    tiles = (usual.k_tile, 64) if many > TREE or k >= LONG_TILE_K else (64,)
    splits = [(max(many, TREE), tile) for tile in tiles] + [(TREE, tile) for tile in tiles]
    fits = ((count, tile) for count, tile in splits if k % (count * tile) == 0)
    return next((Split(count, tile, TREE_PAIRWISE, True) for count, tile in fits), None)


def split_for(shape: tuple[int, int], whole: tuple[int, int] | None = None, tree: bool = False) -> Split:
    """Returns the split of K for a weight. `shape` is (N, K); `whole` and `tree` are fields of `Weight`.

    If the weight is a rank's part of a matrix divided along K, its split is the matching part of the matrix's split. So
    the number of ranks changes no bit.
    """
    n, k = whole or shape
    found = tree_of(n, k) if tree else None
    if found is None:
        return split_of(*shape) if k != shape[1] else split_of(n, k)
    splits = found.split_k // (k // shape[1])
    if splits < 1 or shape[1] % (splits * found.k_tile):
        return split_of(*shape)
    return replace(found, split_k=splits, pairwise=min(found.pairwise, splits))


def tree_parts(shape: tuple[int, int], whole: tuple[int, int] | None) -> int:
    """Returns the number of equal parts of K whose sums a product with many rows adds as a binary tree. 1: no tree.

    For the arguments see `split_for`.
    """
    split, ranks = split_for(shape, whole, True), (whole or shape)[1] // shape[1]
    return max(1, TREE // ranks) if split.runs else 1


def tile_of(
    n: int, k: int, rows: int, gpu: Gpu, whole: bool = False, gated: bool = False, split: Split | None = None
) -> Tile:
    """Returns the launch configuration for a weight [N, K] and `rows` rows of x.

    Args:
        whole: True if a CTA must sum over all of K, because an argmax follows.
        gated: True if silu(gate) * up follows the product.
        split: split of K for this weight. None: the result of `split_of`.
    """
    split = split or split_of(n, k)
    if rows > max_few_rows(gpu):
        if gpu.hopper:
            return _tma_of(n, k, rows, split, gpu.sms, whole, gated)
        return _many_rows_of(rows, split, gpu)
    block = 8 if rows <= 8 else 16
    steps = cdiv(k, split.split_k * split.k_tile)
    own = OWN_TILES.get((n, k)) if block == 8 else None
    weight_rows, depth, row_depth = own or FEW_ROW_TILES[Split(split.split_k, split.k_tile), block]
    ahead = n >= MANY_WEIGHT_ROWS or steps > LONG
    if steps > LONG and split.k_tile == 64:
        depth = min(depth, 6)
    return FewRows(weight_rows, block, min(depth, steps), min(row_depth, steps), block <= FUSED_ROWS, ahead)


def max_few_rows(gpu: Gpu) -> int:
    """Returns the largest number of rows of x for the few-row kernel.

    More rows use the TMA kernel or the many-row kernel.
    """
    return 8 if gpu.hopper else 16


def _many_rows_of(rows: int, split: Split, gpu: Gpu) -> ManyRows:
    """Returns the launch configuration of the many-row kernel. One CTA sums over all of K for its weight rows."""
    roomy = gpu.roomy
    tight = not roomy and split.pairwise > 1  # sums of neighbouring splits need shared memory of their own
    return ManyRows(2 if rows > 32 and roomy else 1, 3 if tight else 4)


def _tma_of(n: int, k: int, rows: int, split: Split, sms: int, whole: bool, gated: bool) -> Tma:
    """Returns the launch configuration of the TMA kernel, with one or two CTAs on an SM.

    With few weight rows, K is split over CTAs. sms: number of SMs of the GPU. For the other arguments see `tile_of`.
    """
    rows = cdiv(rows, cdiv(rows, TMA_ROWS))
    group = 1 << (rows.bit_length() - 1)
    rest = 0 if group == rows else max(8, 1 << (rows - group - 1).bit_length())
    if rest == group:
        group, rest = 2 * group, 0
    few, some = group + rest <= 64, group + rest <= SOME_ROWS
    splits = None
    own = ONE_CTA_PER_SM.get((n, k))
    at_once = own is not None and own[2] is None  # otherwise K is split over CTAs
    if own is not None and group + rest >= own[0] and (at_once or not (whole or gated)):
        weight_rows, splits, roomy = own[1], own[2] and min(own[2], split.pairwise), True
    elif n >= MANY_WEIGHT_ROWS:
        weight_rows, roomy = _balanced(n, 1, sms, few) if some else 128, not few
    elif whole or gated or (n >= 64 * sms * 2 // 3 and not (split.runs and split.split_k > TREE)):
        weight_rows, roomy = 48 if n <= 48 * sms else 64, n <= 64 * sms
    else:
        weight_rows, splits, roomy = _split_k_apart(n, group + rest, split, sms)
    warps = 8 if roomy and weight_rows > 64 else 4
    tile = Tma(group, weight_rows, warps, 0, rest, splits, None if roomy else 128)
    # persistent CTAs load the next tile during the epilogue; an argmax needs the registers for that itself
    if warps == 8 and not whole and splits is None:
        tiles = cdiv(n, weight_rows)
        tile = replace(tile, programs=cdiv(tiles, cdiv(tiles, sms)))
    space = TMA_BYTES[not roomy] - (EXCHANGE_BYTES if splits is None else 0)
    return replace(tile, stages=min(20, space // ((tile.room + group + rest) * 128)))


def _split_k_apart(n: int, rows: int, split: Split, sms: int) -> tuple[int, int, bool]:
    """Returns (weight rows of a CTA, number of splits that it sums, False), for K split over CTAs.

    False: a CTA has no SM of its own.
    """
    splits = 1 if cdiv(n, 64) * split.split_k <= 2 * sms else split.pairwise
    return _balanced(n, split.split_k // splits, sms) if rows <= SOME_ROWS else 64, splits, False


def _balanced(n: int, splits: int, sms: int, two: bool = True) -> int:
    """Returns the number of weight rows of one CTA, out of n, that gives the busiest SM the least work.

    Args:
        splits: number of CTAs that sum over parts of K for the same weight rows.
        two: True for two CTAs of 64 to 128 weight rows on an SM. False for one CTA of more than 64.
    """
    places, sizes = (2 * sms, (128, 112, 96, 80, 64)) if two else (sms, (128, 112, 96, 80))
    return min(sizes, key=lambda own: cdiv(cdiv(n, own) * splits, places) * (own + ROUND_ROWS))
