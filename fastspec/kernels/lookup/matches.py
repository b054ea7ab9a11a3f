"""Device code that searches a row itself and its prediction for an earlier occurrence of the row's last tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.reference.lookup import ANCHOR, ANCHOR_MOST, GAP

_GAP, _ANCHOR, _ANCHOR_MOST = (tl.constexpr(each) for each in (GAP, ANCHOR, ANCHOR_MOST))
PLACE_BITS = 27  # number of bits for a place in a score, and for a distance; the rest is for the matching tokens
_PLACE_BITS, _ABOVE, _LAST = (tl.constexpr(each) for each in (PLACE_BITS, 2 * PLACE_BITS, (1 << PLACE_BITS) - 1))
_AT_ONCE = tl.constexpr(4)  # number of tokens that `_runs` loads before it waits for them


@triton.jit
def _runs(text_ptr, place, alive, row_ptr, last, limit):
    """Returns the number of tokens before each place of a text that equal the tokens of a row up to position `last`.

    The equal tokens are text[place - 1 - i] == row[last - i] for i = 0, 1, .. up to the first difference. The result is
    int32.

    Args:
        text_ptr: tokens of the text.
        place: indices in the text, int32 of any shape.
        alive: True where a result is wanted, in the shape of `last - place`. Other results are 0.
        row_ptr: tokens of the row.
        last: positions in the row, int32 of a shape that broadcasts with `place`.
        limit: largest length.
    """
    run = tl.zeros_like(alive.to(tl.int32))
    back = 0
    left = 1
    while (back < limit) & (left > 0):
        for _ in tl.static_range(_AT_ONCE):  # these loads do not wait for each other
            theirs = tl.load(text_ptr + place - 1 - back, mask=alive & (place > back), other=-1).to(tl.int32)
            ours = tl.load(row_ptr + last - back, mask=last >= back, other=-2).to(tl.int32)
            alive = alive & (theirs == ours) & (back < limit)
            run += alive.to(tl.int32)
            back += 1
        left = tl.max(alive.to(tl.int32))
    return run


@triton.jit
def _score(key, distance, place):
    """Packs three int32 into an int64 score that is larger for a larger key, then a smaller distance, then place."""
    near = _LAST - distance
    first = _LAST - place
    return (key.to(tl.int64) << _ABOVE) | (near.to(tl.int64) << _PLACE_BITS) | first.to(tl.int64)


@triton.jit
def _place_of(score):
    """Returns the place of a score of `_score`, int64."""
    return _LAST - (score & _LAST)


@triton.jit
def _anchor_key(text_ptr, expected, ends, row_ptr, length, least, DEPTH: tl.constexpr):
    """Returns a number for each place `expected`: larger for a longer anchor, then for a smaller gap; 0 without one.

    An anchor ends g = 1 .. GAP tokens before the place, and the row without its last g tokens ends with it. So the
    same pairs of tokens are compared for every g.

    Args:
        text_ptr, ends: see `follow`.
        expected: places, int32 [N].
        row_ptr, length: see `follow`.
        least: smallest number of tokens of an anchor.
        DEPTH: number of last tokens of the row that are compared.
    """
    run = tl.zeros_like(expected)
    key = tl.zeros_like(expected)
    for back in tl.static_range(DEPTH - 1, 0, -1):
        theirs = tl.load(text_ptr + expected - 1 - back, mask=(expected > back) & (expected < ends), other=-1).to(
            tl.int32
        )
        ours = tl.load(row_ptr + length - 1 - back, mask=length > back, other=-2).to(tl.int32)
        run = tl.where(theirs == ours, run + 1, 0)
        if back <= _GAP:
            long = tl.minimum(run, _ANCHOR_MOST) * (_GAP + 1) + _GAP - back
            key = tl.where(run >= least, tl.maximum(key, long), key)
    return key


@triton.jit
def _expected_place(text_ptr, ends, room, row_ptr, length, otherwise, min_n, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Computes step 1 of `reference.lookup.follow`: the expected place of the row's next token in a text.

    Returns the place, and 1 if it comes from an anchor, else 0. For the arguments see `follow`.
    """
    best = tl.full((), 0, tl.int64)
    for start in range(0, ends, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = _anchor_key(text_ptr, place, ends, row_ptr, length, _ANCHOR, _GAP + _ANCHOR)
        if tl.max(key, axis=0) > 0:  # anchors are rare: their lengths are computed only if there is one
            key = _anchor_key(text_ptr, place, ends, row_ptr, length, tl.maximum(min_n, _ANCHOR), DEPTH)
            score = _score(key, tl.minimum(tl.abs(place - otherwise), room), place)
            best = tl.maximum(best, tl.max(tl.where(key > 0, score, 0), axis=0))
    expected = tl.where(best > 0, _place_of(best), otherwise).to(tl.int32)
    begins = (otherwise <= _GAP) & (otherwise < ends)
    return expected, ((best > 0) | begins).to(tl.int32)


@triton.jit
def follow(text_ptr, ends, room, row_ptr, length, otherwise, min_n, max_n, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Finds the place in a text at which a row continues, as `reference.lookup.follow`.

    Returns the place, and the number of tokens that match before it; 0 if no place was found. Both are int64.

    Args:
        text_ptr, ends: tokens of the text, and their number, int32.
        room: number of columns of the tensor with the text, int32.
        row_ptr, length: tokens of the row, and their number, int32.
        otherwise: expected place if no match tells more, `RepeatedText.expected`, int32.
        min_n, max_n: see `LookUp`.
        BLOCK: number of places that are compared at a time.
        DEPTH: GAP and the largest number of tokens of an anchor that count, which is at least min_n.
    """
    expected, found = _expected_place(text_ptr, ends, room, row_ptr, length, otherwise, min_n, BLOCK, DEPTH)
    best = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, ends, BLOCK):
        place = start + tl.arange(0, BLOCK)
        run = _runs(text_ptr, place, (place >= 1) & (place < ends), row_ptr, length - 1, max_n)
        distance = tl.abs(place - expected)
        near = (found > 0) & (run >= 1) & (distance <= _GAP)
        score = _score(run, tl.minimum(distance, room), place)
        best = tl.maximum(best, tl.where((run >= min_n) | near, score, 0))
    top = tl.max(best, axis=0)
    matched = tl.where(top > 0, top >> _ABOVE, found.to(tl.int64))
    begin = tl.where(top > 0, _place_of(top), expected.to(tl.int64))
    return tl.minimum(tl.maximum(begin, 0), room - 1), tl.where(ends > 0, matched, 0)


@triton.jit
def copy_of_row(row_ptr, length, begin, matched, k, drafts_ptr, K: tl.constexpr):
    """Writes k tokens of a row from position `begin` on; if fewer follow, these are repeated. K: a power of two >= k.

    Returns the number of valid draft tokens, and the number of matching tokens.
    """
    at = tl.arange(0, K)
    token = tl.load(row_ptr + begin + at % tl.maximum(length - begin, 1), mask=at < k, other=0)
    tl.store(drafts_ptr + at, token, mask=at < k)
    return tl.where(matched > 0, k, 0).to(tl.int64), matched


@triton.jit
def copy_of_prediction(text_ptr, predicted, begin, matched, k, drafts_ptr, K: tl.constexpr):
    """Writes up to k tokens of a prediction of `predicted` tokens, from place `begin` on. K: a power of two >= k.

    Returns the number of valid draft tokens, and the number of matching tokens; 0 without draft tokens.
    """
    count = tl.where(matched > 0, tl.minimum(tl.maximum(predicted - begin, 0), k), 0)
    at = tl.arange(0, K)
    tl.store(drafts_ptr + at, tl.load(text_ptr + begin + at, mask=at < count, other=0), mask=at < k)
    return count, tl.where(count > 0, matched, 0)
