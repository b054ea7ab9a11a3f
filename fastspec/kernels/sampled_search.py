"""The threshold of a line's law: among the candidates near it, or by reading all of the line when they do not tell.

All sums are integers, masses in fixed point (`UNIT`), so that the order in which candidates came cannot matter. A law
is (largest logit, normaliser, key, cut): it keeps the ids whose key is larger than `key`, those that equal it up to id
`cut`, and of these what is at least min_p of the largest (`sampled_parts.kept`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.sampled_parts import KEY_LOWEST, KEY_OPEN, NO_UNIT, UNIT, kept, key_of, scaled, value_of

COUNT_FINITE, FIND_KTH, FIND_EDGE, COUNT_EQUALS, CUT_EQUALS, SUM_UP = map(tl.constexpr, range(6))


@triton.jit
def fixed(mass):
    """int64 fixed point of fp32."""
    return (mass * UNIT).to(tl.int64)


@triton.jit
def taken_of_equals(mass, above, budget):
    """How many ids of one mass are kept, one after the other, while what is above them weighs less than the budget."""
    each = tl.maximum(mass, 1)
    return (budget - above + each - 1) // each


@triton.jit
def budget_of(total, top_p):
    """Fixed-point mass that what is kept must reach: all but 1 - top_p, which is formed in fp32 as torch does."""
    light = ((1.0 - top_p).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(total - light, 1)


@triton.jit
def search_candidates(
    found_ptr,
    largest,
    total,  # fixed-point mass of the whole line
    count,  # candidates
    count_above,
    mass_above,
    kept_above,
    lower,
    upper,
    guessed,
    top_k,  # 0: none
    top_p,
    min_p,
    vocab,
    MOST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """(key, cut, fixed-point normaliser, whether these hold) from up to SIZE candidates."""
    slot = tl.arange(0, SIZE)
    keys = tl.load(found_ptr + slot, mask=slot < count, other=-2147483648, cache_modifier=".cg")
    there = slot < count
    mass = fixed(tl.exp(tl.where(there, value_of(keys), -float("inf")) - largest))
    low = lower
    top = key_of(largest).to(tl.int64)  # no threshold lies above the largest: fewer steps
    sound = (upper == KEY_OPEN) | ((count_above < top_k) & (top_k > 0)) | (top_k == 0)
    if top_k > 0:
        if count_above + count >= top_k:
            high = tl.minimum(upper - 1, top)
            while low < high:
                middle = (low + high + 1) >> 1
                enough = count_above + tl.sum((keys >= middle).to(tl.int32), axis=0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
        else:
            sound = sound & (guessed == 0)
        total = mass_above + tl.sum(tl.where(keys >= low, mass, 0), axis=0)
    cut = vocab
    if top_p < 1.0:
        budget = budget_of(total, top_p)
        sound = sound & ((upper == KEY_OPEN) | (mass_above < budget))
        reached = mass_above + tl.sum(tl.where(keys >= low, mass, 0), axis=0) >= budget
        sound = sound & (reached | (guessed == 0))
        high = tl.minimum(upper, top)
        while low < high:
            middle = (low + high) >> 1
            short = mass_above + tl.sum(tl.where(keys > middle, mass, 0), axis=0) < budget
            high = tl.where(short, middle, high)
            low = tl.where(short, low, middle + 1)
        above = mass_above + tl.sum(tl.where(keys > low, mass, 0), axis=0)
        equal = keys == low
        each = fixed(tl.exp(value_of(low.to(tl.int32)) - largest))
        taken = taken_of_equals(each, above, budget)
        if taken < tl.sum(equal.to(tl.int32), axis=0):
            ids = tl.load(found_ptr + MOST + slot, mask=there, other=0x7FFFFFFF, cache_modifier=".cg")
            cut = _id_of_rank(ids, equal, taken, vocab)
    # loaded anew, so that fewer registers are taken meanwhile
    keys = tl.load(found_ptr + slot, mask=there, other=KEY_LOWEST, cache_modifier=".cg")
    index = tl.load(found_ptr + MOST + slot, mask=there, other=0x7FFFFFFF, cache_modifier=".cg")
    e = tl.exp(value_of(keys) - largest)
    mass = fixed(e)
    keeps = kept(keys, index, e, low, cut, min_p)
    return low.to(tl.int32), cut, kept_above + tl.sum(tl.where(keeps, mass, 0), axis=0), sound


@triton.jit
def _id_of_rank(ids, equal, rank, vocab):
    """The smallest id up to which there are at least `rank` of those that are equal."""
    low, high = vocab * 0, vocab - 1
    while low < high:
        middle = (low + high) // 2
        enough = tl.sum((equal & (ids <= middle)).to(tl.int32), axis=0) >= rank
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _read(view, key, cut, largest, min_p, CHUNK: tl.constexpr, STOPS: tl.constexpr):
    """(count, mass, mass of those that min_p leaves) of all finite logits above `key`, or equal up to id `cut`."""
    count = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    left = tl.zeros([], tl.int64)
    for start in range(0, view[13], CHUNK):
        index = start + tl.arange(0, CHUNK)
        x = scaled(view, index, STOPS)
        keys = key_of(x)
        e = tl.exp(x - largest)
        keeps = kept(keys, index, e, key, cut, 0.0)
        count += tl.sum(keeps.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(keeps, fixed(e), 0), axis=0)
        left += tl.sum(tl.where(keeps & (e >= min_p), fixed(e), 0), axis=0)
    return count, mass, left


@triton.jit
def search_line(view, largest, total, top_k, top_p, min_p, CHUNK: tl.constexpr, STOPS: tl.constexpr):
    """(key, cut, fixed-point normaliser) by bisection, a read of the line for each step: slow, and always right.

    One loop with one read in it, for a read is most of the kernel's code. What is asked for in turn: how many logits
    are finite; the k-th; the threshold of top-p; how many equal it; up to which id these are kept; the normaliser.
    """
    vocab = view[13]
    low = tl.zeros([], tl.int64) + KEY_LOWEST + 1
    high = tl.zeros([], tl.int64) + KEY_OPEN
    first, last, cut = vocab * 0, vocab - 1, vocab
    above_count, above = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    taken = tl.zeros([], tl.int64)
    left = tl.zeros([], tl.int64)
    edge = tl.where(top_p < 1.0, FIND_EDGE, SUM_UP)
    asked = tl.where(top_k > 0, COUNT_FINITE, edge)
    while asked <= SUM_UP:
        searching = low < high
        # to find the k-th the middle is rounded up, so that both kinds of bisection end
        middle = (low + high + (asked == FIND_KTH)) >> 1
        bisects = ((asked == FIND_KTH) | (asked == FIND_EDGE)) & searching
        among = (first + last) // 2
        upto = tl.where(asked == FIND_EDGE, -1, tl.where(asked == CUT_EQUALS, among, vocab))
        upto = tl.where(asked == SUM_UP, cut, upto)
        count, mass, left = _read(view, tl.where(bisects, middle, low), upto, largest, min_p, CHUNK, STOPS)
        after = asked + (bisects == 0).to(tl.int32)
        if asked == COUNT_FINITE:
            total = mass
            after = tl.where(count < top_k, edge, FIND_KTH)
        elif asked == FIND_KTH:
            enough = count >= top_k
            total = mass
            low = tl.where(bisects & enough, middle, low)
            high = tl.where(bisects, tl.where(enough, high, middle - 1), KEY_OPEN)
            after = tl.where(bisects, FIND_KTH, edge)
        elif asked == FIND_EDGE:
            short = mass < budget_of(total, top_p)
            above_count, above = count, mass
            high = tl.where(bisects & short, middle, high)
            low = tl.where(bisects & (short == 0), middle + 1, low)
        elif asked == COUNT_EQUALS:
            each = fixed(tl.exp(value_of(low.to(tl.int32)) - largest))
            taken = taken_of_equals(each, above, budget_of(total, top_p))
            after = tl.where(taken < count - above_count, CUT_EQUALS, SUM_UP)
        elif asked == CUT_EQUALS:
            enough = count - above_count >= taken
            last = tl.where(enough, among, last)
            first = tl.where(enough, first, among + 1)
            cut = tl.where(first < last, cut, first)
            after = tl.where(first < last, CUT_EQUALS, SUM_UP)
        asked = after
    return low.to(tl.int32), cut, left


@triton.jit
def normaliser_of(mass):
    """fp32 of a fixed-point mass."""
    return mass.to(tl.float32) * NO_UNIT
