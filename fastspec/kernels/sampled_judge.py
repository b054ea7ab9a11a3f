"""Device code that judges a row's drafts: which places can end the row, the races there, and what is accepted.

The law is `fastspec.verify`. Every program of a row forms the carried ratios and the coins for itself, from the records
that sampled_laws.py left; sampled_commit.py launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec import sampling
from fastspec.kernels.sampled_laws import probabilities
from fastspec.kernels.sampled_parts import (
    BEST,
    BEYOND,
    BROKEN,
    COUNTERS,
    GREEDY,
    KEY_LOWEST,
    KIND,
    P_DRAFT,
    Q_DRAFT,
    RACE,
    RACE_BEYOND,
    RECORD,
    coin,
    kept,
    times,
    times_of,
    value_of,
    winner,
    winning_id,
)
from fastspec.modes import BLOCK, COUPLED, REJECTION

RULES = {REJECTION: 0, BLOCK: 1, COUPLED: 2}
BY_REJECTION, BY_BLOCK, BY_COUPLING = map(tl.constexpr, RULES.values())
ACCEPT, TARGET = tl.constexpr(sampling.ACCEPT), tl.constexpr(sampling.TARGET)
# fixed point: what p has beyond q weighs at most one
SHARE = tl.constexpr(2.0**60)
NO_SHARE = tl.constexpr(2.0**-60)
TINY = tl.constexpr(1.1754943508222875e-38)
_RECORD = tl.constexpr(RECORD)
_COUNTERS = tl.constexpr(COUNTERS)


@triton.jit
def at_place(values, place, index):
    """The element of values [PLACES] at one place."""
    return tl.sum(tl.where(place == index, values, 0.0), axis=0)


@triton.jit
def _ratios(record_ptr, place, counts, seed, length, RULE: tl.constexpr):
    """(p/q of the draft at each place, its coin, c_i before each place): fp32 [PLACES]; `verify.accept_probability`
    and `verify._carried`.
    """
    counted = place < counts
    p = tl.load(record_ptr + place * _RECORD + P_DRAFT, mask=counted, other=0).to(tl.float32, bitcast=True)
    q = tl.load(record_ptr + place * _RECORD + Q_DRAFT, mask=counted, other=0).to(tl.float32, bitcast=True)
    ratio = tl.where(q > 0, tl.div_rn(p, tl.maximum(q, TINY)), 1.0)
    coins = coin(seed, length + place, ACCEPT)
    carried = tl.full(place.shape, 1.0, tl.float32)
    if RULE == BY_BLOCK:
        c = tl.full([], 1.0, tl.float32)
        for j in range(0, counts):
            c = c * at_place(ratio, place, j)
            c = tl.where(c > 1.0, 1.0, c)  # and a NaN stays one
            carried = tl.where(place == j + 1, c, carried)
    else:
        ratio = tl.where(p > 0, tl.where(ratio > 1.0, 1.0, ratio), tl.where(p == p, 0.0, p))
    return ratio, coins, carried


@triton.jit
def _leading(flags, place, counts, PLACES: tl.constexpr):
    """How many of the first `counts` flags [PLACES] hold before the first that does not."""
    return tl.min(tl.where(flags & (place < counts), PLACES, place), axis=0)


@triton.jit
def span(record_ptr, place, counts, seed, length, RULE: tl.constexpr, PLACES: tl.constexpr):
    """(first, last) of the places at which a row may end, and c_i [PLACES]."""
    ratio, coins, carried = _ratios(record_ptr, place, counts, seed, length, RULE)
    first = counts * 0
    last = counts
    if RULE == BY_REJECTION:
        first = _leading(coins < ratio, place, counts, PLACES)
        last = first
    if RULE == BY_BLOCK:
        fallen = (counts == 0) | (at_place(coins, place, counts - 1) < at_place(carried, place, counts))
        first = tl.where(fallen, counts, 0)
        last = tl.where(fallen, counts, counts - 1)
    return first, last, carried


@triton.jit
def _merge(p, time, index, counters_ptr, q_ptr, draft, c, beyond):
    """Merges a race of some ids with times into that for a place, and adds what p has beyond q."""
    weights = p
    slot_ptr = counters_ptr + RACE
    if beyond:
        q = (index == draft).to(tl.float32)
        if q_ptr is not None:
            q = tl.load(q_ptr + index, mask=p > 0, other=0.0)
        excess = tl.maximum(c * p - q, 0.0)
        share = tl.sum(excess, axis=0)
        if share > 0:
            # the race under p counts only where no chunk has any excess
            tl.atomic_add(counters_ptr + BEYOND, (share * SHARE).to(tl.int64), sem="relaxed")
            weights = excess
            slot_ptr = counters_ptr + RACE_BEYOND
    best = winner(weights, time, index)
    if best > 0:
        tl.atomic_max(slot_ptr, best, sem="relaxed")


@triton.jit
def race(law, view, counters_ptr, q_ptr, draft, c, beyond, seed, position, start, min_p, CHUNK, STOPS):
    """Lets the ids of a chunk race for a place, and sums what p has beyond q."""
    index = start + tl.arange(0, CHUNK)
    p = probabilities(law, view, index, min_p, STOPS)
    _merge(p, times(seed, position, TARGET, start, CHUNK), index, counters_ptr, q_ptr, draft, c, beyond)


@triton.jit
def race_of_few(law, found_ptr, number, counters_ptr, q_ptr, draft, c, beyond, seed, position, min_p, MOST, SIZE):
    """`race` of all ids that a law keeps, among those listed: `probabilities` of the same logits."""
    slot = tl.arange(0, SIZE)
    there = slot < number
    key = tl.load(found_ptr + slot, mask=there, other=KEY_LOWEST)
    index = tl.load(found_ptr + MOST + slot, mask=there, other=0)
    e = tl.exp(value_of(key) - law[1])
    keeps = kept(key, index, e, law[3], law[4], min_p)
    p = tl.where(keeps, tl.div_rn(e, law[2] + tl.zeros_like(e)), 0.0)
    _merge(p, times_of(seed, position, TARGET, index), index, counters_ptr, q_ptr, draft, c, beyond)


@triton.jit
def judged(
    record_ptr, counters_ptr, drafts_ptr, place, counts, num_drafts, vocab, seed, length, RULE, PLACES: tl.constexpr
):
    """(accepted, block [PLACES]) of a running row whose places have all been raced for."""
    valid = place <= counts
    kinds = tl.load(record_ptr + place * _RECORD + KIND, mask=valid, other=0)
    bests = tl.load(record_ptr + place * _RECORD + BEST, mask=valid, other=0)
    races = tl.load(counters_ptr + place * _COUNTERS + RACE, mask=valid, other=0, cache_modifier=".cg")
    beyond = tl.load(counters_ptr + place * _COUNTERS + RACE_BEYOND, mask=valid, other=0, cache_modifier=".cg")
    shares = tl.load(counters_ptr + place * _COUNTERS + BEYOND, mask=valid, other=0, cache_modifier=".cg")
    drafts = tl.load(drafts_ptr + place, mask=place < num_drafts, other=0)
    picks = tl.where(kinds == GREEDY, bests, winning_id(tl.maximum(races, 1)).to(tl.int32)).to(tl.int64)
    greedy = tl.sum(tl.where((place == 0) & (kinds == GREEDY), 1, 0), axis=0) > 0
    matched = _leading((picks == drafts) & (kinds != BROKEN), place, counts, PLACES)
    accepted = matched
    if (RULE != BY_COUPLING) & (greedy == 0):
        first, last, carried = span(record_ptr, place, counts, seed, length, RULE, PLACES)
        accepted = last
        if RULE == BY_BLOCK:
            excess = shares.to(tl.float32) * NO_SHARE
            chance = tl.div_rn(excess, tl.maximum(excess + (1.0 - carried), TINY))
            chance = tl.where(kinds == BROKEN, 0.0, chance)
            # place i comes after i drafts; the coin of the last of them is that of the place before
            fallen = (coin(seed, length + place - 1, ACCEPT) < chance) & (place > 0) & (place < counts)
            accepted = tl.where(first == counts, counts, tl.max(tl.where(fallen, place, 0), axis=0))
        residual = (accepted < counts) & (at_place(beyond.to(tl.float32), place, accepted) > 0)
        picks = tl.where(residual, winning_id(tl.maximum(beyond, 1)), picks)
        picks = tl.where(place == accepted, picks, drafts)
    broken = (kinds == BROKEN) & valid
    first_broken = tl.min(tl.where(broken, place, PLACES), axis=0)
    block = tl.where(valid, picks, drafts)
    block = tl.minimum(tl.maximum(block, 0), vocab - 1)
    return tl.where(first_broken <= accepted, -1 - first_broken, accepted), tl.where(place <= num_drafts, block, -1)
