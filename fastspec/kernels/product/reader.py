"""Reads K tiles of a weight as operands of the tensor core, for products with few rows of x.

FORM is "values" for a 16-bit weight, or a form of `PackedCodes`. A lane loads 16 contiguous bytes at a time:

| FORM            | a lane's 16 bytes | words loaded together        | operands of a K tile               |
|-----------------|-------------------|------------------------------|------------------------------------|
| values          | 8 values          | [S, R, KT / 2], a K tile     | 1, the words themselves            |
| codes of 8 bits | 16 codes of a row | [S, R, 16], 64 values of K   | KT / 64, converted in registers    |
| codes of 4 bits | 32 codes of a row | [S, R, 16], 128 values of K  | KT / 64, or KT / 32: see `unit_of` |

If groups of K have scales, each group is summed separately, and acc = fma(scale, sum, acc). Codes of fp4 are multiplied
with their scales before the product instead.
"""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.product.epilogue import row_operand, weight_operand
from fastspec.kernels.product.quantised.conversion import (
    bits_of,
    for_all,
    offset_of,
    pairs_layout,
    raised,
    rows_of,
    scale_layout,
    units_of,
    zeros_of,
)


class WeightParts(NamedTuple):
    """Tensors of a weight, as arguments of a kernel.

    Attributes:
        words: int32 words of 16-bit values [N / 16, K / 32, 16, 16], or of codes; see code_packing.py.
        factors, scales, zeros: tensors of `PackedCodes`. None: the weight has none.
    """

    words: Any
    factors: Any = None
    scales: Any = None
    zeros: Any = None


def parts_of_codes(codes: PackedCodes) -> tuple[WeightParts, dict[str, Any]]:
    """Returns the tensors of codes, and the constexpr arguments FORM, GROUP and PER with which this file loads them."""
    # words that hold the scales of 16 rows for one group; with fp4, for 128 values of K
    per = 0 if codes.scales is None else codes.scales[0, 0].numel()
    parts = WeightParts(codes.words, codes.factors, codes.scales, codes.zeros)
    return parts, {"FORM": codes.form, "GROUP": codes.group, "PER": per}


@gluon.constexpr_function
def unit_of(FORM, GROUP, KT):
    """Returns the length of a unit: the number of values of K in one operand, which `mma_v2` multiplies at once."""
    if FORM == "values":
        return KT
    return 32 if GROUP == 32 and FORM == "int4" else 64


@gluon.constexpr_function
def block_of(FORM, BM):
    """Returns the size of a block: the number of rows of x in one product, out of the BM rows of a CTA.

    Codes have blocks of 8 rows. A K tile of codes is converted once and multiplied with each block.
    """
    return BM if FORM == "values" else 8


@gluon.jit
def words_at(at, of, k, ragged: gl.constexpr, policy: gl.constexpr):
    """Loads 32-bit words at offsets `of`, in words, from the address `at`.

    k: mask that is broadcast to the shape of `of`, True for words to load. The other words are 0. ragged: True if the K
    tile may be the last one and not full. If False, `k` is not used and all words are loaded. policy: eviction policy
    of the L2 cache.
    """
    if ragged:
        return gl.load(at + of, mask=k, other=0, eviction_policy=policy)
    else:
        return gl.load(at + of, eviction_policy=policy)


@gluon.constexpr_function
def pieces_of(KT, FORM):
    """Returns the number of 16-word pieces of codes in a row of a K tile. Each is loaded as one tensor [S, R, 16]."""
    return KT * bits_of(FORM) // 512


@gluon.constexpr_function
def groups_of(KT, FORM, GROUP):
    """Returns the number of groups of a K tile whose sums are multiplied by a scale of their own.

    0 without such scales, and for fp4, where the codes are multiplied by scales before the product.
    """
    return KT // GROUP if GROUP > 0 and FORM != "fp4" else 0


@gluon.jit
def k_tile_of(at, of, i: gl.constexpr, inside, RAGGED: gl.constexpr, S: gl.constexpr, KT: gl.constexpr,
            FORM: gl.constexpr, GROUP: gl.constexpr, PER: gl.constexpr):  # fmt: skip
    """Loads words of a K tile: its values or codes, then scales and zero points of its groups, if there are any.

    at, of, inside: addresses, offsets and masks from `starts_of` and `weight_offsets`. i: index of the K tile among the
    K tiles of a warp. RAGGED: True to use the masks. S: distance in K tiles from one K tile of a warp to its next.
    """
    PIECES: gl.constexpr = pieces_of(KT, FORM)
    GROUPS: gl.constexpr = groups_of(KT, FORM, GROUP)
    k_tile = ()
    for p in gl.static_range(1 if FORM == "values" else PIECES):
        k_tile = k_tile + (words_at(at[0], of[0] + (i * S * PIECES + p) * 256, inside[0], RAGGED, "evict_first"),)
    if FORM == "fp4":
        k_tile = k_tile + (words_at(at[1], of[1] + i * (S * PER), inside[1], RAGGED, ""),)
    for g in gl.static_range(GROUPS):
        k_tile = k_tile + (words_at(at[1], of[1] + (i * S * GROUPS + g) * PER, inside[1], RAGGED, ""),)
    if len(at) == 3:
        for g in gl.static_range(GROUPS):
            k_tile = k_tile + (words_at(at[2], of[2] + (i * S * GROUPS + g) * PER, inside[1], RAGGED, ""),)
    return k_tile


@gluon.jit
def rows_in(at, of, first: gl.constexpr, inside, RAGGED: gl.constexpr, KT: gl.constexpr, UNIT: gl.constexpr):
    """Loads words of a block of rows of x, in one tensor for each unit of a K tile.

    The K tile begins `first` words after the address `at`. of: offsets. inside, RAGGED: see `k` and `ragged` of
    `words_at`.
    """
    rows = ()
    for u in gl.static_range(KT // UNIT):
        rows = rows + (words_at(at, of + (first + u * (UNIT // 2)), inside, RAGGED, ""),)
    return rows


@gluon.jit
def starts_of(
    weight, tile, K: gl.constexpr, R: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, PER: gl.constexpr
):
    """Returns the addresses of a weight tile: of its words, and of its scales and zero points, if it has any.

    tile: index of the tile. R: weight rows of a tile.
    """
    at = (weight.words + tile * (R * K * bits_of(FORM) // 32),)
    GROUPS: gl.constexpr = K // 128 if FORM == "fp4" else K // GROUP if GROUP > 0 else 0
    if GROUP > 0:
        at = at + (weight.scales + tile * (R // 16 * GROUPS * PER),)
    if weight.zeros is not None:
        at = at + (weight.zeros + tile * (R // 16 * GROUPS * PER),)
    return at


@gluon.jit
def moved(at, D: gl.constexpr, S: gl.constexpr, KT: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
           PER: gl.constexpr):  # fmt: skip
    """Returns the addresses `at` from `starts_of`, advanced by D K tiles of a warp. For S see `k_tile_of`."""
    GROUPS: gl.constexpr = 1 if FORM == "fp4" else groups_of(KT, FORM, GROUP)
    moved = (at[0] + D * S * pieces_of(KT, FORM) * 256,)
    for i in gl.static_range(1, len(at)):
        moved = moved + (at[i] + D * S * GROUPS * PER,)
    return moved


@gluon.jit
def weight_offsets(tile, N, K: gl.constexpr, S: gl.constexpr, KT: gl.constexpr, R: gl.constexpr, FORM: gl.constexpr,
                   GROUP: gl.constexpr, PER: gl.constexpr, w: gl.constexpr, T: gl.constexpr,
                   RUNS: gl.constexpr = False):  # fmt: skip
    """Returns the offsets of words, scales and zero points from the start of a weight tile.

    Also returns masks of the words and scales that exist in a warp's last K tile.

    tile: index of the tile. R: weight rows of a tile. w: layout of the words. T: number of K tiles of a warp. RUNS:
    True if the K tiles of a warp are consecutive; only for FORM "values".
    """
    s, r, k = _numbers(w, S, R, KT // 2 if FORM == "values" else 16)
    group = _groups_of_rows(tile, r // 16, N, R)
    if FORM == "values":
        W: gl.constexpr = KT // 2
        APART: gl.constexpr = T * W if RUNS else W  # words between the first K tiles of two warps
        STEP: gl.constexpr = W if RUNS else S * W
        of = group * (8 * K) + (s * (APART * 16) + k // 16 * 256 + r % 16 * 16 + k % 16)
        return (of,), ((T - 1) * STEP + s * APART + k < K // 2,)
    else:
        codes = group * (K * bits_of(FORM) // 2) + s * (pieces_of(KT, FORM) * 256) + r % 16 * 16 + k
        inside = (T - 1) * S + s < K // KT
        if FORM == "fp4":
            s, r, k = _numbers(scale_layout(S, R), S, R, 8)
            # lane t of four: each lane has two words of its own, or two lanes share two, or all have the same
            own = k // 2 * (32 // GROUP) // 4 * 2 + k % 2
            scales = _groups_of_rows(tile, r // 16, N, R) * (K // 128 * PER) + s * PER + r % 16 * (PER // 16) + own
            return (codes, scales), (inside, (T - 1) * S + s < K // KT)
        elif GROUP > 0:
            p: gl.constexpr = pairs_layout(S, R // 2)
            s = gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, p)), 1)
            r = gl.expand_dims(gl.arange(0, R // 2, layout=gl.SliceLayout(0, p)), 0)
            pairs = _groups_of_rows(tile, r // 8, N, R) * (K // GROUP * PER) + s * (KT // GROUP * PER) + r % 8 % PER
            return (codes, pairs, pairs), (inside, (T - 1) * S + s < K // KT)
        else:
            return (codes,), (inside,)


@gluon.jit
def _numbers(like: gl.constexpr, S: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Returns 0 .. S - 1, 0 .. R - 1 and 0 .. W - 1: indices along the axes of a tensor [S, R, W] in layout `like`."""
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, like))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, like))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(1, like))), 0), 1)
    return s, r, k


@gluon.jit
def _groups_of_rows(tile, group, N, R: gl.constexpr):
    """Returns `group`, indices of groups of 16 weight rows within a tile, limited to the last group of the weight."""
    return gl.minimum(tile * (R // 16) + group, N // 16 - 1) - tile * (R // 16)


@gluon.jit
def operands_of(k_tile, left: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, KT: gl.constexpr,
                DTYPE: gl.constexpr):  # fmt: skip
    """Returns the operands of a K tile: a 16-bit tensor [S, R, unit] for each unit (`unit_of`), in layout `left`.

    k_tile: result of `k_tile_of`. Codes are converted.
    """
    if FORM == "values":
        return (weight_operand(k_tile[0], DTYPE, left),)
    else:
        PIECES: gl.constexpr = pieces_of(KT, FORM)
        GROUPS: gl.constexpr = groups_of(KT, FORM, GROUP)
        like: gl.constexpr = k_tile[0].type.layout
        zeros = ()
        if len(k_tile) > PIECES + GROUPS and FORM == "int4":
            for g in gl.static_range(GROUPS):
                zeros = zeros + (zeros_of(k_tile[PIECES + GROUPS + g], like),)
        found = ()
        for p in gl.static_range(PIECES):
            own = zeros[p * (len(zeros) // PIECES) : (p + 1) * (len(zeros) // PIECES)]
            pairs = units_of(k_tile[p], k_tile[len(k_tile) - 1], own, FORM, unit_of(FORM, GROUP, KT))
            for u in gl.static_range(len(pairs)):
                found = found + (weight_operand(pairs[u], DTYPE, left),)
        return found


@gluon.jit
def scales_of(k_tile, like: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, KT: gl.constexpr):
    """Returns the scales of a K tile: for each group (`groups_of`) a tensor fp32 [S, R, 1], one scale per weight row.

    The sums of a group are multiplied by them. The result is empty if `groups_of` is 0.

    k_tile: result of `k_tile_of`. like: layout of the sums [S, R, n].
    """
    scales = ()
    for g in gl.static_range(groups_of(KT, FORM, GROUP)):
        scales = scales + (rows_of(k_tile[pieces_of(KT, FORM) + g], gl.float16, like),)
    return scales


@gluon.jit
def less_offset(part, total, FORM: gl.constexpr):
    """Returns `part`, sums of stored codes times x, minus `offset_of` times `total`, the sums of x.

    total: [S, 16, BM], the same in all 16 rows.
    """
    total = gl.convert_layout(for_all(total, part.shape[1]), part.type.layout, assert_trivial=True)
    return gl.fma(gl.full_like(total, -1.0 * offset_of(FORM)), total, part)


@gluon.jit
def block_sums(sums, units, rows, scales, ones_of, right: gl.constexpr, FORM: gl.constexpr, DTYPE: gl.constexpr):
    """Returns `sums` plus the products of a K tile with a block of rows of x.

    sums: (acc,), or (acc, sums of x) if the offset of codes is subtracted after the last K tile. units: operands of the
    K tile. rows: words of x for each unit. scales: result of `scales_of`. ones_of: operand of ones, which sums x.
    """
    acc = sums[0]
    mma: gl.constexpr = acc.type.layout
    S: gl.constexpr = acc.shape[0]
    BLOCK: gl.constexpr = acc.shape[2]
    GROUPS: gl.constexpr = len(scales)
    EACH: gl.constexpr = len(units) // GROUPS if GROUPS > 0 else len(units)
    OFFSET: gl.constexpr = offset_of(FORM) > 0
    total = gl.zeros([S, 16, BLOCK], gl.float32, mma)
    if len(sums) == 2:
        total = sums[1]
    part = acc
    for u in gl.static_range(len(units)):
        if GROUPS > 0 and u % EACH == 0:
            part = gl.zeros(acc.shape, gl.float32, mma)
            total = gl.zeros([S, 16, BLOCK], gl.float32, mma)
        x = row_operand(raised(rows[u], FORM), DTYPE, right)
        part = mma_v2(units[u], x, part)
        if OFFSET:
            total = mma_v2(ones_of, x, total)
        if GROUPS > 0 and u % EACH == EACH - 1:
            if OFFSET:
                part = less_offset(part, total, FORM)
            acc = gl.fma(scales[u // EACH], part, acc)
    if GROUPS == 0:
        acc = part
    if len(sums) == 2:
        return acc, total
    else:
        return (acc,)


@gluon.jit
def no_sums(S: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr, OWN_SUM: gl.constexpr,
            mma: gl.constexpr):  # fmt: skip
    """Returns accumulators [S, R, BLOCK] of zeros, one for each of BLOCKS blocks of rows of x.

    With OWN_SUM, each block also has sums of x [S, 16, BLOCK], zero at first. They are for an offset of codes that is
    subtracted after the last K tile.
    """
    sums = ()
    for _ in gl.static_range(BLOCKS):
        each = (gl.zeros([S, R, BLOCK], gl.float32, mma),)
        if OWN_SUM:
            each = each + (gl.zeros([S, 16, BLOCK], gl.float32, mma),)
        sums = sums + (each,)
    return sums
