"""How packed products are launched: the split of K that belongs to a weight, and tiles by the number of rows.

Decisions only, made of numbers: this module needs neither Triton nor a GPU. `launches` acts on them. `MEASURED_ON` says
which kernels' tiles were chosen by measurement, on which GPU: bf16, weights cold, shapes of Llama 3.1 8B and 3.2 1B.
Other shapes take the defaults, and other GPUs are untested: results are right there, and tiles are guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

FUSED_ROWS = 8  # up to here a norm costs less on the way than as a kernel of its own
RING_ROWS = 160  # of x at most in one program of the ring's kernel: two sums of each fill the registers
ALONE_ROWS = 64  # of x that a program has room for (so 49 and more): from here on weights in ALONE have other tiles
SOME_ROWS = 128  # up to here programs are shared out: with more of them what multiplies is busy, whatever it is given
MANY_WEIGHT_ROWS = 16384  # from here on one program does all of K for its weight rows
WIDE_ROWS = 128  # of the weight: 32 for each warp
STEP = 64  # values of K that the wide kernel multiplies at a time
RING_BYTES = (224_000, 115_000)  # of shared memory for the ring of one program on a multiprocessor, and of two
TURNED_BYTES = 4096  # of those at most, through which the compiler puts a tile's values in rows
ROUND_ROWS = 16  # weight rows that take as long as the beginning and the end of one program more
LONG = 16  # slabs: longer sums take a loop, and with it registers
# bytes of shared memory that one program may have; 99 KiB elsewhere (CUDA programming guide, compute capabilities)
ROOMY = {(8, 0), (9, 0), (10, 0), (10, 3)}


class Gpu(NamedTuple):
    """What a plan depends on of a GPU: its compute capability, and how many streaming multiprocessors (SMs) it has."""

    capability: tuple[int, int]
    multiprocessors: int


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
        return max(64, 1 << (self.weight_rows - 1).bit_length())

    @property
    def boxes(self) -> list[int]:
        """`boxes` of the weight rows, three with zeros behind."""
        sizes = boxes(self.weight_rows)
        return sizes + [0] * (3 - len(sizes))


Tile = Narrow | Wide | Ring
# by kind of tile: the GPU on which its entries were measured, None for untested ones
MEASURED_ON: dict[type, str | None] = {Narrow: "NVIDIA H200", Ring: "NVIDIA H200", Wide: None}
TESTED_CAPABILITIES = {(9, 0)}  # of the GPUs named above

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


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def boxes(weight_rows: int) -> list[int]:
    """Weight rows, a multiple of 16, as the copy engine brings them: powers of two, the largest first."""
    return [1 << bit for bit in range(weight_rows.bit_length() - 1, 3, -1) if weight_rows >> bit & 1]


def tested(capability: tuple[int, int]) -> bool:
    """Whether the plan for GPUs of this compute capability was measured on one of them."""
    return capability in TESTED_CAPABILITIES


def supported(capability: tuple[int, int]) -> bool:
    """Whether the packed products run on a GPU of this compute capability: sm_80 and newer."""
    return capability >= (8, 0)


def split_of(n: int, k: int) -> Split:
    """The split that belongs to a weight [N, K]: that of the table, or one for how long its sums are."""
    return SPLITS.get((n, k)) or (Split(8, 128) if k >= 8192 and n < k else Split(4, 64))


def tile_of(n: int, k: int, rows: int, gpu: Gpu, whole: bool = False, gated: bool = False) -> Tile:
    """The launch for `rows` rows of x and a weight [N, K].

    Args:
        whole: no two programs may share weight rows, as where one takes the largest of its sums.
        gated: sums are multiplied by each other.
    """
    split = split_of(n, k)
    if rows > narrow_rows(gpu.capability):
        if gpu.capability == (9, 0):
            return _ring_of(n, k, rows, split, gpu.multiprocessors, whole, gated)
        return _wide_of(rows, split, gpu.capability)
    block = 8 if rows <= 8 else 16
    steps = cdiv(k, split.ways * split.slab)
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


def _ring_of(n: int, k: int, rows: int, split: Split, sms: int, whole: bool, gated: bool) -> Ring:
    """The ring's tile: one program on a multiprocessor, or two; where weight rows are few, ways are apart."""
    rows = cdiv(rows, cdiv(rows, RING_ROWS))
    group = 1 << (rows.bit_length() - 1)
    rest = 0 if group == rows else max(8, 1 << (rows - group - 1).bit_length())
    if rest == group:
        group, rest = 2 * group, 0
    few, some = group + rest <= 64, group + rest <= SOME_ROWS
    ways = None
    if n >= MANY_WEIGHT_ROWS:
        weight_rows, roomy = _shared_out(n, 1, sms, few) if some else 128, not few
    elif whole or gated or n >= 64 * sms * 2 // 3:
        weight_rows, roomy = 48 if n <= 48 * sms else 64, n <= 64 * sms
    else:
        weight_rows, ways, roomy = _ways_apart(n, k, group + rest, split, sms)
    warps = 8 if roomy and weight_rows > 64 else 4
    tile = Ring(group, weight_rows, warps, 0, rest, ways, None if roomy else 128)
    # of a pick, the registers do not hold a tile's end and what comes next
    if warps == 8 and not whole and ways is None:
        tiles = cdiv(n, weight_rows)
        tile = replace(tile, programs=cdiv(tiles, cdiv(tiles, sms)))
    space = RING_BYTES[not roomy] - (TURNED_BYTES if ways is None else 0)
    return replace(tile, stages=min(20, space // ((tile.room + group + rest) * 128)))


def _ways_apart(n: int, k: int, rows: int, split: Split, sms: int) -> tuple[int, int, bool]:
    """Weight rows and ways of a program that leaves its sums, and whether it has a multiprocessor to itself."""
    if (n, k) in ALONE and rows >= ALONE_ROWS:
        return ALONE[n, k], split.together, True
    ways = 1 if cdiv(n, 64) * split.ways <= 2 * sms else split.together
    return _shared_out(n, split.ways // ways, sms) if rows <= SOME_ROWS else 64, ways, False


def _shared_out(n: int, ways: int, sms: int, two: bool = True) -> int:
    """Weight rows of a program of n: as many as leave no multiprocessor more than its share.

    Args:
        two: programs of 64 to 128 weight rows on a multiprocessor, or one of more than 64.
    """
    places, sizes = (2 * sms, (128, 112, 96, 80, 64)) if two else (sms, (128, 112, 96, 80))
    return min(sizes, key=lambda own: cdiv(cdiv(n, own) * ways, places) * (own + ROUND_ROWS))
