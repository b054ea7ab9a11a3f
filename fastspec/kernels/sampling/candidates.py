"""The ids of a line that lie near its threshold: noted by all programs of the line, or by one among few groups."""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.sampling.logits import (
    ARRIVED,
    COUNT_ABOVE,
    FOUND,
    GROUP,
    KEPT_ABOVE,
    KEY_OPEN,
    MASS_ABOVE,
    key_of,
    scaled,
    view_of,
)
from fastspec.kernels.sampling.threshold import fixed

PIECE = tl.constexpr(128)  # listed groups that are read at a time
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _note(source, start, counters_ptr, found_ptr, largest, min_p, lower, upper, CHUNK, MAX_FOUND, STOPS):
    """Counts and weighs what is above the bounds in a chunk; notes the candidates between them."""
    index = start + tl.arange(0, CHUNK)
    x = scaled(view_of(*source), index, STOPS)
    keys = key_of(x)
    if upper < KEY_OPEN:
        e = tl.exp(x - largest)
        above = keys >= upper
        tl.atomic_add(counters_ptr + COUNT_ABOVE, tl.sum(above.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")
        mass = fixed(tl.sum(tl.where(above, e, 0.0), axis=0))
        tl.atomic_add(counters_ptr + MASS_ABOVE, mass, sem="relaxed")
        mass = fixed(tl.sum(tl.where(above & (e >= min_p), e, 0.0), axis=0))
        tl.atomic_add(counters_ptr + KEPT_ABOVE, mass, sem="relaxed")
    near = ((keys >= lower) & (keys < upper)).to(tl.int32)
    number = tl.sum(near, axis=0)
    if number > 0:
        before = tl.atomic_add(counters_ptr + FOUND, number.to(tl.int64), sem="relaxed")
        slot = before + tl.cumsum(near, axis=0) - near
        fits = (near > 0) & (slot < MAX_FOUND)
        tl.store(found_ptr + slot, keys, mask=fits)
        tl.store(found_ptr + MAX_FOUND + slot, index, mask=fits)


@triton.jit
def noted(source, tops_ptr, counters_ptr, found_ptr, largest, min_p, lower, upper, groups, CHUNK, MAX_FOUND, STOPS):
    """Notes this program's chunks of a line; whether all of them have been noted now, by all programs."""
    # what is computed ahead of a loop takes registers
    for chunk in tl.range(tl.program_id(0), tl.cdiv(source[0].vocab, CHUNK), tl.num_programs(0), disable_licm=True):
        group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
        tops = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"))
        if key_of(tl.max(tops, axis=0)) >= lower:
            _note(source, chunk * CHUNK, counters_ptr, found_ptr, largest, min_p, lower, upper, CHUNK, MAX_FOUND, STOPS)
    # the counting thread's release covers its own stores; the barrier hands it those of the others
    tl.debug_barrier()
    return tl.atomic_add(counters_ptr + ARRIVED, 1, sem="acq_rel") == tl.num_programs(0) - 1


@triton.jit
def read_off(counters_ptr, word):
    """A counter that all have added to."""
    return tl.load(counters_ptr + word, cache_modifier=".cg")


@triton.jit
def _places_of(near):
    """(place of each that is near, in their order; how many are) of near int32 [ROWS, COLUMNS].

    By two short scans: a long one, through all of a program's threads, takes longer than what it is for.
    """
    in_row = tl.sum(near, axis=1)
    before = tl.cumsum(in_row, axis=0) - in_row
    return before[:, None] + tl.cumsum(near, axis=1) - near, tl.sum(in_row, axis=0)


@triton.jit
def list_groups(tops_ptr, groups, lower, listed_ptr, lists, max_listed, SIZE: tl.constexpr, EACH: tl.constexpr):
    """Counts the up to SIZE * EACH groups that reach `lower`; if it `lists`, stores the first `max_listed` in order."""
    COLUMNS: tl.constexpr = min(_GROUP, SIZE)
    ROWS: tl.constexpr = SIZE // COLUMNS
    number = groups * 0
    for piece in range(EACH):
        group = piece * SIZE + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"))
        near = (key_of(x) >= lower).to(tl.int32)
        if lists:
            place, more = _places_of(near)
            slot = number + place
            tl.store(listed_ptr + slot, group, mask=(near > 0) & (slot < max_listed))
        else:
            more = tl.sum(tl.sum(near, axis=1), axis=0)
        number += more
    return number


@triton.jit
def gather(source, listed_ptr, found_ptr, number, lower, MAX_FOUND: tl.constexpr, STOPS: tl.constexpr):
    """Notes the ids from `lower` on of all listed groups, in their order; how many there are."""
    count = number * 0
    for start in tl.range(0, number, PIECE, disable_licm=True):
        slot = start + tl.arange(0, PIECE)
        # an id below zero is none
        group = tl.load(listed_ptr + slot, mask=slot < number, other=-1)
        index = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        keys = key_of(scaled(view_of(*source), index, STOPS))
        near = (keys >= lower).to(tl.int32)
        place, more = _places_of(near)
        place += count
        fits = (near > 0) & (place < MAX_FOUND)
        tl.store(found_ptr + place, keys, mask=fits)
        tl.store(found_ptr + MAX_FOUND + place, index, mask=fits)
        count += more
    return count
