"""How products with quantised weights are launched: the split of K that belongs to a weight, and tiles by rows of x.

Decisions only, made of numbers: this module needs neither Triton nor a GPU. `MEASURED_ON` says on which GPU the tables
were chosen; None: results are right, and tiles are guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastspec.kernels.common.code_packing import Form
from fastspec.kernels.gpu import Gpu
from fastspec.kernels.product.plan import Split, cdiv

MEASURED_ON: str | None = "NVIDIA H100 and H200"  # bf16, shapes of Llama 3.1 8B and 3.2 1B, weights cold
MAX_ROWS = 64  # of x in one CTA
BLOCK = 8  # rows of x that one product of the tensor core takes
SHORT = 2048  # values of K, up to which sums are split in 4 and not in 8
WIDE = {"fp8", "int8", "off8"}  # forms of 8 bits


@dataclass(frozen=True, slots=True)
class FewRowsTile:
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


@dataclass(frozen=True, slots=True)
class Wide:
    """A launch of the kernel for many rows, on sm_90.

    Attributes:
        weight_rows, rows: of the weight and of x, in one CTA.
        warps: that multiply: one for each 16 weight rows.
        stages: K tiles of K in shared memory.
        splits: how many splits of K a CTA computes; if not all, another kernel adds up the sums that CTAs leave.
        registers: limit for a thread.
    """

    weight_rows: int
    rows: int
    warps: int
    stages: int
    splits: int
    registers: int


WIDE_FROM: dict[Form, int] = {"fp8": 9, "int8": 9, "off8": 9, "int4": 17}  # rows of x
WIDE_FORMS: dict[Form, tuple[int, ...]] = {"fp8": (0, 64, 128), "int8": (0,), "off8": (0,), "int4": (64, 128)}
# rows of x in a CTA: weight rows, warps, CTAs on an SM, registers. Codes of 4 bits take the first with 64 rows, too
WIDE_SHAPES = {16: (64, 4, 2, 128), 32: (64, 4, 2, 128), 64: (128, 8, 1, 168)}
MAX_STAGES = 16  # more of few rows would be for nothing
SHARED_BYTES = (0, 200_000, 104_000)  # for the stages of one of so many CTAs on an SM

Sizes = tuple[int, int, int]  # weight rows, depth, row depth
# by (form, N, K): sums that K is split in, on which bits depend, and tiles of 1, 2, 4 and 8 blocks as far as measured
MEASURED: dict[tuple[Form, int, int], tuple[int, tuple[Sizes, ...]]] = {
    ("fp8", 6144, 4096): (8, ((32, 2, 1), (16, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("fp8", 4096, 4096): (8, ((16, 2, 1), (32, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("fp8", 28672, 4096): (8, ((32, 2, 1), (16, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("fp8", 4096, 14336): (8, ((16, 4, 1), (32, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("fp8", 128256, 4096): (8, ((32, 2, 1), (32, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("fp8", 3072, 2048): (4, ((16, 4, 4), (16, 4, 0), (32, 1, 0), (32, 1, 0))),
    ("fp8", 2048, 2048): (8, ((16, 2, 1), (16, 2, 0), (16, 2, 0), (16, 1, 0))),
    ("fp8", 16384, 2048): (4, ((32, 2, 1), (16, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("fp8", 2048, 8192): (8, ((16, 8, 1), (16, 4, 0), (16, 1, 0), (16, 2, 0))),
    ("fp8", 128256, 2048): (4, ((32, 2, 1), (32, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("int8", 6144, 4096): (8, ((32, 2, 1),)),
    ("int8", 4096, 4096): (8, ((32, 2, 1),)),
    ("int8", 28672, 4096): (8, ((32, 2, 1),)),
    ("int8", 4096, 14336): (16, ((16, 2, 1),)),
    ("int8", 128256, 4096): (8, ((32, 2, 1),)),
    ("int8", 3072, 2048): (4, ((16, 4, 4),)),
    ("int8", 2048, 2048): (4, ((16, 4, 1),)),
    ("int8", 16384, 2048): (4, ((32, 2, 1),)),
    ("int8", 2048, 8192): (8, ((16, 8, 1),)),
    ("int8", 128256, 2048): (4, ((32, 2, 1),)),
    ("int4", 6144, 4096): (8, ((32, 2, 2), (32, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("int4", 4096, 4096): (8, ((16, 4, 4), (32, 2, 0), (32, 1, 0), (16, 1, 0))),
    ("int4", 28672, 4096): (8, ((32, 4, 1), (32, 2, 0), (32, 1, 0), (16, 2, 0))),
    ("int4", 4096, 14336): (8, ((16, 7, 2), (32, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("int4", 128256, 4096): (8, ((32, 2, 1),)),
    ("int4", 3072, 2048): (8, ((16, 2, 1),)),
    ("int4", 2048, 2048): (4, ((32, 4, 1), (16, 4, 0), (16, 1, 0), (16, 1, 0))),
    ("int4", 16384, 2048): (4, ((32, 4, 1), (32, 2, 0), (32, 1, 0), (32, 1, 0))),
    ("int4", 2048, 8192): (8, ((16, 8, 4),)),
    ("int4", 128256, 2048): (8, ((32, 2, 1),)),
    ("fp4", 6144, 4096): (8, ((16, 2, 1),)),
    ("fp4", 4096, 4096): (8, ((16, 2, 1),)),
    ("fp4", 28672, 4096): (8, ((16, 2, 1),)),
    ("fp4", 4096, 14336): (8, ((16, 4, 1),)),
    ("fp4", 128256, 4096): (8, ((16, 2, 1),)),
    ("fp4", 3072, 2048): (8, ((16, 2, 1),)),
    ("fp4", 2048, 2048): (8, ((16, 2, 1),)),
    ("fp4", 16384, 2048): (8, ((16, 2, 1),)),
    ("fp4", 2048, 8192): (16, ((16, 2, 1),)),
    ("fp4", 128256, 2048): (4, ((16, 4, 1),)),
}
# for all others, by bits of a code and blocks
DEFAULT: dict[tuple[int, int], Sizes] = {
    **{(8, 1): (16, 4, 1), (8, 2): (32, 2, 0), (8, 4): (32, 1, 0), (8, 8): (32, 1, 0)},
    **{(4, 1): (16, 4, 1), (4, 2): (32, 2, 0), (4, 4): (32, 1, 0), (4, 8): (16, 1, 0)},
}


def split_of(form: Form, n: int, k: int) -> Split:
    """The split that belongs to a weight [N, K]."""
    measured = MEASURED.get((form, n, k))
    return Split(measured[0] if measured else 4 if k <= SHORT else 8, 128)


def tile_of(form: Form, n: int, k: int, rows: int) -> FewRowsTile:
    """The launch for `rows` rows of x and a weight [N, K]."""
    blocks = 1
    while blocks * BLOCK < min(rows, MAX_ROWS):
        blocks *= 2
    tiles = dict(zip((1, 2, 4, 8), MEASURED.get((form, n, k), (0, ()))[1], strict=False))
    weight_rows, depth, row_depth = tiles.get(blocks) or DEFAULT[8 if form in WIDE else 4, blocks]
    split = split_of(form, n, k)
    steps = cdiv(k, split.split_k * split.k_tile)
    return FewRowsTile(weight_rows, blocks, min(depth, steps), min(row_depth, depth, steps))


def launch_of(form: Form, group: int, n: int, k: int, rows: int, gpu: Gpu, whole: bool) -> FewRowsTile | Wide:
    """The launch for `rows` rows of x and a weight [N, K] with `group` values of K to a scale, 0 for all.

    Args:
        whole: a CTA must make all sums of K.
    """
    if rows < WIDE_FROM.get(form, rows + 1) or not gpu.hopper or group not in WIDE_FORMS.get(form, ()):
        return tile_of(form, n, k, rows)
    return wide_of(form, n, k, rows, gpu.sms, whole)


def wide_of(form: Form, n: int, k: int, rows: int, sms: int, whole: bool) -> Wide:
    """The launch of the kernel for many rows: as many CTAs share the sums of K as run at a time."""
    room = 16
    while room < min(rows, MAX_ROWS):
        room *= 2
    weight_rows, warps, resident, registers = WIDE_SHAPES[room if form in WIDE else 32]
    split, tiles = split_of(form, n, k).split_k, cdiv(n, weight_rows) * cdiv(rows, room)
    apart = 1
    while not whole and 2 * apart <= split and tiles * 2 * apart <= sms * resident:
        apart *= 2
    stage = weight_rows * 64 * (2 if form in WIDE else 1) + room * 256
    return Wide(weight_rows, room, warps, min(MAX_STAGES, SHARED_BYTES[resident] // stage), split // apart, registers)
