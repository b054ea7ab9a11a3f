"""How packed products are launched: the split of K that belongs to a weight, and tiles by the number of rows.

Decisions only, made of numbers: this module needs neither Triton nor a GPU. `launch` acts on them. `MEASURED_ON` says
which kernels' tiles were chosen by measurement, on which GPU: bf16, weights cold, shapes of Llama 3.1 8B and 3.2 1B.
Other shapes take the defaults, and other GPUs are untested: results are right there, and tiles are guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastspec.kernels.gpu import Gpu

# rows of x
FUSED_ROWS = 8  # the most for which the product computes the norm itself; with more the norm is a kernel of its own
TMA_ROWS = 160  # the most that one CTA of the TMA kernel multiplies: two accumulators of each row fill the registers
SOME_ROWS = 128  # up to here weight rows are balanced over the SMs; with more rows the tensor cores are busy anyway
# rows of the weight
MANY_WEIGHT_ROWS = 16384  # from here on one CTA sums all of K for its weight rows
LARGE_WEIGHT_ROWS = 128  # of a CTA of the large-M kernel: 32 for each warp
ROUND_ROWS = 16  # weight rows whose time equals the start and the end of one more CTA
# values of K
STEP = 64  # that the large-M kernel multiplies at a time
LONG = 16  # K tiles: longer sums are unrolled less, because registers run out
# bytes of shared memory
TMA_BYTES = (224_000, 115_000)  # for the stages of the TMA pipeline: of the only CTA on an SM, and of each of two
EXCHANGE_BYTES = 4096  # of those, through which the compiler brings a tile's values into row order


@dataclass(frozen=True, slots=True)
class Split:
    """How a sum over K is cut. A row's bits depend on this.

    Attributes:
        split_k: S, a power of two: how many sums K is divided among; tile i of K goes to sum i % S.
        k_tile: KT, 64 or 128: consecutive values of K in one tile.
        pairwise: how many neighbouring sums are added to each other before all are added up; 1 for none.
        runs: sum i is of the i-th of S equal parts of K, and not of every S-th tile, and all are added as one binary
            tree.
    """

    split_k: int
    k_tile: int
    pairwise: int = 1
    runs: bool = False

    @property
    def kernel_pairwise(self) -> int:
        """`pairwise`, or 0 where K is cut into runs, as kernels are told that add up all sums."""
        return 0 if self.runs else self.pairwise

    def tile_of_k(self, k: int) -> int:
        """Consecutive values of K that belong to one sum."""
        return k // self.split_k if self.runs else self.k_tile


@dataclass(frozen=True, slots=True)
class Small:
    """A launch of the small-M kernel.

    Attributes:
        weight_rows, rows: of the weight and of x, in one CTA.
        depth, row_depth: K tiles of the weight and of x that are loaded ahead.
        ahead: squares for the norm are summed before the products.
    """

    weight_rows: int
    rows: int
    depth: int
    row_depth: int
    ahead: bool


@dataclass(frozen=True, slots=True)
class Large:
    """A launch of the large-M kernel: groups of `rows` rows of x in one CTA, steps of K in shared memory."""

    groups: int
    depth: int
    weight_rows: int = LARGE_WEIGHT_ROWS
    rows: int = 32
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Tma:
    """A launch of the TMA kernel, sm_90's pipeline of TMA loads and warp-group products.

    Attributes:
        rows: of x in one CTA. rest: more of them, which a second product multiplies.
        weight_rows: of a CTA, a multiple of 16 and the sum of at most three powers of two.
        warps: that multiply. stages: steps of K in shared memory.
        split_k: sums of the split that a CTA makes, one or those that are added pairwise; another kernel adds up what
            CTAs leave. None: a CTA makes all of them.
        registers: limit for a thread, so that two CTAs fit on an SM.
        programs: CTAs that share the weight's tiles, each going on to its next one; None: one CTA for each tile.
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
        """Weight rows that there is shared memory for: a power of two, of which warp groups multiply 64."""
        return max(64, 1 << (self.weight_rows - 1).bit_length())

    @property
    def boxes(self) -> list[int]:
        """`boxes` of the weight rows, three with zeros after."""
        sizes = boxes(self.weight_rows)
        return sizes + [0] * (3 - len(sizes))


Tile = Small | Large | Tma
# by kind of tile: the GPU on which its entries were measured, None for untested ones
MEASURED_ON: dict[type, str | None] = {Small: "NVIDIA H200", Tma: "NVIDIA H200", Large: None}

# by (N, K)
SPLITS = {
    (4096, 4096): Split(4, 128, 2),
    (4096, 14336): Split(8, 128, 2),
    (2048, 8192): Split(8, 64),
}
# sums of a weight whose K ranks may share: as many as the largest number of ranks that changes no bit; where the split
# of few weight rows has more sums, as many as that
TREE, TREE_PAIRWISE = 4, 2
TREE_ROWS = 4096  # of a weight of more rows they are no more than that, for a CTA of many rows of x makes them all
LONG_TILE_K = 4096  # from this K on their tiles may be 128 values long

# (weight rows, depth, row depth) by S and k_tile of the split, and the most rows of x
SMALL = {
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
# tiles of some weights for up to 8 rows, by (N, K)
SMALL_OWN = {
    (6144, 4096): (32, 4, 1),
    (16384, 2048): (32, 4, 2),
    (128256, 2048): (32, 4, 2),
    # what ranks have of some, on H100s
    (14336, 4096): (32, 4, 1),
    (7168, 4096): (32, 4, 1),
    (8192, 2048): (32, 4, 1),
    (3072, 4096): (16, 6, 2),
    (1536, 4096): (16, 6, 2),
    (4096, 1024): (16, 6, 2),
}

# CTAs that own their SM, by (N, K): from how many rows of x on, weight rows, and sums of the split that each makes;
# None: all of them
ONE_CTA_PER_SM: dict[tuple[int, int], tuple[int, int, int | None]] = {
    (4096, 4096): (64, 64, 2),
    (4096, 14336): (64, 128, 2),
    # what two and four ranks have of some, on H100s
    (4096, 2048): (129, 64, 1),
    (4096, 7168): (96, 64, 2),
    (14336, 4096): (9, 112, None),
    (3072, 4096): (96, 96, 1),
    (4096, 1024): (129, 32, 1),
    (4096, 3584): (32, 64, 1),
    (1536, 4096): (129, 64, 1),
}

# weights, by (N, K), that the small-M kernel reads faster with as much L1 as possible, though L1 is divided anew then
L1_FIRST = {(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def boxes(weight_rows: int) -> list[int]:
    """Weight rows, a multiple of 16, as the copy engine brings them: powers of two, the largest first."""
    return [1 << bit for bit in range(weight_rows.bit_length() - 1, 3, -1) if weight_rows >> bit & 1]


def split_of(n: int, k: int) -> Split:
    """The split that belongs to a weight [N, K]: that of the table, or one for how long its sums are."""
    return SPLITS.get((n, k)) or (Split(8, 128) if k >= 8192 and n < k else Split(4, 64))


def tree_of(n: int, k: int) -> Split | None:
    """The split of a weight [N, K] whose sums are one binary tree over equal parts of K; None where it has none."""
    usual = split_of(n, k)
    many = usual.split_k if n <= TREE_ROWS else TREE
    tiles = (usual.k_tile, 64) if many > TREE or k >= LONG_TILE_K else (64,)
    splits = [(max(many, TREE), tile) for tile in tiles] + [(TREE, tile) for tile in tiles]
    fits = ((count, tile) for count, tile in splits if k % (count * tile) == 0)
    return next((Split(count, tile, TREE_PAIRWISE, True) for count, tile in fits), None)


def split_for(shape: tuple[int, int], whole: tuple[int, int] | None = None, tree: bool = False) -> Split:
    """The split of a weight; arguments as the fields of `Weight`.

    It is that of the whole matrix, or the part of it that belongs to a part of K: so ranks change no bit.
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
    """Parts of K whose sums a product of many rows adds as a tree; arguments as in `split_for`. 1: none."""
    split, ranks = split_for(shape, whole, True), (whole or shape)[1] // shape[1]
    return max(1, TREE // ranks) if split.runs else 1


def tile_of(
    n: int, k: int, rows: int, gpu: Gpu, whole: bool = False, gated: bool = False, split: Split | None = None
) -> Tile:
    """The launch for `rows` rows of x and a weight [N, K].

    Args:
        whole: K must not be split over CTAs, as where each CTA takes the largest of its sums.
        gated: as in `reference.linear`.
        split: of the weight; None: that of its shape.
    """
    split = split or split_of(n, k)
    if rows > small_rows(gpu):
        if gpu.hopper:
            return _tma_of(n, k, rows, split, gpu.sms, whole, gated)
        return _large_of(rows, split, gpu)
    block = 8 if rows <= 8 else 16
    steps = cdiv(k, split.split_k * split.k_tile)
    own = SMALL_OWN.get((n, k)) if block == 8 else None
    weight_rows, depth, row_depth = own or SMALL[Split(split.split_k, split.k_tile), block]
    ahead = n >= MANY_WEIGHT_ROWS or steps > LONG
    if steps > LONG and split.k_tile == 64:
        depth = min(depth, 6)
    return Small(weight_rows, block, min(depth, steps), min(row_depth, steps), ahead)


def small_rows(gpu: Gpu) -> int:
    """Rows of x up to which the small-M kernel runs; for more the TMA kernel does, on other GPUs the large-M one."""
    return 8 if gpu.hopper else 16


def _large_of(rows: int, split: Split, gpu: Gpu) -> Large:
    """The large-M kernel's tile: one program does all of K for its weight rows."""
    roomy = gpu.roomy
    tight = not roomy and split.pairwise > 1  # whose sums need room of their own
    return Large(2 if rows > 32 and roomy else 1, 3 if tight else 4)


def _tma_of(n: int, k: int, rows: int, split: Split, sms: int, whole: bool, gated: bool) -> Tma:
    """The TMA kernel's tile: one or two CTAs on an SM; where weight rows are few, K is split over CTAs."""
    rows = cdiv(rows, cdiv(rows, TMA_ROWS))
    group = 1 << (rows.bit_length() - 1)
    rest = 0 if group == rows else max(8, 1 << (rows - group - 1).bit_length())
    if rest == group:
        group, rest = 2 * group, 0
    few, some = group + rest <= 64, group + rest <= SOME_ROWS
    splits = None
    own = ONE_CTA_PER_SM.get((n, k))
    at_once = own is not None and own[2] is None  # else K is split over CTAs
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
    # an argmax needs the registers that would hold the end of a tile while the next one is loaded
    if warps == 8 and not whole and splits is None:
        tiles = cdiv(n, weight_rows)
        tile = replace(tile, programs=cdiv(tiles, cdiv(tiles, sms)))
    space = TMA_BYTES[not roomy] - (EXCHANGE_BYTES if splits is None else 0)
    return replace(tile, stages=min(20, space // ((tile.room + group + rest) * 128)))


def _split_k_apart(n: int, rows: int, split: Split, sms: int) -> tuple[int, int, bool]:
    """Weight rows and sums of the split of one CTA, and whether it owns its SM."""
    splits = 1 if cdiv(n, 64) * split.split_k <= 2 * sms else split.pairwise
    return _balanced(n, split.split_k // splits, sms) if rows <= SOME_ROWS else 64, splits, False


def _balanced(n: int, splits: int, sms: int, two: bool = True) -> int:
    """Weight rows of one CTA, of n: those with which the busiest SM is done first.

    Args:
        splits: CTAs that share the same weight rows.
        two: two CTAs of 64 to 128 weight rows on an SM, or one of more than 64.
    """
    places, sizes = (2 * sms, (128, 112, 96, 80, 64)) if two else (sms, (128, 112, 96, 80))
    return min(sizes, key=lambda own: cdiv(cdiv(n, own) * splits, places) * (own + ROUND_ROWS))
