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
    GROUP,
    KEY_LOWEST,
    KIND,
    KNOWN,
    P_DRAFT,
    Q_DRAFT,
    RACE,
    RACE_BEYOND,
    RACERS,
    RECORD,
    coin,
    kept,
    key_of,
    times,
    times_of,
    value_of,
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
NO_RANK = tl.constexpr(-2147483648)
_GROUP = tl.constexpr(GROUP)
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
def spread(record_ptr, place, first, last, RACED):
    """Whether the race for any of the places first..last is shared out: it has more ids than are listed."""
    within = (place >= first) & (place <= last)
    racers = tl.load(record_ptr + place * _RECORD + RACERS, mask=within, other=0)
    kinds = tl.load(record_ptr + place * _RECORD + KIND, mask=within, other=BROKEN)
    return tl.max((((racers < 0) | (racers > RACED)) & (kinds < GREEDY)).to(tl.int32), axis=0) > 0


@triton.jit
def _entry(p, time, index, q_ptr, draft, c, beyond):
    """(int32 rank in the race for a place, what p has beyond q) of each id.

    A race under what p has beyond q outranks one under p, which counts only where nothing is beyond: ranks of the first
    are not negative. An id that does not race has the lowest rank.
    """
    excess = tl.zeros_like(p)
    if beyond:
        q = (index == draft).to(tl.float32)
        if q_ptr is not None:
            q = tl.load(q_ptr + index, mask=p > 0, other=0.0)
        excess = tl.where(c * p > q, c * p - q, 0.0)
    weights = tl.where(excess > 0, excess, p)
    bits = tl.where(weights > 0, weights / time, 0.0).to(tl.int32, bitcast=True)
    return tl.where(excess > 0, bits, bits | NO_RANK), excess


@triton.jit
def _merge(rank, index, share, counters_ptr, RULE: tl.constexpr):
    """Merges a race of some ids, and what p has beyond q, into those for a place."""
    best = tl.max(rank, axis=0)
    first = tl.min(tl.where(rank == best, index, 0x7FFFFFFF), axis=0)
    if best != NO_RANK:
        packed = (((best & 0x7FFFFFFF).to(tl.int64) << 31) | (0x7FFFFFFF - first)) + 1
        tl.atomic_max(counters_ptr + tl.where(best < 0, RACE, RACE_BEYOND), packed, sem="relaxed")
    if RULE == BY_BLOCK:
        total = tl.sum(share, axis=0)
        if total > 0:
            tl.atomic_add(counters_ptr + BEYOND, total, sem="relaxed")


@triton.jit
def race(
    q_ptr, law, view, tops_ptr, groups, counters_ptr, draft, c, beyond, seed, position, begin, min_p, RULE, CHUNK, STOPS
):
    """Lets the ids of every so many chunks race for a place, and sums what p has beyond q.

    Of four ids each the best is kept, and all are compared in the end: no chunk waits for another one's sums. What four
    ids sum to is added as an integer, so it does not matter how chunks are shared out.
    """
    LANES: tl.constexpr = CHUNK // 4
    # it is known not to be greedy: fewer registers
    law = tl.full([], KNOWN, tl.int32), law[1], law[2], law[3], law[4], tl.full([], -1, tl.int32)
    best = tl.zeros([LANES], tl.int32) + NO_RANK
    who = tl.zeros([LANES], tl.int32)
    shares = tl.zeros([LANES], tl.int64)
    for chunk in range(begin, tl.cdiv(view[13], CHUNK), tl.num_programs(0)):
        group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
        tops = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"))
        if key_of(tl.max(tops, axis=0)) >= law[3]:
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            p = probabilities(law, view, index, min_p, STOPS)
            time = times(seed, position, TARGET, chunk * CHUNK, CHUNK)
            rank, excess = _entry(p, time, index, q_ptr, draft, c, beyond)
            if RULE == BY_BLOCK:
                shares += (tl.sum(tl.reshape(excess, [LANES, 4]), axis=1) * SHARE).to(tl.int64)
            ranks = tl.reshape(rank, [LANES, 4])
            most = tl.max(ranks, axis=1)
            first = tl.min(tl.where(ranks == most[:, None], tl.reshape(index, [LANES, 4]), 0x7FFFFFFF), axis=1)
            # among equals the lowest id, which comes first
            who = tl.where(most > best, first, who)
            best = tl.maximum(most, best)
    _merge(best, who, shares, counters_ptr, RULE)


@triton.jit
def race_of_few(q_ptr, law, found_ptr, number, counters_ptr, draft, c, beyond, seed, position, min_p, RULE, MOST, SIZE):
    """`race` of all ids that a law keeps, among those listed: `probabilities` of the same logits."""
    slot = tl.arange(0, SIZE)
    there = slot < number
    key = tl.load(found_ptr + slot, mask=there, other=KEY_LOWEST)
    index = tl.load(found_ptr + MOST + slot, mask=there, other=0)
    e = tl.exp(value_of(key) - law[1])
    keeps = kept(key, index, e, law[3], law[4], min_p)
    p = tl.where(keeps, tl.div_rn(e, law[2] + tl.zeros_like(e)), 0.0)
    rank, excess = _entry(p, times_of(seed, position, TARGET, index), index, q_ptr, draft, c, beyond)
    _merge(rank, index, (excess * SHARE).to(tl.int64), counters_ptr, RULE)


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
