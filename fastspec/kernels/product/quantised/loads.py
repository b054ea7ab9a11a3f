"""Loads of the product with quantised weights: codes, scales, zero points, rows of x, and their offsets."""

# ruff: noqa: RUF005  (Triton adds tuples, and knows no starred ones)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.product.few_rows import words_at
from fastspec.kernels.product.quantised.conversion import bits_of, pairs_layout, scale_layout


@gluon.constexpr_function
def pieces_of(KT, FORM):
    """Returns the number of tensors [S, R, 16] of words in which a K tile's codes are loaded."""
    return KT * bits_of(FORM) // 512


@gluon.constexpr_function
def groups_of(KT, FORM, GROUP):
    """Returns the number of scales per row and K tile that are applied to sums.

    0 for fp4: its scales are applied to codes.
    """
    return KT // GROUP if GROUP > 0 and FORM != "fp4" else 0


@gluon.jit
def k_tile_of(at, of, i: gl.constexpr, inside, RAGGED: gl.constexpr, S: gl.constexpr, KT: gl.constexpr,
            FORM: gl.constexpr, GROUP: gl.constexpr, PER: gl.constexpr):  # fmt: skip
    """Loads words of a K tile: its codes, then scales and zero points of its groups, if there are any."""
    PIECES: gl.constexpr = pieces_of(KT, FORM)
    GROUPS: gl.constexpr = groups_of(KT, FORM, GROUP)
    k_tile = ()
    for p in gl.static_range(PIECES):
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
    """Loads words of 8 rows of x for each unit of a K tile, which begins `first` words after `at`."""
    rows = ()
    for u in gl.static_range(KT // UNIT):
        rows = rows + (words_at(at, of + (first + u * (UNIT // 2)), inside, RAGGED, ""),)
    return rows


@gluon.jit
def all_rows_in(at, of, first: gl.constexpr, inside, RAGGED: gl.constexpr, KT: gl.constexpr, UNIT: gl.constexpr):
    """Calls `rows_in` for each 8 rows."""
    rows = ()
    for b in gl.static_range(len(of)):
        rows = rows + rows_in(at, of[b], first, inside, RAGGED, KT, UNIT)
    return rows


@gluon.jit
def starts_of(
    operands, tile, K: gl.constexpr, R: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, PER: gl.constexpr
):
    """Returns the addresses of a tile's codes, and of its scales and zero points if the weight has them."""
    at = (operands.words + tile * (R * K * bits_of(FORM) // 32),)
    GROUPS: gl.constexpr = K // 128 if FORM == "fp4" else K // GROUP if GROUP > 0 else 0
    if GROUP > 0:
        at = at + (operands.scales + tile * (R // 16 * GROUPS * PER),)
    if operands.zeros is not None:
        at = at + (operands.zeros + tile * (R // 16 * GROUPS * PER),)
    return at


@gluon.jit
def moved(at, D: gl.constexpr, S: gl.constexpr, KT: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
           PER: gl.constexpr):  # fmt: skip
    """Returns the addresses `at`, moved on by D K tiles."""
    GROUPS: gl.constexpr = 1 if FORM == "fp4" else groups_of(KT, FORM, GROUP)
    moved = (at[0] + D * S * pieces_of(KT, FORM) * 256,)
    for i in gl.static_range(1, len(at)):
        moved = moved + (at[i] + D * S * GROUPS * PER,)
    return moved


@gluon.jit
def weight_offsets(tile, N, K: gl.constexpr, S: gl.constexpr, KT: gl.constexpr, R: gl.constexpr, FORM: gl.constexpr,
                    GROUP: gl.constexpr, PER: gl.constexpr, w: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """Returns offsets of codes, scales and zero points from the start of a tile, and masks for a ragged last K tile."""
    s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, w))), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, w))), 0), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, w))), 0), 1)
    # rows after the last tile repeat it
    group = gl.minimum(tile * (R // 16) + r // 16, N // 16 - 1) - tile * (R // 16)
    K_TILE: gl.constexpr = pieces_of(KT, FORM) * 256
    codes = group * (K * bits_of(FORM) // 2) + s * K_TILE + r % 16 * 16 + k
    inside = (T - 1) * S + s < K // KT
    if FORM == "fp4":
        lay: gl.constexpr = scale_layout(S, R)
        s = gl.expand_dims(gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, lay))), 1), 2)
        r = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, lay))), 0), 2)
        k = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, lay))), 0), 1)
        group = gl.minimum(tile * (R // 16) + r // 16, N // 16 - 1) - tile * (R // 16)
        # lane t of four: each lane has two words of its own, or two lanes share two, or all have the same
        own = k // 2 * (32 // GROUP) // 4 * 2 + k % 2
        scales = group * (K // 128 * PER) + s * PER + r % 16 * (PER // 16) + own
        return (codes, scales), (inside, (T - 1) * S + s < K // KT)
    elif GROUP > 0:
        p: gl.constexpr = pairs_layout(S, R // 2)
        s = gl.expand_dims(gl.arange(0, S, layout=gl.SliceLayout(1, p)), 1)
        r = gl.expand_dims(gl.arange(0, R // 2, layout=gl.SliceLayout(0, p)), 0)
        group = gl.minimum(tile * (R // 16) + r // 8, N // 16 - 1) - tile * (R // 16)
        pairs = group * (K // GROUP * PER) + s * (KT // GROUP * PER) + r % 8 % PER
        return (codes, pairs, pairs), (inside, (T - 1) * S + s < K // KT)
    else:
        return (codes,), (inside,)
