"""Converts codes to operands of the tensor core in registers, by masks and shifts.

`common.code_packing` describes the bits of a code.

A unit is the part of K of one operand: 64 values, or 32 if groups of 32 have sums of their own. Words are int32. A pair
is a word of two bf16 values. Unless said otherwise, R is a number of weight rows, and S a number of splits of K.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.product.epilogue import times_gamma, unpacked

# pairs of bf16: 2^64, and 2^60 for codes that are four bits higher
UP = gl.constexpr(0x5F805F80)
UP_LESS = gl.constexpr(0x5D805D80)
ONE = gl.constexpr(0x00010001)  # pair of the bf16 2^-133, which stands for 1 as in converted integer codes
# pairs of bf16: -1 and -8 times 2^-69, as which 4-bit codes multiplied by 2^64 represent 1 and 8
LESS_ONE = gl.constexpr(-0x62FF6300)  # 0x9D009D00
LESS_EIGHT = gl.constexpr(-0x617F6180)  # 0x9E809E80


@gluon.constexpr_function
def bits_of(FORM):
    """Returns the number of bits of a code of `FORM`; 16 for "values"."""
    return 16 if FORM == "values" else 4 if FORM in ("int4", "fp4", "mxfp4") else 8


@gluon.constexpr_function
def offset_of(FORM):
    """Returns the offset of FORM: a stored code minus the value that it stands for.

    Products are computed with stored codes. Then offset * (sum of x) is subtracted.
    """
    return 128 if FORM == "off8" else 0


@gluon.constexpr_function
def words_layout(S, R):
    """Returns the layout of words [S, R, 16]: a lane has four neighbouring words in each of rows g and g + 8.

    These are the rows of a lane in the left operand of mma.
    """
    held = [[0, 0, 1], [0, 0, 2]] + [[0, 8 << bit, 0] for bit in range((R // 8).bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << bit, 0, 0] for bit in range(S.bit_length() - 1)]
    return gl.DistributedLinearLayout(held, lanes, warps, [], [S, R, 16])


@gluon.constexpr_function
def scale_layout(S, R):
    """Returns the layout of scales, words [S, R, 8]: a lane has two neighbouring words of each of its rows.

    The rows of a lane are those in `words_layout`.
    """
    held = [[0, 0, 1]] + [[0, 8 << bit, 0] for bit in range((R // 8).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << bit, 0, 0] for bit in range(S.bit_length() - 1)]
    return gl.DistributedLinearLayout(held, lanes, warps, [], [S, R, 8])


@gluon.constexpr_function
def pairs_layout(S, P):
    """Returns the layout of words [S, P], one for each pair of weight rows g and g + 8.

    Lane 4 g + t, t from 0 to 3, has the word of pair g of each 16 rows.
    """
    held = [[0, 8 << bit] for bit in range((P // 8).bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    warps = [[1 << bit, 0] for bit in range(S.bit_length() - 1)]
    return gl.DistributedLinearLayout(held, lanes, warps, [], [S, P])


@gluon.jit
def _permuted(words, CONTROL: gl.constexpr):
    """Permutes the bytes of each 32-bit word. CONTROL: the order as in PTX `prmt`, one hexadecimal digit per byte."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, " + CONTROL + ";", "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def code_halves(words, FORM: gl.constexpr, HALF: gl.constexpr):
    """Converts words of codes [S, R, 16] to bf16 pairs of two blocks of 32 values of K, each [S, R, 16].

    HALF: 0 or 1, for 4-bit codes: blocks 0 and 1, or 2 and 3, of the four blocks in a word.
    """
    if FORM == "fp8":
        first = words & -0x780F7810  # 0x87F087F0
        second = ((words << 4) & -0x7F0F7F10) | ((words >> 4) & 0x07000700)  # 0x80F080F0
    elif FORM == "int8":
        first = words & -0x7F807F81  # 0x807F807F
        second = _permuted(words, "0x2301") & -0x7F807F81
    elif FORM == "off8":
        first = words & 0x00FF00FF
        second = (words >> 8) & 0x00FF00FF
    elif FORM == "int4":
        if HALF == 1:
            words = words >> 8
        first = words & 0x000F000F
        second = words & 0x00F000F0
    elif HALF == 0:  # fp4: sign at 15, the other three bits at 8..6
        first = words & -0x7E3F7E40  # 0x81C081C0
        second = (words << 3) & -0x7E3F7E40
    else:
        first = ((words << 1) & -0x7FFF8000) | ((words >> 3) & 0x01C001C0)  # 0x80008000
        second = ((words << 2) & -0x7FFF8000) | ((words << 6) & 0x01C001C0)
    return first, second


@gluon.jit
def joined_halves(first, second):
    """Joins two consecutive blocks of 32 values of K to one block of 64 values, in the order of K.

    first, second: bf16 pairs [S, R, 16], such as the results of `code_halves`. The result has pairs [S, R, 32].
    """
    S: gl.constexpr = first.shape[0]
    R: gl.constexpr = first.shape[1]
    return gl.reshape(gl.permute(gl.join(first, second), (0, 1, 3, 2)), [S, R, 32])


@gluon.jit
def _narrow(pairs):
    """Permutes pairs [S, R, 16] of a block of 32 values into the order of K.

    A lane has 4 values of each half of the block.
    """
    S: gl.constexpr = pairs.shape[0]
    R: gl.constexpr = pairs.shape[1]
    return gl.reshape(gl.permute(gl.reshape(pairs, [S, R, 4, 2, 2]), (0, 1, 3, 2, 4)), [S, R, 16])


@gluon.jit
def _four_times(words):
    """Repeats each word of [S, R, 4] four times: [S, R, 16]. No data moves between lanes."""
    twice = gl.join(words, words)
    return gl.reshape(gl.join(twice, twice), [words.shape[0], words.shape[1], 16])


@gluon.jit
def _scaled(pairs, scales, CONTROL: gl.constexpr):
    """Multiplies pairs [S, R, 16] of fp4 values by bf16 scales in words [S, R, 4].

    CONTROL: "0x1010" for the scale in the lower half of a word, "0x3232" for the upper half.

    The products are exact, because both factors have few bits.
    """
    factors = _four_times(_permuted(scales, CONTROL))
    factors = gl.convert_layout(factors, pairs.type.layout, assert_trivial=True)
    return times_gamma(pairs, factors, gl.bfloat16)


@gluon.jit
def _less(pairs, less, HIGH: gl.constexpr):
    """Subtracts zero points from pairs of converted 4-bit codes, exactly.

    Codes are first multiplied by 2^64, or by 2^60 if HIGH (codes four bits higher). A code of 1 is then 2^-69. So
    `less` has pairs of bf16 -2^-69 * zero point.
    """
    return gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pairs, gl.full_like(pairs, UP_LESS if HIGH else UP), less],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _zero_of(words, zeros, i: gl.constexpr):
    """Returns the argument `less` of `_less` for block i of four blocks of 32 values, in the shape of `words`.

    zeros: result of `zeros_of` [S, R, 1] for each group. Empty: all zero points are 8.
    """
    if len(zeros) == 0:
        return gl.full_like(words, LESS_EIGHT)
    else:
        return gl.broadcast(zeros[i * len(zeros) // 4], words)[0]


@gluon.jit
def units_of(words, scales, zeros, FORM: gl.constexpr, UNIT: gl.constexpr):
    """Converts words of codes [S, R, 16] to bf16 pairs [S, R, UNIT / 2] for each unit, in the order of K.

    scales: for fp4, words [S, R, 8]; else unused. zeros: for int4, the result of `zeros_of` for each group; empty if
    all zero points are 8.
    """
    first, second = code_halves(words, FORM, 0)
    if bits_of(FORM) == 8:
        return (joined_halves(first, second),)
    else:
        third, fourth = code_halves(words, FORM, 1)
        if FORM == "fp4":
            low, high = gl.split(gl.reshape(scales, [words.shape[0], words.shape[1], 4, 2]))
            first, second = _scaled(first, low, "0x1010"), _scaled(second, low, "0x3232")
            third, fourth = _scaled(third, high, "0x1010"), _scaled(fourth, high, "0x3232")
        else:
            first = _less(first, _zero_of(words, zeros, 0), False)
            second = _less(second, _zero_of(words, zeros, 1), True)
            third = _less(third, _zero_of(words, zeros, 2), False)
            fourth = _less(fourth, _zero_of(words, zeros, 3), True)
        if UNIT == 32:
            return _narrow(first), _narrow(second), _narrow(third), _narrow(fourth)
        else:
            return joined_halves(first, second), joined_halves(third, fourth)


@gluon.jit
def ones(S: gl.constexpr, lay: gl.constexpr):
    """Returns bf16 pairs [S, 16, 32] of 2^-133, which stands for 1 as in converted codes.

    Their product with x is the sum of x. lay: layout of words [S, 16, 16].
    """
    one = gl.full([S, 16, 16], ONE, gl.int32, layout=lay)
    return joined_halves(one, one)


@gluon.jit
def raised(words, FORM: gl.constexpr):
    """Multiplies words of x by 2^64, exactly, if FORM has 8-bit codes. Else returns them unchanged.

    Converted 8-bit codes are too small by a power of two, so x is multiplied. With 4-bit codes, the converted codes
    themselves are multiplied.
    """
    if bits_of(FORM) == 8:
        return raised_rows(words)
    else:
        return words


@gluon.jit
def raised_rows(words):
    """Multiplies the two bf16 values in each word of x by 2^64, exactly."""
    return times_gamma(words, gl.full_like(words, UP), gl.bfloat16)


@gluon.jit
def for_all(sums, R: gl.constexpr):
    """Repeats sums [S, 16, BM], which have 16 equal rows, to [S, R, BM]. No data moves between lanes."""
    for _ in gl.static_range(4):
        if sums.shape[1] < R:
            both = gl.permute(gl.join(sums, sums), (0, 3, 1, 2))
            sums = gl.reshape(both, [both.shape[0], both.shape[1] * both.shape[2], both.shape[3]])
    return sums


@gluon.jit
def _rows_of_pairs(low, high, like: gl.constexpr):
    """Joins 32-bit values `low` of weight rows g and `high` of rows g + 8, each [S, R / 2], to [S, R, 1].

    like: layout of the tensors [S, R, n] with which the result is used.
    """
    S: gl.constexpr = low.shape[0]
    P: gl.constexpr = low.shape[1]
    both = gl.permute(gl.reshape(gl.join(low, high), [S, P // 8, 8, 2]), (0, 1, 3, 2))
    rows = gl.convert_layout(gl.reshape(both, [S, 2 * P]), gl.SliceLayout(2, like), assert_trivial=True)
    return gl.expand_dims(rows, 2)


@gluon.jit
def rows_of(words, KIND: gl.constexpr, like: gl.constexpr):
    """Unpacks words [S, R / 2] to fp32 [S, R, 1]. A word has the values of weight rows g and g + 8.

    A 32-bit word has two values of dtype KIND, a 64-bit word two fp32 values. like: layout of the tensors [S, R, n]
    with which the result is used.
    """
    held: gl.constexpr = words.dtype
    if gl.int64 == held:
        low = words.to(gl.int32).to(gl.float32, bitcast=True)
        high = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
        return _rows_of_pairs(low, high, like)
    else:
        low, high = unpacked(words, KIND)
        return _rows_of_pairs(low, high, like)


@gluon.jit
def zeros_of(words, like: gl.constexpr):
    """Converts zero points of one group to an element of `zeros` of `units_of`: int32 [S, R, 1].

    words: [S, R / 2], pairs of the bf16 zero points of weight rows g and g + 8. like: layout of the codes.
    """
    less = times_gamma(words, gl.full_like(words, LESS_ONE), gl.bfloat16)
    return _rows_of_pairs(_permuted(less, "0x1010"), _permuted(less, "0x3232"), like)
