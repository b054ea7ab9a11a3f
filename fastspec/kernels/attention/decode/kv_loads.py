"""Loads of K and V as 32-bit words for mma_batch.py, and the conversion of positions to indices of splits.

The loop of mma_batch.py keeps K and V in registers between iterations, as int32 words of two or four values. The
compiler would unpack each 16-bit value into a register of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.attention.decode.mma_tiles import KEYS, _along, key_layout, value_layout


@gluon.jit
def split_of(position, SPLIT_SIZES: gl.constexpr):
    """Returns the index of the split that contains a position. SPLIT_SIZES is the result of `plan.split_sizes`."""
    split = position // SPLIT_SIZES[0][1]
    for i in gl.static_range(1, len(SPLIT_SIZES)):
        beyond = SPLIT_SIZES[i][2] + (position - SPLIT_SIZES[i][0]) // SPLIT_SIZES[i][1]
        split = gl.where(position >= SPLIT_SIZES[i][0], beyond, split)
    return split


@gluon.jit
def start_of(split, SPLIT_SIZES: gl.constexpr):
    """Returns the first position of the split with index `split`. SPLIT_SIZES is the result of `plan.split_sizes`."""
    start = split * SPLIT_SIZES[0][1]
    for i in gl.static_range(1, len(SPLIT_SIZES)):
        start = gl.where(
            split >= SPLIT_SIZES[i][2], SPLIT_SIZES[i][0] + (split - SPLIT_SIZES[i][2]) * SPLIT_SIZES[i][1], start
        )
    return start


@gluon.jit
def words_of(pointer):
    """Casts a pointer to the KV cache to an int32 pointer, so that values are loaded and kept as packed words."""
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def halves(words, DTYPE: gl.constexpr):
    """Unpacks int32 words [A, B, C] of two values to 16-bit values [A, B, C, 2] of DTYPE.

    In the interpreter DTYPE may be fp32. A word is then one value, and the result is [A, B, C, 1].
    """
    if DTYPE.primitive_bitwidth == 32:
        return gl.expand_dims(words.to(DTYPE, bitcast=True), 3)
    else:
        low = words.to(gl.int16).to(DTYPE, bitcast=True)
        return gl.join(low, (words >> 16).to(gl.int16).to(DTYPE, bitcast=True))


@gluon.constexpr_function
def _widening(DTYPE, TO, OF, CONTROL):
    """Returns PTX that converts two of the four e4m3 numbers in register OF to two DTYPE numbers in register TO.

    `prmt` moves the two bytes that CONTROL selects, with their signs. The bits of an e4m3 number are then shifted to
    the exponent field of DTYPE. Read as DTYPE, they are the number times 2^-120 (bf16) or 2^-8 (fp16). A multiplication
    corrects this.

        e4m3   s eeee mmm
        bf16   s 0000eeee mmm0000     fp16   s 0eeee mmm0000000
    """
    brain = str(DTYPE) in ("bf16", "bfloat16")
    shift, mask, factor = (4, "0x87F087F0", "0x7B807B80") if brain else (7, "0xBF80BF80", "0x5C005C00")
    kind = "bf16x2" if brain else "f16x2"
    return (
        "{ .reg .b32 a, f; "
        f"prmt.b32 a, {OF}, {OF}, {CONTROL}; shl.b32 a, a, {shift}; and.b32 a, a, {mask}; "
        f"mov.b32 f, {factor}; mul.rn.{kind} {TO}, a, f; }}"
    )


@gluon.constexpr_function
def widening_of_four(DTYPE):
    """Returns PTX that converts a 32-bit word of four e4m3 numbers ($2) to two words ($0, $1) of two DTYPE numbers."""
    return _widening(DTYPE, "$0", "$2", "0x9180") + " " + _widening(DTYPE, "$1", "$2", "0xB3A2")


@gluon.jit
def _two_of_four(words, DTYPE: gl.constexpr, CONTROL: gl.constexpr):
    return gl.inline_asm_elementwise(
        _widening(DTYPE, "$0", "$1", CONTROL), "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def widened(words, DTYPE: gl.constexpr):
    """Converts 32-bit words [A, B, C] of four e4m3 numbers to words [A, B, 2 C] of two DTYPE numbers.

    The conversion is exact, except that NaN becomes +-480.
    """
    two = gl.join(_two_of_four(words, DTYPE, "0x9180"), _two_of_four(words, DTYPE, "0xB3A2"))
    return gl.reshape(two, [words.shape[0], words.shape[1], 2 * words.shape[2]])


@gluon.jit
def _byte(words, PLACE: gl.constexpr, CACHED: gl.constexpr):
    """Converts byte number PLACE (0..3) of each 32-bit word from e4m3 to fp32. Only the interpreter uses it.

    CACHED is the e4m3 dtype.
    """
    return ((words >> (8 * PLACE)) & 255).to(gl.uint8).to(CACHED, bitcast=True).to(gl.float32)


@gluon.jit
def values_of(words, N: gl.constexpr, DTYPE: gl.constexpr, CACHED: gl.constexpr):
    """Unpacks int32 words of K or V to values [S, KEYS, N] of DTYPE. CACHED is the dtype of the packed values."""
    if CACHED.primitive_bitwidth == 8:
        if DTYPE.primitive_bitwidth == 32:
            even = gl.join(_byte(words, 0, CACHED), _byte(words, 2, CACHED))
            odd = gl.join(_byte(words, 1, CACHED), _byte(words, 3, CACHED))
            return gl.reshape(gl.join(even, odd), [words.shape[0], KEYS, N])
        else:
            return gl.reshape(halves(widened(words, DTYPE), DTYPE), [words.shape[0], KEYS, N])
    else:
        return gl.reshape(halves(words, DTYPE), [words.shape[0], KEYS, N])


@gluon.jit
def page_of(cache, first, s, key, PAGE_SIZE: gl.constexpr):
    """Loads the numbers of the cache pages, int32, of the keys at positions first + s * KEYS + key.

    `s` and `key` broadcast against each other. `cache` is a result of `cache_of_row`. If PAGE_SIZE is a multiple of
    KEYS, all keys of one s are in one page, and the result does not depend on `key`.
    """
    at = first + s * KEYS
    if PAGE_SIZE % KEYS != 0:
        at = at + key
    # bypasses L1, as all loads before the kernel's wait do: L1 may hold old contents of this memory
    page = gl.load(cache.block_table + gl.minimum(at // PAGE_SIZE, cache.table_width - 1), cache_modifier=".cg")
    return gl.minimum(gl.maximum(page, 0), cache.num_pages - 1).to(gl.int32)


@gluon.jit
def _slot(page, first, s, key, kv_head, WORDS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Returns two offsets in 32-bit words. Their sum is the offset of each key's head in the cache.

    The first offset is int64. The second is int32, an offset within a page. `page` is the result of `page_of` for the
    same first, s and key. WORDS is the number of words of one head.
    """
    if PAGE_SIZE % KEYS != 0:
        within = (first + s * KEYS + key) % PAGE_SIZE
        return ((page.to(gl.int64) * PAGE_SIZE + within) * KV_HEADS + kv_head) * WORDS, key * 0
    else:
        within = (first + s * KEYS) % PAGE_SIZE
        return ((page.to(gl.int64) * PAGE_SIZE + within) * KV_HEADS + kv_head) * WORDS, key * (KV_HEADS * WORDS)


@gluon.jit
def key_pages(
    cache, first, WORDS: gl.constexpr, PAGE_SIZE: gl.constexpr, S: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Loads the cache page numbers of S * KEYS keys from position `first` on, in the layout for `load_keys`."""
    layout: gl.constexpr = key_layout(gl.num_warps(), S, WORDS // 2, 8 * WORDS // D)
    return page_of(cache, first, _along(S, 0, layout), _along(KEYS, 1, layout), PAGE_SIZE)


@gluon.jit
def value_pages(
    cache, first, WORDS: gl.constexpr, PAGE_SIZE: gl.constexpr, S: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Loads the cache page numbers of S * KEYS keys from position `first` on, in the layout for `load_values`."""
    layout: gl.constexpr = value_layout(gl.num_warps(), S, WORDS, 8 * WORDS // D)
    return page_of(cache, first, _along(S, 0, layout), _along(KEYS, 1, layout), PAGE_SIZE)


@gluon.jit
def load_keys(
    words_ptr,
    page,
    first,
    kv_head,
    low,
    high,
    old,  # value for keys outside low .. high-1; None: 0
    WORDS: gl.constexpr,  # words of one head
    KV_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    S: gl.constexpr,
    D: gl.constexpr,
):
    """Loads S * KEYS keys of a KV head from position `first` on, as 32-bit words.

    Keys outside positions low .. high - 1 are not loaded. Cache slots from position `high` on may hold NaN, which must
    not enter a product.

    Args:
        words_ptr: the cache of K as int32 words.
        page: result of `key_pages`.
        first: position of the first key.
        kv_head: index of the KV head.
        low, high: bounds of the positions to load.
        old: an earlier result, which has the keys outside these bounds. None: they are 0.

    Returns:
        The first and the second half of the head, each int32 [S, KEYS, WORDS / 2].
    """
    layout: gl.constexpr = key_layout(gl.num_warps(), S, WORDS // 2, 8 * WORDS // D)
    s, key = _along(S, 0, layout), _along(KEYS, 1, layout)
    slot, offset = _slot(page, first, s, key, kv_head, WORDS, KV_HEADS, PAGE_SIZE)
    at = words_ptr + slot + (offset + _along(WORDS // 2, 2, layout))
    number = first + s * KEYS + key
    inside = (number >= low) & (number < high)
    if old is None:
        first_half = gl.load(at, mask=inside, other=0, cache_modifier=".cg")
        return first_half, gl.load(at + WORDS // 2, mask=inside, other=0, cache_modifier=".cg")
    else:
        return gl.load(at, mask=inside, other=old[0]), gl.load(at + WORDS // 2, mask=inside, other=old[1])


@gluon.jit
def load_values(
    words_ptr,
    page,
    first,
    kv_head,
    low,
    high,
    old,
    WORDS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    S: gl.constexpr,
    D: gl.constexpr,
):
    """Loads V for S * KEYS keys of a KV head as int32 words [S, KEYS, WORDS].

    `page` is the result of `value_pages`. For the other arguments see `load_keys`.
    """
    layout: gl.constexpr = value_layout(gl.num_warps(), S, WORDS, 8 * WORDS // D)
    s, key = _along(S, 0, layout), _along(KEYS, 1, layout)
    slot, offset = _slot(page, first, s, key, kv_head, WORDS, KV_HEADS, PAGE_SIZE)
    at = words_ptr + slot + (offset + _along(WORDS, 2, layout))
    number = first + s * KEYS + key
    inside = (number >= low) & (number < high)
    if old is None:
        return gl.load(at, mask=inside, other=0, cache_modifier=".cg")
    else:
        return gl.load(at, mask=inside, other=old)
