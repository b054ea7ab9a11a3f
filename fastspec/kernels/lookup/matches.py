"""Device code that searches a row itself and its prediction for an earlier occurrence of the row's last tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.reference.lookup import ANCHOR, GAP, SURE

_GAP, _ANCHOR, _SURE = (tl.constexpr(each) for each in (GAP, ANCHOR, SURE))
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
def match_row(row_ptr, length, width, min_n, max_n, k, drafts_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Searches a row for an earlier occurrence of its own last tokens, and writes k draft tokens.

    The definition is `reference.lookup.match_row`. Returns the number of valid draft tokens, k or 0, and the number of
    matching tokens. `width` is the number of columns of `LookUp.tokens`, K a power of two >= k.
    """
    best = tl.full((), 0, tl.int64)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        run = _runs(row_ptr, place, place < length, row_ptr, length - 1, max_n)
        best = tl.maximum(best, tl.max(tl.where(run >= min_n, run * width + place, 0), axis=0))
    begin, run = best % width, best // width
    at = tl.arange(0, K)
    # if the row ends before k tokens, the copied tokens are repeated
    token = tl.load(row_ptr + begin + at % tl.maximum(length - begin, 1))
    tl.store(drafts_ptr + at, token, mask=at < k)
    return tl.where(run > 0, k, 0).to(tl.int64), run


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
def _expected_place(text_ptr, predicted, room, row_ptr, length, answered, max_n, BLOCK: tl.constexpr):
    """Computes step 1 of `reference.lookup.follow`: the expected place of the row's next token in its prediction.

    Returns the place, and 1 if it comes from an anchor, else 0. For the arguments see `follow`.
    """
    best = tl.full((), 0, tl.int64)
    gap = 1 + tl.arange(0, _GAP).to(tl.int64)[:, None]
    ours = _three_before(row_ptr, length - gap)
    for start in range(0, predicted, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        usable = (place + gap < predicted) & (ours >= 0) & (_three_before(text_ptr, place) == ours)
        if tl.max(usable.to(tl.int32)) > 0:  # anchors are rare: lengths and scores are computed only if there is one
            run = _runs(text_ptr, place, usable, row_ptr, length - 1 - gap, max_n)
            near = room - tl.minimum(tl.abs(place + gap - answered), room)
            score = ((run * (_GAP + 1) + _GAP - gap) * (room + 1) + near) * (room + 1) + room - place
            score = tl.where(run >= _ANCHOR, score, 0)
            best = tl.maximum(best, tl.max(score))
    of_gap = best // (room + 1) // (room + 1) % (_GAP + 1)
    expected = tl.where(best > 0, room - best % (room + 1) + _GAP - of_gap, answered)
    begins = (answered <= _GAP) & (answered < predicted)
    return expected, ((best > 0) | begins).to(tl.int64)


@triton.jit
def follow(
    text_ptr,
    predicted,
    room,
    row_ptr,
    length,
    answered,
    min_n,
    max_n,
    k,
    drafts_ptr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds where a row's answer continues in its prediction, as `reference.lookup.follow`, and writes draft tokens.

    Returns the number of valid draft tokens, at most k, and the strength of the match (`reference.look_up`).

    Args:
        text_ptr, predicted: tokens of the prediction, and their number.
        room: number of columns of `Predictions.tokens`.
        row_ptr, length: tokens of the row, and their number.
        answered: number of tokens of the row after the prompt.
        min_n, max_n: see `LookUp`.
        k: number of draft tokens.
        drafts_ptr: output.
        K: a power of two >= k.
        BLOCK: number of places that are compared at a time.
    """
    expected, found = _expected_place(text_ptr, predicted, room, row_ptr, length, answered, max_n, BLOCK // 2)
    best = tl.full((), 0, tl.int64)
    for start in range(0, predicted, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        run = _runs(text_ptr, place, (place >= 1) & (place < predicted), row_ptr, length - 1, max_n)
        distance = tl.abs(place - expected)
        likely = tl.where(found > 0, (run >= 1) & (distance <= _GAP), run >= min_n)
        score = (run * (room + 1) + room - tl.minimum(distance, room)) * (room + 1) + room - place
        score = tl.where((run >= tl.maximum(min_n, _SURE)) | likely, score, 0)
        best = tl.maximum(best, tl.max(score, axis=0))
    matched = tl.where(best > 0, best // (room + 1) // (room + 1), found)
    begin = tl.where(best > 0, room - best % (room + 1), expected)
    begin = tl.minimum(tl.maximum(begin, 0), room - 1)
    count = tl.where((matched > 0) & (predicted > 0), tl.minimum(tl.maximum(predicted - begin, 0), k), 0)
    at = tl.arange(0, K)
    tl.store(drafts_ptr + at, tl.load(text_ptr + begin + at, mask=at < count, other=0), mask=at < k)
    return count, tl.where(count > 0, tl.maximum(2 * matched, 2) + k, 0)
