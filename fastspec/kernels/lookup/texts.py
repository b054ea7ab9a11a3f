"""Device code that searches a table of texts for a row's last tokens.

A table is a tuple with the tensors of a `TextTable`, then the owner of each batch row. The order is: tokens, texts,
owners, keys, places, factors, lengths, owner of each batch row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.reference.lookup import LOOKED_AT

_LOOKED_AT = tl.constexpr(LOOKED_AT)
_PIVOTS = tl.constexpr(64)  # number of keys that a step of the search in a sorted table reads


@triton.jit
def _keys_up_to(keys_ptr, count, key, R: tl.constexpr):
    """Counts the keys of a table that are less than or equal to each of R keys `key`. Returns int64 [R].

    The table has `count` keys at keys_ptr in ascending order.
    """
    low = tl.zeros((R,), tl.int64)
    high = low + count
    pivot = tl.arange(0, _PIVOTS)[None, :]
    while tl.max(high - low, axis=0) > 0:
        step = tl.maximum((high - low + _PIVOTS) // (_PIVOTS + 1), 1)
        at = low[:, None] + (pivot + 1) * step[:, None] - 1
        inside = at < high[:, None]
        passed = inside & (tl.load(keys_ptr + at, mask=inside, other=0) <= key[:, None])
        number = tl.sum(passed.to(tl.int64), axis=1)
        high = tl.minimum(high, low + (number + 1) * step - 1)
        low += number * step
    return low


@triton.jit
def _occurrences(
    table, owner, row_ptr, length, capacity,
    RUNGS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Finds the latest M = _LOOKED_AT occurrences of a row's last tokens, as `reference.lookup._occurrences`.

    Args:
        table: tuple of tensors, see the module's docstring.
        owner: owner whose texts the row may use.
        row_ptr, length: tokens of the row, and their number.
        capacity: number of tokens of the table.
        RUNGS: number of lengths n for which the table indexes n-grams.
        SHORTEST, LONGEST: the smallest and the largest of these lengths.
        R, W: RUNGS and LONGEST, rounded up to powers of two.

    Returns:
        Three tensors [M]: the index in the table of the token after each occurrence, the index of its text, and the
        number of matching tokens. This number is 0 if there is no such occurrence.
    """
    rung = tl.arange(0, R)
    length_of = tl.load(table[6] + rung, mask=rung < RUNGS, other=0)
    sums, hashed = tl.full((), 0, tl.int64), tl.zeros((R,), tl.int64)
    for back in tl.static_range(LONGEST):
        token = tl.load(row_ptr + length - 1 - back, mask=length > back, other=0)
        sums += (token + 1) * tl.load(table[5] + back)
        hashed = tl.where(length_of == back + 1, sums, hashed)
    factor = table[5] + LONGEST
    key = hashed + (owner + 1) * tl.load(factor) + length_of * tl.load(factor + 1)
    last = _keys_up_to(table[3], capacity * RUNGS, key, R) - 1
    hit = (length_of > 0) & (length_of <= length) & (last >= 0)
    hit &= tl.load(table[3] + last, mask=last >= 0, other=0) == key
    longest = rung == tl.max(tl.where(hit, rung + 1, 0), axis=0) - 1
    index = tl.sum(tl.where(longest, last + 1, 0), axis=0) - 1 - tl.arange(0, _LOOKED_AT)
    wanted = tl.sum(tl.where(longest, key, 0), axis=0)
    valid = (index >= 0) & (tl.load(table[3] + index, mask=index >= 0, other=0) == wanted)
    valid &= tl.max(hit.to(tl.int32), axis=0) > 0
    place = tl.load(table[4] + index, mask=index >= 0, other=0)
    text = tl.load(table[1] + place)
    back = tl.arange(0, W)[None, :]
    before = place[:, None] - 1 - back
    ours = tl.load(row_ptr + length - 1 - back, mask=back < length, other=-1)
    same = (before >= 0) & (back < length) & (back < LONGEST)
    same &= tl.load(table[0] + before, mask=before >= 0, other=-1) == ours
    same &= tl.load(table[1] + before, mask=before >= 0, other=-1) == text[:, None]
    run = tl.min(tl.where(same, W, back), axis=1).to(tl.int64)
    valid &= (tl.load(table[2] + place) == owner) & (text >= 0) & (run >= SHORTEST)
    return place, text, tl.where(valid, run, 0)


@triton.jit
def look_up_text(
    table, owner, row_ptr, length, capacity, k, drafts_ptr,
    RUNGS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Searches a table of texts for a row's last tokens, as `reference.lookup.look_up_text`, and writes draft tokens.

    Returns the number of valid draft tokens, at most k, and the number of matching tokens. The draft tokens are written
    to drafts_ptr. K is a power of two >= k. For the other arguments see `_occurrences`.
    """
    place, text, run = _occurrences(table, owner, row_ptr, length, capacity, RUNGS, SHORTEST, LONGEST, R, W)
    best = tl.max(run, axis=0)
    counted = (run == best) & (best > 0)
    at = tl.arange(0, K)[None, :]
    after = place[:, None] + at
    alive = counted[:, None] & (at < k) & (after < capacity)
    alive &= tl.load(table[1] + after, mask=after < capacity, other=-1) == text[:, None]
    token = tl.load(table[0] + after, mask=after < capacity, other=0)
    both = alive[:, None, :] & alive[None, :, :] & (token[:, None, :] == token[None, :, :])
    common = tl.min(tl.where(both, K, at[None, :, :]), axis=2)  # [M, M] number of tokens that two occurrences share
    shared = tl.sum((common[:, :, None] > at[None, :, :]).to(tl.int64), axis=1)  # [M, K] occurrences that agree so far
    order = tl.arange(0, _LOOKED_AT)
    score = tl.where(counted, tl.sum(tl.where(at < k, shared, 0), axis=1) * _LOOKED_AT + _LOOKED_AT - order, 0)
    chosen = (order == tl.argmax(score, axis=0))[:, None]
    enough = tl.sum(tl.where(chosen, shared, 0), axis=0) * 4 >= tl.sum(counted.to(tl.int64), axis=0)
    enough &= tl.sum((chosen & alive).to(tl.int32), axis=0) > 0
    place_of = tl.arange(0, K)
    count = tl.minimum(tl.min(tl.where(enough, K, place_of), axis=0), k).to(tl.int64)
    tl.store(drafts_ptr + place_of, tl.sum(tl.where(chosen, token, 0), axis=0), mask=place_of < k)
    return count, tl.where(count > 0, best, 0)
