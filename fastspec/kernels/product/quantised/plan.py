"""Launch configurations for quantised weights: the split of K, and tiles for a number of rows of x.

They were chosen by measurement on NVIDIA H100 and H200, with shapes of Llama 3.1 8B and 3.2 1B and weights outside the
L2 cache.
"""

from __future__ import annotations

from fastspec.kernels.common.code_packing import FIELDS, Form
from fastspec.kernels.gpu import Gpu
from fastspec.kernels.product.plan import FewRows, Split, Wide, cdiv

MAX_ROWS = 64  # largest number of rows of x in one CTA
BLOCK = 8  # rows of x in one product of the tensor core
SHORT = 2048  # by default K has 4 splits up to this K, and 8 above
EIGHT_BITS = {form for form, codes in FIELDS.items() if len(codes) == 2}  # a half of a word has two codes


# of the TMA kernel of codes: smallest number of rows of x, and group sizes (values of K that share a scale; 0: all)
WIDE_FROM: dict[Form, int] = {"fp8": 9, "int8": 9, "off8": 9, "int4": 17}
WIDE_FORMS: dict[Form, tuple[int, ...]] = {"fp8": (0, 64, 128), "int8": (0,), "off8": (0,), "int4": (64, 128)}
# by rows of x in a CTA: (weight rows, warps, CTAs on an SM, registers). 4-bit codes use the entry of 32 rows for any
# number of rows
WIDE_SHAPES = {16: (64, 4, 2, 128), 32: (64, 4, 2, 128), 64: (128, 8, 1, 168)}
MAX_STAGES = 16  # more stages would not be used with few rows
SHARED_BYTES = (0, 200_000, 104_000)  # bytes for the stages of a CTA, by the number of CTAs on an SM

Sizes = tuple[int, int, int]  # (weight rows, depth, row depth) of `FewRows`
# by (form, N, K): number of splits of K, on which the bits depend; and tiles for 1, 2, 4 and 8 blocks of rows of x, as
# far as they were measured
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
# for all other weights, by (bits of a code, blocks of rows of x)
DEFAULT: dict[tuple[int, int], Sizes] = {
    **{(8, 1): (16, 4, 1), (8, 2): (32, 2, 0), (8, 4): (32, 1, 0), (8, 8): (32, 1, 0)},
    **{(4, 1): (16, 4, 1), (4, 2): (32, 2, 0), (4, 4): (32, 1, 0), (4, 8): (16, 1, 0)},
}


def split_of(form: Form, n: int, k: int) -> Split:
    """Returns the split of K for a weight [N, K] with codes of `form`."""
    measured = MEASURED.get((form, n, k))
    return Split(measured[0] if measured else 4 if k <= SHORT else 8, 128)


def tile_of(form: Form, n: int, k: int, rows: int) -> FewRows:
    """Returns the launch configuration of the few-row kernel for `rows` rows of x and a weight [N, K] of codes."""
    blocks = 1
    while blocks * BLOCK < min(rows, MAX_ROWS):
        blocks *= 2
    tiles = dict(zip((1, 2, 4, 8), MEASURED.get((form, n, k), (0, ()))[1], strict=False))
    weight_rows, depth, row_depth = tiles.get(blocks) or DEFAULT[8 if form in EIGHT_BITS else 4, blocks]
    split = split_of(form, n, k)
    steps = cdiv(k, split.split_k * split.k_tile)
    return FewRows(weight_rows, blocks * BLOCK, min(depth, steps), min(row_depth, depth, steps))


def launch_of(form: Form, group: int, n: int, k: int, rows: int, gpu: Gpu, whole: bool) -> FewRows | Wide:
    """Returns the launch configuration for `rows` rows of x and a weight [N, K] of codes.

    Args:
        group: number of values of K that share a scale; 0: all.
        whole: True if a CTA must sum over all of K.
    """
    if rows < WIDE_FROM.get(form, rows + 1) or not gpu.hopper or group not in WIDE_FORMS.get(form, ()):
        return tile_of(form, n, k, rows)
    return wide_of(form, n, k, rows, gpu.sms, whole)


def wide_of(form: Form, n: int, k: int, rows: int, sms: int, whole: bool) -> Wide:
    """Returns the launch configuration of the TMA kernel of codes. For the arguments see `launch_of`.

    The splits of K are divided among CTAs, as far as all CTAs can run at the same time on `sms` SMs.
    """
    room = 16
    while room < min(rows, MAX_ROWS):
        room *= 2
    weight_rows, warps, resident, registers = WIDE_SHAPES[room if form in EIGHT_BITS else 32]
    split, tiles = split_of(form, n, k).split_k, cdiv(n, weight_rows) * cdiv(rows, room)
    apart = 1
    while not whole and 2 * apart <= split and tiles * 2 * apart <= sms * resident:
        apart *= 2
    stage = weight_rows * 64 * (2 if form in EIGHT_BITS else 1) + room * 256
    return Wide(weight_rows, room, warps, min(MAX_STAGES, SHARED_BYTES[resident] // stage), split // apart, registers)
