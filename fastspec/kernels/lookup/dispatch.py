"""Finds draft tokens by lookup, in two launches: in a row's own tokens, in its prediction, and in shared texts.

In the first launch, each CTA searches one of these sources for one batch row. The second launch takes, for each row,
the source with the strongest match. The definition is `reference.look_up`. All tensors of `LookUp` are int64 with
contiguous rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, check_table
from fastspec.kernels.common.launch import launch, new_ids
from fastspec.kernels.lookup.matches import PLACE_BITS, copy_of_prediction, copy_of_row, follow
from fastspec.kernels.lookup.texts import look_up_text
from fastspec.kernels.reference.lookup import ANCHOR_MOST, GAP, LookUp, SharedTexts

BLOCK, NUM_WARPS = 2048, 16  # number of places in a text that a CTA compares at a time; warps of a CTA
LONGEST_TEXT = 1 << PLACE_BITS  # tokens of a row or a prediction must be fewer


@triton.jit
def _look_up_kernel(
    tokens_ptr, lengths_ptr, prediction, tables, capacities, found_ptr,
    stride, width, room_stride, room, min_n, max_n, k,
    SOURCES: tl.constexpr, RUNGS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, K: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Searches one source of draft tokens for one batch row: source program_id(1) for row program_id(0).

    Source 0 is the row's own tokens. Source 1 is the prediction, if there is one. The other sources are tables of
    texts.

    Args:
        found_ptr: output int64 [B, SOURCES, 2 + K]: number of valid drafts, number of matching tokens, K draft tokens.
        prediction: the tensors of `Predictions`. (): there is no prediction.
        tables: a tuple for each table, with the tensors of `TextTable` and the owner of each batch row.
        capacities: number of tokens of each table.
        stride, width: row stride and number of columns of `LookUp.tokens`.
        room_stride, room: row stride and number of columns of `Predictions.tokens`.
        k: number of draft tokens.
        PER: `LookUp.per_match`, the largest number of draft tokens per matching token outside predictions; 0: no limit.
        RUNGS, SHORTEST, LONGEST, R, W: see `_occurrences` of texts.py.
        BLOCK, DEPTH: see `follow` of matches.py.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, source = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr, length = tokens_ptr + row * stride, tl.load(lengths_ptr + row)
    length32 = length.to(tl.int32)
    out = found_ptr + (row * SOURCES + source) * (2 + K)
    count, matched = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    FIRST: tl.constexpr = SOURCES - len(tables)
    if source < FIRST:
        text_ptr, ends, columns, otherwise = row_ptr, length32, tl.full((), 0, tl.int32) + width, length32
        if FIRST > 1:  # noqa: SIM102 - known when it is compiled
            if source == 1:
                text_ptr, ends = prediction[0] + row * room_stride, tl.load(prediction[1] + row).to(tl.int32)
                columns, otherwise = (
                    tl.full((), 0, tl.int32) + room,
                    length32 - tl.load(prediction[2] + row).to(tl.int32),
                )
        begin, matched = follow(text_ptr, ends, columns, row_ptr, length32, otherwise, min_n, max_n, BLOCK, DEPTH)
        if source == 0:
            count, matched = copy_of_row(row_ptr, length, begin, matched, k, out + 2, K)
        else:
            count, matched = copy_of_prediction(text_ptr, ends, begin, matched, k, out + 2, K)
    for index in tl.static_range(len(tables)):
        if source == FIRST + index:
            owner = tl.load(tables[index][7] + row)
            count, matched = look_up_text(
                tables[index], owner, row_ptr, length, capacities[index], k, out + 2, RUNGS, SHORTEST, LONGEST, R, W, K
            )
    if (PER > 0) & ((FIRST == 1) | (source != 1)):
        count = tl.minimum(count, matched * PER)
    tl.store(out, count)
    tl.store(out + 1, matched)


@triton.jit
def _strongest_kernel(
    found_ptr, weights, drafts_ptr, counts_ptr, k,
    SOURCES: tl.constexpr, S: tl.constexpr, K: tl.constexpr, PREDICTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copies the draft tokens of each batch row's strongest source, and their number, to the outputs.

    The strength is the number of matching tokens times the source's weight. Of equally strong sources it takes the
    prediction (source 1 if PREDICTED is True), then the source with the lowest index. For found_ptr see
    `_look_up_kernel`; `weights` has a number for each source.
    """
    row = tl.program_id(0).to(tl.int64)
    source = tl.arange(0, S)
    weight = tl.zeros((S,), tl.float32)
    for index in tl.static_range(SOURCES):
        weight = tl.where(source == index, weights[index], weight)
    at = found_ptr + row * SOURCES * (2 + K)
    if PDL:
        gdc_wait()
    matched = tl.load(at + source * (2 + K) + 1, mask=source < SOURCES, other=-1)
    strength = matched.to(tl.float32) * tl.where(source < SOURCES, weight, 1.0)
    order = tl.where(source == 1, SOURCES + 1, SOURCES - source) if PREDICTED else SOURCES - source
    best = tl.argmax(tl.where(strength == tl.max(strength, axis=0), order, -SOURCES - S), axis=0)
    place = tl.arange(0, K)
    draft = tl.load(at + best * (2 + K) + 2 + place, mask=place < k, other=0)
    tl.store(drafts_ptr + row * k + place, draft, mask=place < k)
    tl.store(counts_ptr + row, tl.load(at + best * (2 + K)))


def look_up(call: LookUp, k: int) -> tuple[Tensor, Tensor]:
    """Proposes up to k draft tokens for each batch row, as `Ops.look_up`, with two Triton kernels.

    Returns the draft tokens, int64 [B, k], and the number of valid ones, int64 [B].

    Raises:
        ValueError: a tensor has another shape or layout than the kernels read, or tables index different n-grams.
    """
    rows, width = call.tokens.shape
    check_table("tokens", call.tokens, rows)
    check("lengths", call.lengths, (rows,), torch.int64)
    rungs = {shared.table.rungs for shared in call.texts} or {(1,)}
    if len(rungs) > 1:
        raise ValueError(f"the tables index n-grams of lengths {sorted(rungs)}; wanted the same lengths in all tables")
    known = rungs.pop()
    sources = 1 + (call.prediction is not None) + len(call.texts)
    padded = triton.next_power_of_2(max(2, k))
    found = torch.empty(rows, sources, 2 + padded, dtype=torch.int64, device=call.tokens.device)
    drafts, counts = new_ids(rows * k, found.device).view(rows, k), torch.empty_like(call.lengths)
    prediction: tuple[Any, ...] = ()
    if (given := call.prediction) is not None:
        prediction = (given.tokens, given.lengths, given.prompt_lengths)
        check_table("prediction", given.tokens, rows)
    room = 1 if given is None else given.tokens.shape[1]
    if max(width, room) >= LONGEST_TEXT:
        raise ValueError(f"texts have {max(width, room)} columns; wanted fewer than {LONGEST_TEXT}")
    launch(
        _look_up_kernel,
        (rows, sources),
        call.tokens,
        call.lengths,
        prediction,
        tuple(map(_pointers, call.texts)),
        tuple(len(shared.table.tokens) for shared in call.texts),
        found,
        call.tokens.stride(0),
        width,
        given.tokens.stride(0) if given is not None else 0,
        room,
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
        DEPTH=GAP + max(ANCHOR_MOST, call.min_n),
        num_warps=NUM_WARPS,
    )
    launch(
        _strongest_kernel,
        (rows,),
        found,
        call.weights,
        drafts,
        counts,
        k,
        SOURCES=sources,
        S=triton.next_power_of_2(sources),
        K=padded,
        PREDICTED=given is not None,
        num_warps=1,
    )
    return drafts, counts


def _pointers(shared: SharedTexts) -> tuple[Tensor, ...]:
    table = shared.table
    of_table = table.tokens, table.texts, table.owners, table.keys, table.places, table.factors, table.lengths
    return *of_table, shared.owners
