"""How products with quantised weights are launched: the split of K that belongs to a weight, and tiles by rows of x.

Decisions only, made of numbers: this module needs neither Triton nor a GPU. `MEASURED_ON` says on which GPU the tables
were chosen; None: results are right, and tiles are guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastspec.kernels.common.code_packing import Form
from fastspec.kernels.linear.plan import Split, cdiv

MEASURED_ON: str | None = None
MOST_ROWS = 64  # of x in one CTA
BLOCK = 8  # rows of x that one product of the tensor core takes
SHORT = 2048  # values of K, up to which sums are split in 4 and not in 8
WIDE = {"fp8", "int8", "off8"}  # forms of 8 bits


@dataclass(frozen=True, slots=True)
class Tile:
    """A launch.

    Attributes:
        weight_rows: of one CTA: 16, 32 or 64.
        blocks: of 8 rows of x in one CTA, a power of two. Each converted weight is multiplied with all of them.
        depth, row_depth: K tiles of the weight and of x that are loaded ahead; x is loaded when it is needed where
            row_depth is 0.
        registers: limit for a thread.
    """

    weight_rows: int
    blocks: int
    depth: int
    row_depth: int
    registers: int | None = None


# by (form, N, K); bits depend on these
SPLITS: dict[tuple[Form, int, int], Split] = {}
# by (form, N, K, blocks): weight rows, depth, row depth
TILES: dict[tuple[Form, int, int, int], tuple[int, int, int]] = {}
# for all others, by bits of a code and blocks
DEFAULT = {
    **{(8, 1): (16, 4, 1), (8, 2): (16, 2, 0), (8, 4): (16, 2, 0), (8, 8): (16, 1, 0)},
    **{(4, 1): (16, 4, 1), (4, 2): (16, 2, 0), (4, 4): (16, 2, 0), (4, 8): (16, 1, 0)},
}


def split_of(form: Form, n: int, k: int) -> Split:
    """The split that belongs to a weight [N, K]."""
    return SPLITS.get((form, n, k)) or Split(4 if k <= SHORT else 8, 128)


def tile_of(form: Form, n: int, k: int, rows: int) -> Tile:
    """The launch for `rows` rows of x and a weight [N, K]."""
    blocks = 1
    while blocks * BLOCK < min(rows, MOST_ROWS):
        blocks *= 2
    weight_rows, depth, row_depth = TILES.get((form, n, k, blocks)) or DEFAULT[8 if form in WIDE else 4, blocks]
    split = split_of(form, n, k)
    steps = cdiv(k, split.split_k * split.k_tile)
    return Tile(weight_rows, blocks, min(depth, steps), min(row_depth, depth, steps))
