"""Device code that judges a row's drafts: which places can end the row, the ids sampled there, and what is
accepted.

The rules are those of `fastspec.sampling.verify`. Every program of a row computes the carried ratios and the uniform
numbers `accept_u` for itself, from the records that distribution.py left; sampled_commit.py launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.sampling.distribution import LINE_DISTRIBUTION, load_distribution, probabilities, share
from fastspec.kernels.sampling.logits import (
    BEST,
    COUNTERS,
    GREEDY,
    GROUP,
    INVALID,
    KEY_LOWEST,
    KIND,
    KNOWN,
    NUM_LISTED,
    P_DRAFT,
    Q_DRAFT,
    RECORD,
    RESIDUAL,
    RESIDUAL_WINNER,
    WINNER,
    key_of,
    times,
    times_of,
    uniform,
    value_of,
    winning_id,
)
from fastspec.sampling import distribution
from fastspec.sampling.rules import BLOCK, COUPLED, REJECTION

RULES = {REJECTION: 0, BLOCK: 1, COUPLED: 2}
BY_REJECTION, BY_BLOCK, BY_COUPLING = map(tl.constexpr, RULES.values())
ACCEPT, TARGET = tl.constexpr(distribution.ACCEPT), tl.constexpr(distribution.TARGET)
# fixed point: the residual sums to one at most
SHARE = tl.constexpr(2.0**60)
NO_SHARE = tl.constexpr(2.0**-60)
AT_ONCE = tl.constexpr(4)
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
def reported(record_ptr, place, num_places):
    """(P_DRAFT, Q_DRAFT, NUM_LISTED, KIND) [PLACES] of a row's lines; undefined where not recorded."""
    record_ptr += place * _RECORD
    known = place < num_places
    p = tl.load(record_ptr + P_DRAFT, mask=known, other=0).to(tl.float32, bitcast=True)
    q = tl.load(record_ptr + Q_DRAFT, mask=known, other=0).to(tl.float32, bitcast=True)
    num_listed = tl.load(record_ptr + NUM_LISTED, mask=known, other=0)
    return p, q, num_listed, tl.load(record_ptr + KIND, mask=known, other=INVALID)


@triton.jit
def _ratios(p, q, place, counts, seed, length, RULE: tl.constexpr):
    """(p/q of the draft at each place, its uniform number, c_i before each place): fp32 [PLACES];
    `verify.accept_probability` and `verify._carried`.
    """
    counted = place < counts
    p, q = tl.where(counted, p, 0.0), tl.where(counted, q, 0.0)
    ratio = tl.where(q > 0, tl.div_rn(p, tl.maximum(q, TINY)), 1.0)
    accept_u = uniform(seed, length + place, ACCEPT)
    carried = tl.full(place.shape, 1.0, tl.float32)
    if RULE == BY_BLOCK:
        c = tl.full([], 1.0, tl.float32)
        for start in range(0, counts, AT_ONCE):
            # sums of some places side by side, for none needs another; beyond the last the ratio is one
            for more in tl.static_range(AT_ONCE):
                c = c * at_place(ratio, place, start + more)
                c = tl.where(c > 1.0, 1.0, c)  # and a NaN stays one
                carried = tl.where(place == start + more + 1, c, carried)
    else:
        ratio = tl.where(p > 0, tl.where(ratio > 1.0, 1.0, ratio), tl.where(p == p, 0.0, p))
    return ratio, accept_u, carried


@triton.jit
def _leading(flags, place, counts, PLACES: tl.constexpr):
    """How many of the first `counts` flags [PLACES] hold before the first that does not."""
    return tl.min(tl.where(flags & (place < counts), PLACES, place), axis=0)


@triton.jit
def span(p, q, place, counts, seed, length, RULE: tl.constexpr, PLACES: tl.constexpr):
    """(first, last) of the places at which a row may end, and c_i [PLACES]."""
    ratio, accept_u, carried = _ratios(p, q, place, counts, seed, length, RULE)
    first = counts * 0
    last = counts
    if RULE == BY_REJECTION:
        first = _leading(accept_u < ratio, place, counts, PLACES)
        last = first
    if RULE == BY_BLOCK:
        below = (counts == 0) | (at_place(accept_u, place, counts - 1) < at_place(carried, place, counts))
        first = tl.where(below, counts, 0)
        last = tl.where(below, counts, counts - 1)
    return first, last, carried


@triton.jit
def is_shared(num_listed, kinds, place, first, last, MAX_LISTED):
    """Whether all programs of a row sample its places first..last: one of them has more ids than are listed."""
    many = ((num_listed < 0) | (num_listed > MAX_LISTED)) & (kinds < GREEDY) & (place >= first) & (place <= last)
    return tl.max(many.to(tl.int32), axis=0) > 0


@triton.jit
def place_of(record_ptr, drafts_ptr, carried, place, at, counts, vocab):
    """(distribution, draft, c) of one place: the draft is -1 where there is none, or none that is an id."""
    draft = tl.load(drafts_ptr + at, mask=at < counts, other=-1)
    draft = tl.where((draft >= 0) & (draft < vocab), draft, -1).to(tl.int32)
    return load_distribution(record_ptr + at * _RECORD), draft, at_place(carried, place, at)


@triton.jit
def _drafted(p, index, q_ptr, draft):
    """Probabilities of ids under the draft's distribution, where p is positive."""
    q = (index == draft).to(tl.float32)
    if q_ptr is not None:
        q = tl.load(q_ptr + index, mask=p > 0, other=0.0)
    return q


@triton.jit
def _excess(p, q, c):
    """max(c p - q, 0): the residual, not normalised."""
    return tl.where(c * p > q, c * p - q, 0.0)


@triton.jit
def _entry(p, excess, time):
    """int32 rank of each id: the highest one is sampled (probability over an exponential time, `PhiloxDraws`).

    Ranks under the residual are not negative and so come before ranks under p, which count only where the residual is
    zero. An id without probability has the lowest rank.
    """
    weights = tl.where(excess > 0, excess, p)
    bits = tl.where(weights > 0, weights / time, 0.0).to(tl.int32, bitcast=True)
    return tl.where(excess > 0, bits, bits | NO_RANK)


@triton.jit
def _merge(rank, index, share, counters_ptr, RULE: tl.constexpr):
    """Merges the best rank of some ids, and their sum of the residual, into those of a place."""
    best = tl.max(rank, axis=0)
    first = tl.min(tl.where(rank == best, index, 0x7FFFFFFF), axis=0)
    if best != NO_RANK:
        packed = (((best & 0x7FFFFFFF).to(tl.int64) << 31) | (0x7FFFFFFF - first)) + 1
        tl.atomic_max(counters_ptr + tl.where(best < 0, WINNER, RESIDUAL_WINNER), packed, sem="relaxed")
    if RULE == BY_BLOCK:
        total = tl.sum(share, axis=0)
        if total > 0:
            tl.atomic_add(counters_ptr + RESIDUAL, total, sem="relaxed")


@triton.jit
def sample_dense(
    q_ptr,
    dist,
    view,
    tops_ptr,
    groups,
    counters_ptr,
    draft,
    c,
    beyond,
    seed,
    position,
    begin,
    min_p,
    RULE,
    CHUNK,
    STOPS,
):
    """Ranks the ids of this program's chunks for a place, and sums the residual.

    Of four ids each the best is kept, and all are compared in the end: no chunk waits for another one's sums. What four
    ids sum to is added as an integer, so it does not matter how chunks are shared out.
    """
    LANES: tl.constexpr = CHUNK // 4
    # it is known not to be greedy: fewer registers
    known, none = tl.full([], KNOWN, tl.int32), tl.full([], -1, tl.int32)
    dist = LINE_DISTRIBUTION(known, dist.largest, dist.normaliser, dist.key, dist.cut, none)
    best = tl.zeros([LANES], tl.int32) + NO_RANK
    who = tl.zeros([LANES], tl.int32)
    shares = tl.zeros([LANES], tl.int64)
    # what is computed ahead of a loop takes registers
    for chunk in tl.range(begin, tl.cdiv(view.vocab, CHUNK), tl.num_programs(0), disable_licm=True):
        group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
        tops = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"))
        if key_of(tl.max(tops, axis=0)) >= dist.key:
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            p = probabilities(dist, view, index, min_p, STOPS)
            time = times(seed, position, TARGET, chunk * CHUNK, CHUNK)
            excess = tl.zeros_like(p)
            if beyond:
                excess = _excess(p, _drafted(p, index, q_ptr, draft), c)
            rank = _entry(p, excess, time)
            if RULE == BY_BLOCK:
                shares += (tl.sum(tl.reshape(excess, [LANES, 4]), axis=1) * SHARE).to(tl.int64)
            ranks = tl.reshape(rank, [LANES, 4])
            highest = tl.max(ranks, axis=1)
            first = tl.min(tl.where(ranks == highest[:, None], tl.reshape(index, [LANES, 4]), 0x7FFFFFFF), axis=1)
            # among equals the lowest id, which comes first
            who = tl.where(highest > best, first, who)
            best = tl.maximum(highest, best)
    _merge(best, who, shares, counters_ptr, RULE)


@triton.jit
def listed_from(start, end, found_ptr, MAX_FOUND: tl.constexpr, SIZE: tl.constexpr):
    """(keys, ids) int32 [SIZE] listed from `start` on, before `end`: beyond the last they are undefined."""
    slot = start + tl.arange(0, SIZE)
    there = slot < end
    return tl.load(found_ptr + slot, mask=there, other=0), tl.load(found_ptr + MAX_FOUND + slot, mask=there, other=0)


@triton.jit
def sample_listed(
    q_ptr, dist, few, found_ptr, number, counters_ptr, draft, c, beyond, seed, position, min_p, RULE, MAX_FOUND, SIZE
):
    """`sample_dense` of all ids that a distribution keeps, where they are listed; `few` are the first of them."""
    key, index = few
    best = tl.zeros([SIZE], tl.int32) + NO_RANK
    who = tl.zeros([SIZE], tl.int32)
    shares = tl.zeros([SIZE], tl.int64)
    for start in range(0, number, SIZE):
        there = start + tl.arange(0, SIZE) < number
        p = share(dist, value_of(tl.where(there, key, KEY_LOWEST)), index, min_p)
        q = _drafted(tl.where(beyond, p, 0.0), index, q_ptr, draft)
        # while these are in flight
        time = times_of(seed, position, TARGET, index)
        excess = tl.where(beyond, _excess(p, q, c), 0.0)
        rank = _entry(p, excess, time)
        shares += (excess * SHARE).to(tl.int64)
        better = (rank > best) | ((rank == best) & (index < who))
        who = tl.where(better, index, who)
        best = tl.maximum(rank, best)
        key, index = listed_from(start + SIZE, number, found_ptr, MAX_FOUND, SIZE)
    _merge(best, who, shares, counters_ptr, RULE)


@triton.jit
def judged(ends, record_ptr, counters_ptr, drafts_ptr, place, counts, num_drafts, vocab, seed, length, RULE, PLACES):
    """(accepted, block [PLACES]) of a running row whose places have all been sampled; `ends` by `span`.

    `counts` are its drafts up to the first place without a distribution.
    """
    valid = place <= counts
    kinds = tl.load(record_ptr + place * _RECORD + KIND, mask=valid, other=0)
    bests = tl.load(record_ptr + place * _RECORD + BEST, mask=valid, other=0)
    winners = tl.load(counters_ptr + place * _COUNTERS + WINNER, mask=valid, other=0, cache_modifier=".cg")
    beyond = tl.load(counters_ptr + place * _COUNTERS + RESIDUAL_WINNER, mask=valid, other=0, cache_modifier=".cg")
    shares = tl.load(counters_ptr + place * _COUNTERS + RESIDUAL, mask=valid, other=0, cache_modifier=".cg")
    drafts = tl.load(drafts_ptr + place, mask=place < num_drafts, other=0)
    picks = tl.where(kinds == GREEDY, bests, winning_id(tl.maximum(winners, 1)).to(tl.int32)).to(tl.int64)
    greedy = tl.sum(tl.where((place == 0) & (kinds == GREEDY), 1, 0), axis=0) > 0
    matched = _leading((picks == drafts) & (kinds != INVALID), place, counts, PLACES)
    accepted = matched
    if (RULE != BY_COUPLING) & (greedy == 0):
        first, last, carried = ends
        accepted = last
        if RULE == BY_BLOCK:
            excess = shares.to(tl.float32) * NO_SHARE
            chance = tl.div_rn(excess, tl.maximum(excess + (1.0 - carried), TINY))
            chance = tl.where(kinds == INVALID, 0.0, chance)
            # place i comes after i drafts; the number of the last of them is that of the place before
            below = (uniform(seed, length + place - 1, ACCEPT) < chance) & (place > 0) & (place < counts)
            accepted = tl.where(first == counts, counts, tl.max(tl.where(below, place, 0), axis=0))
        residual = (accepted < counts) & (at_place(beyond.to(tl.float32), place, accepted) > 0)
        picks = tl.where(residual, winning_id(tl.maximum(beyond, 1)), picks)
        picks = tl.where(place == accepted, picks, drafts)
    invalid = (kinds == INVALID) & valid
    first_invalid = tl.min(tl.where(invalid, place, PLACES), axis=0)
    block = tl.where(valid, picks, drafts)
    block = tl.minimum(tl.maximum(block, 0), vocab - 1)
    return tl.where(first_invalid <= accepted, first_invalid - 1, accepted), tl.where(place <= num_drafts, block, -1)
