"""Lookup of drafts in a row, its prediction, and texts that rows share.

A CTA searches one source for one row; a second kernel takes the strongest source of each row. Arguments are those of
`LookUp`; all are int64, and rows are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common.checks import check, check_table
from fastspec.kernels.common.launch import launch
from fastspec.kernels.reference.lookup import ANCHOR, GAP, LOOKED_AT, SURE, LookUp, TextTable

BLOCK, NUM_WARPS = 1024, 8  # places of a text that a CTA compares at once
_PIVOTS = tl.constexpr(32)  # keys that a step of the search in a table reads
_GAP, _ANCHOR, _SURE, _LOOKED_AT = (tl.constexpr(each) for each in (GAP, ANCHOR, SURE, LOOKED_AT))


@triton.jit
def _runs(text_ptr, place, alive, row_ptr, last, most):
    """Counts the tokens before each place of a text that equal those of the row up to position `last`.

    Args:
        text_ptr: the text.
        place: places of the text, of any shape.
        alive: where to look, of the shape of `last - place`.
        row_ptr: tokens of the row.
        last: positions in the row, of a shape that broadcasts with `place`.
        most: tokens to compare at most.
    """
    run = tl.zeros_like(alive.to(tl.int64))
    back = 0
    while (back < most) & (tl.max(alive.to(tl.int32)) > 0):
        theirs = tl.load(text_ptr + place - 1 - back, mask=place > back, other=-1)
        ours = tl.load(row_ptr + last - back, mask=last >= back, other=-1)
        alive = alive & (place > back) & (last >= back) & (theirs == ours)
        run += alive.to(tl.int64)
        back += 1
    return run


@triton.jit
def _match_row(row_ptr, length, width, min_n, max_n, k, drafts_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Searches the row itself. Writes K drafts; returns (count, strength)."""
    best = tl.full((), 0, tl.int64)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        run = _runs(row_ptr, place, place < length, row_ptr, length - 1, max_n)
        best = tl.maximum(best, tl.max(tl.where(run >= min_n, run * width + place, 0), axis=0))
    begin, run = best % width, best // width
    at = tl.arange(0, K)
    # behind the row's end the copy repeats its own tokens
    token = tl.load(row_ptr + begin + at % tl.maximum(length - begin, 1))
    tl.store(drafts_ptr + at, token, mask=at < k)
    return tl.where(run > 0, k, 0).to(tl.int64), run


@triton.jit
def _expected_place(text_ptr, predicted, room, row_ptr, length, answered, max_n, BLOCK: tl.constexpr):
    """Searches the anchor of `follow`. Returns (expected place, 1 if it is known)."""
    best = tl.full((), 0, tl.int64)
    gap = 1 + tl.arange(0, _GAP).to(tl.int64)[:, None]
    for start in range(0, predicted, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        usable = (place >= 1) & (place + gap < predicted)
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
def _follow(
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
    """Searches the prediction, see `reference.lookup.follow`. Writes K drafts; returns (count, strength)."""
    expected, found = _expected_place(text_ptr, predicted, room, row_ptr, length, answered, max_n, BLOCK)
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


@triton.jit
def _keys_below(keys_ptr, count, key, R: tl.constexpr, OR_EQUAL: tl.constexpr):
    """Counts the keys of an ascending table that are less than (or equal to) each of R keys."""
    low = tl.zeros((R,), tl.int64)
    high = low + count
    pivot = tl.arange(0, _PIVOTS)[None, :]
    while tl.max(high - low, axis=0) > 0:
        step = tl.maximum((high - low + _PIVOTS) // (_PIVOTS + 1), 1)
        at = low[:, None] + (pivot + 1) * step[:, None] - 1
        inside = at < high[:, None]
        read = tl.load(keys_ptr + at, mask=inside, other=0)
        below = (read <= key[:, None]) if OR_EQUAL else (read < key[:, None])
        passed = tl.sum((below & inside).to(tl.int64), axis=1)
        high = tl.minimum(high, low + (passed + 1) * step - 1)
        low += passed * step
    return low


@triton.jit
def _occurrences(
    table, owner, row_ptr, length, capacity,
    RUNGS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Returns latest places [_LOOKED_AT] after the row's last tokens, their texts, and tokens that match before each.

    RUNGS, SHORTEST, LONGEST: number of the lengths of sequences in the table, and the extreme ones. R, W: the first and
    the last of them, rounded up to powers of two.
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
    count = capacity * RUNGS
    low = _keys_below(table[3], count, key, R, False)
    high = _keys_below(table[3], count, key, R, True)
    hit = (high > low) & (length_of > 0) & (length_of <= length)
    longest = tl.max(tl.where(hit, rung + 1, 0), axis=0) - 1
    low, high = tl.sum(tl.where(rung == longest, low, 0), axis=0), tl.sum(tl.where(rung == longest, high, 0), axis=0)
    index = high - 1 - tl.arange(0, _LOOKED_AT)
    valid = (index >= low) & (longest >= 0)
    place = tl.load(table[4] + index, mask=valid, other=0)
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
def _look_up_text(
    table, owner, row_ptr, length, capacity, k, drafts_ptr,
    RUNGS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Searches a table of texts, see `reference.lookup.look_up_text`. Writes K drafts; returns (count, strength)."""
    place, text, run = _occurrences(table, owner, row_ptr, length, capacity, RUNGS, SHORTEST, LONGEST, R, W)
    best = tl.max(run, axis=0)
    counted = (run == best) & (best > 0)
    at = tl.arange(0, K)[None, :]
    after = place[:, None] + at
    alive = counted[:, None] & (at < k) & (after < capacity)
    alive &= tl.load(table[1] + after, mask=after < capacity, other=-1) == text[:, None]
    token = tl.load(table[0] + after, mask=after < capacity, other=0)
    both = alive[:, None, :] & alive[None, :, :] & (token[:, None, :] == token[None, :, :])
    alike = tl.min(tl.where(both, K, at[None, :, :]), axis=2)  # [M, M] tokens that two occurrences share
    shared = tl.sum((alike[:, :, None] > at[None, :, :]).to(tl.int64), axis=1)  # [M, K] that go on alike so far
    order = tl.arange(0, _LOOKED_AT)
    score = tl.where(counted, tl.sum(tl.where(at < k, shared, 0), axis=1) * _LOOKED_AT + _LOOKED_AT - order, 0)
    chosen = (order == tl.argmax(score, axis=0))[:, None]
    enough = tl.sum(tl.where(chosen, shared, 0), axis=0) * 4 >= tl.sum(counted.to(tl.int64), axis=0)
    enough &= tl.sum((chosen & alive).to(tl.int32), axis=0) > 0
    place_of = tl.arange(0, K)
    count = tl.minimum(tl.min(tl.where(enough, K, place_of), axis=0), k).to(tl.int64)
    tl.store(drafts_ptr + place_of, tl.sum(tl.where(chosen, token, 0), axis=0), mask=place_of < k)
    return count, tl.where(count > 0, best, 0)


@triton.jit
def _look_up_kernel(
    tokens_ptr, lengths_ptr, prediction, tables, capacities, found_ptr,
    stride, width, room_stride, room, min_n, max_n, k,
    SOURCES: tl.constexpr, RUNGS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, K: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Searches source program_id(1) for row program_id(0): the row, then the prediction if there is one, then texts.

    found_ptr: [B, SOURCES, 2 + K]: count, strength, drafts. PER: see `LookUp.per_match`; 0: no limit.
    """
    row, source = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr, length = tokens_ptr + row * stride, tl.load(lengths_ptr + row)
    out = found_ptr + (row * SOURCES + source) * (2 + K)
    count, strength = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    FIRST: tl.constexpr = SOURCES - len(tables)
    if source == 0:
        count, strength = _match_row(row_ptr, length, width, min_n, max_n, k, out + 2, K, BLOCK)
    if FIRST > 1:  # noqa: SIM102 - known when it is compiled
        if source == 1:
            text_ptr, predicted = prediction[0] + row * room_stride, tl.load(prediction[1] + row)
            answered = length - tl.load(prediction[2] + row)
            count, strength = _follow(
                text_ptr, predicted, room, row_ptr, length, answered, min_n, max_n, k, out + 2, K, BLOCK
            )
    for index in tl.static_range(len(tables)):
        if source == FIRST + index:
            owner = tl.load(tables[index][7] + row)
            count, strength = _look_up_text(
                tables[index], owner, row_ptr, length, capacities[index], k, out + 2, RUNGS, SHORTEST, LONGEST, R, W, K
            )
    if PER > 0:
        count = tl.minimum(count, strength * PER)
    tl.store(out, count)
    tl.store(out + 1, strength)


@triton.jit
def _strongest_kernel(
    found_ptr, drafts_ptr, counts_ptr, stride, k,
    SOURCES: tl.constexpr, S: tl.constexpr, K: tl.constexpr, PREDICTED: tl.constexpr,
):  # fmt: skip
    """Takes the strongest source of each row; of equally strong ones the prediction, then the first."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.arange(0, S)
    at = found_ptr + row * SOURCES * (2 + K)
    strength = tl.load(at + source * (2 + K) + 1, mask=source < SOURCES, other=-1)
    order = tl.where(source == 1, SOURCES + 1, SOURCES - source) if PREDICTED else SOURCES - source
    best = tl.argmax(strength * (SOURCES + 2) + order, axis=0)
    place = tl.arange(0, K)
    draft = tl.load(at + best * (2 + K) + 2 + place, mask=place < k, other=0)
    tl.store(drafts_ptr + row * stride + place, draft, mask=place < k)
    tl.store(counts_ptr + row, tl.load(at + best * (2 + K)))


def look_up(call: LookUp, drafts: Tensor, counts: Tensor) -> None:
    """Computes `Ops.look_up` with two Triton kernels.

    Raises:
        ValueError: a tensor's shape or layout is not the one that kernels read, or the tables know other lengths.
    """
    rows, k = drafts.shape
    width = call.tokens.shape[1]
    check_table("tokens", call.tokens, rows)
    check("lengths", call.lengths, (rows,), torch.int64)
    check("counts", counts, (rows,), torch.int64)
    if drafts.stride(1) != 1:
        raise ValueError("the drafts of a row must be contiguous")
    rungs = {table.rungs for table, _ in call.texts} or {(1,)}
    if len(rungs) > 1:
        raise ValueError(f"the tables know sequences of different lengths: {sorted(rungs)}")
    known = rungs.pop()
    sources = 1 + (call.prediction is not None) + len(call.texts)
    padded = triton.next_power_of_2(max(2, k))
    found = torch.empty(rows, sources, 2 + padded, dtype=torch.int64, device=drafts.device)
    prediction: tuple[Any, ...] = ()
    if (given := call.prediction) is not None:
        prediction = (given.tokens, given.lengths, given.prompt_lengths)
        check_table("prediction", given.tokens, rows)
    launch(
        _look_up_kernel,
        (rows, sources),
        call.tokens,
        call.lengths,
        prediction,
        tuple((*_pointers(table), owners) for table, owners in call.texts),
        tuple(len(table.tokens) for table, _ in call.texts),
        found,
        call.tokens.stride(0),
        width,
        given.tokens.stride(0) if given is not None else 0,
        given.tokens.shape[1] if given is not None else 1,
        call.min_n,
        call.max_n,
        k,
        SOURCES=sources,
        RUNGS=len(known),
        SHORTEST=known[0],
        LONGEST=known[-1],
        R=triton.next_power_of_2(len(known)),
        W=triton.next_power_of_2(known[-1]),
        K=padded,
        PER=call.per_match or 0,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    launch(
        _strongest_kernel,
        (rows,),
        found,
        drafts,
        counts,
        drafts.stride(0),
        k,
        SOURCES=sources,
        S=triton.next_power_of_2(sources),
        K=padded,
        PREDICTED=given is not None,
        num_warps=1,
    )


def _pointers(table: TextTable) -> tuple[Tensor, ...]:
    return table.tokens, table.texts, table.owners, table.keys, table.places, table.factors, table.lengths
