"""Device code that searches a row itself and its prediction for an earlier occurrence of the row's last tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.reference.lookup import ANCHOR, ANCHOR_MOST, GAP

_GAP, _ANCHOR, _ANCHOR_MOST = (tl.constexpr(each) for each in (GAP, ANCHOR, ANCHOR_MOST))
_ID_BITS = tl.constexpr(63 // ANCHOR)  # number of bits for a token id in the results of `_three_before`


@triton.jit
def _runs(text_ptr, place, alive, row_ptr, last, limit):
    """Returns the number of tokens before each place of a text that equal the tokens of a row up to position `last`.

    The equal tokens are text[place - 1 - i] == row[last - i] for i = 0, 1, .. up to the first difference.

    Args:
        text_ptr: tokens of the text.
        place: indices in the text, of any shape.
        alive: True where a result is wanted, in the shape of `last - place`. Other results are 0.
        row_ptr: tokens of the row.
        last: positions in the row, of a shape that broadcasts with `place`.
        limit: largest length.
    """
    run = tl.zeros_like(alive.to(tl.int64))
    back = 0
    while (back < limit) & (tl.max(alive.to(tl.int32)) > 0):
        theirs = tl.load(text_ptr + place - 1 - back, mask=place > back, other=-1)
        ours = tl.load(row_ptr + last - back, mask=last >= back, other=-1)
        alive = alive & (place > back) & (last >= back) & (theirs == ours)
        run += alive.to(tl.int64)
        back += 1
    return run


@triton.jit
def _three_before(tokens_ptr, place):
    """Packs the 3 tokens before each place of a text into one int64, 21 bits each.

    The result is -1 for places with fewer than 3 tokens before them.
    """
    packed = tl.zeros_like(place)
    for back in tl.static_range(_ANCHOR):
        packed = (packed << _ID_BITS) | tl.load(tokens_ptr + place - 1 - back, mask=place >= _ANCHOR, other=0)
    return tl.where(place >= _ANCHOR, packed, -1)


@triton.jit
def _expected_place(text_ptr, ends, room, row_ptr, length, otherwise, min_n, BLOCK: tl.constexpr):
    """Computes step 1 of `reference.lookup.follow`: the expected place of the row's next token in a text.

    Returns the place, and 1 if it comes from an anchor, else 0. For the arguments see `follow`.
    """
    best = tl.full((), 0, tl.int64)
    gap = 1 + tl.arange(0, _GAP).to(tl.int64)[:, None]
    ours = _three_before(row_ptr, length - gap)
    for start in range(0, ends, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        usable = (place + gap < ends) & (ours >= 0) & (_three_before(text_ptr, place) == ours)
        if tl.max(usable.to(tl.int32)) > 0:  # anchors are rare: lengths and scores are computed only if there is one
            run = _runs(text_ptr, place, usable, row_ptr, length - 1 - gap, tl.maximum(min_n, _ANCHOR_MOST))
            near = room - tl.minimum(tl.abs(place + gap - otherwise), room)
            score = tl.minimum(run, _ANCHOR_MOST) * (_GAP + 1) + _GAP - gap
            score = (score * (room + 1) + near) * (room + 1) + room - place
            best = tl.maximum(best, tl.max(tl.where(run >= tl.maximum(min_n, _ANCHOR), score, 0)))
    of_gap = best // (room + 1) // (room + 1) % (_GAP + 1)
    expected = tl.where(best > 0, room - best % (room + 1) + _GAP - of_gap, otherwise)
    begins = (otherwise <= _GAP) & (otherwise < ends)
    return expected, ((best > 0) | begins).to(tl.int64)


@triton.jit
def follow(text_ptr, ends, room, row_ptr, length, otherwise, min_n, max_n, BLOCK: tl.constexpr):
    """Finds the place in a text at which a row continues, as `reference.lookup.follow`.

    Returns the place, and the number of tokens that match before it; 0 if no place was found.

    Args:
        text_ptr, ends: tokens of the text, and their number.
        room: number of columns of the tensor with the text.
        row_ptr, length: tokens of the row, and their number.
        otherwise: expected place if no match tells more, `RepeatedText.expected`.
        min_n, max_n: see `LookUp`.
        BLOCK: number of places that are compared at a time.
    """
    expected, found = _expected_place(text_ptr, ends, room, row_ptr, length, otherwise, min_n, BLOCK // 2)
    best = tl.full((), 0, tl.int64)
    for start in range(0, ends, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        run = _runs(text_ptr, place, (place >= 1) & (place < ends), row_ptr, length - 1, max_n)
        distance = tl.abs(place - expected)
        near = (found > 0) & (run >= 1) & (distance <= _GAP)
        score = (run * (room + 1) + room - tl.minimum(distance, room)) * (room + 1) + room - place
        best = tl.maximum(best, tl.max(tl.where((run >= min_n) | near, score, 0), axis=0))
    matched = tl.where(best > 0, best // (room + 1) // (room + 1), found)
    begin = tl.where(best > 0, room - best % (room + 1), expected)
    return tl.minimum(tl.maximum(begin, 0), room - 1), tl.where(ends > 0, matched, 0)


@triton.jit
def copy_of_row(row_ptr, length, begin, matched, k, drafts_ptr, K: tl.constexpr):
    """Writes k tokens of a row from position `begin` on; if fewer follow, these are repeated. K: a power of two >= k.

    Returns the number of valid draft tokens, and the strength of the match (`reference.look_up`).
    """
    at = tl.arange(0, K)
    token = tl.load(row_ptr + begin + at % tl.maximum(length - begin, 1), mask=at < k, other=0)
    tl.store(drafts_ptr + at, token, mask=at < k)
    return tl.where(matched > 0, k, 0).to(tl.int64), matched


@triton.jit
def copy_of_prediction(text_ptr, predicted, begin, matched, k, drafts_ptr, K: tl.constexpr):
    """Writes up to k tokens of a prediction of `predicted` tokens, from place `begin` on. K: a power of two >= k.

    Returns the number of valid draft tokens, and the strength of the match (`reference.look_up`).
    """
    count = tl.where(matched > 0, tl.minimum(tl.maximum(predicted - begin, 0), k), 0)
    at = tl.arange(0, K)
    tl.store(drafts_ptr + at, tl.load(text_ptr + begin + at, mask=at < count, other=0), mask=at < k)
    return count, tl.where(count > 0, 2 * matched, 0)
