"""Verifies draft tokens of sampled rows and commits the step, in three launches.

The definition is `fastspec.sampling.verify`: `rejection` (Leviathan et al. 2022, Chen et al. 2023), `block` (Sun et al.
2024) or `coupled`, with p = `distribution.compute_probs` of `processors.process`. Invalid logits are handled as by
`processors.flag_invalid`. Then come `verify.commit` and `processors.count`. A greedy row's distribution is 1 on its
argmax. So it accepts drafts that equal it, under every rule.

A *place* is the number 0 .. k of a scored position: place j comes after j draft tokens. A row *ends* at the place where
the token after its accepted drafts is sampled. p is the target's distribution and q the draft's. c is the factor of
block verification (`verify.block`); under other rules it is 1. The residual is max(c p - q, 0).

    launch 1, 2   distribution.py fills a record for each place of each row
    launch 3      each CTA reads the records of its row, and finds the places where the row may end (`span`)
                  it samples among its ids at these places, under p and under the residual, and sums the residual
                  the last CTA of a row decides how many drafts are accepted, and commits the row (commit.py)

| rule      | places where a row may end, given its records and uniform random numbers                       |
|-----------|------------------------------------------------------------------------------------------------|
| rejection | one                                                                                            |
| block     | the place after all drafts, if the uniform number of the last draft is below c; else all before |
| coupled   | all                                                                                            |

Samples are merged by an atomic maximum, and sums are fixed point. So neither the split into chunks nor the order of
CTAs changes a bit. If all these places have few ids (NUM_LISTED), one CTA processes each place. For a row that samples
nothing, one CTA does everything. Random numbers are those of `distribution.PhiloxDraws`.

| argument    | shape, dtype     | notes                                                                        |
|-------------|------------------|------------------------------------------------------------------------------|
| logits      | [B, k+1, V] fp32 | V < 2^19; contiguous, or positions at one common stride                      |
| draft_probs | [B, K, V] fp32   | buffer of the state; not read if drafts are deterministic                    |
| scratch     | see commit.py    |                                                                              |
| work        | sampled_work     | counters are zero between launches: the last CTA that uses them clears them  |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch
from fastspec.kernels.reference.sampled import SampledRows
from fastspec.kernels.reference.step import Record
from fastspec.kernels.sampling import commit as committing
from fastspec.kernels.sampling import logits as sampled_parts
from fastspec.kernels.sampling import logprobs
from fastspec.kernels.sampling.commit import SIZES, STATE_INTS, Ring, commit_row
from fastspec.kernels.sampling.distribution import (
    LINE_DISTRIBUTION,
    find_distributions,
    load_distribution,
    probabilities,
    share,
)
from fastspec.kernels.sampling.logits import (
    BEST,
    CARRIED,
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
    RUNNING,
    WINNER,
    check_draft_probs,
    check_source,
    key_of,
    times,
    times_of,
    uniform,
    value_of,
    view_of,
    winning_id,
)
from fastspec.kernels.sampling.logprobs import check_record
from fastspec.sampling import distribution
from fastspec.sampling.rules import BLOCK, COUPLED, REJECTION
from fastspec.sampling.verify import Draws

RULES = {REJECTION: 0, BLOCK: 1, COUPLED: 2}
BY_REJECTION, BY_BLOCK, BY_COUPLING = map(tl.constexpr, RULES.values())
ACCEPT, TARGET = tl.constexpr(distribution.ACCEPT), tl.constexpr(distribution.TARGET)
# sums of the residual are int64 multiples of NO_SHARE; the residual sums to at most 1
SHARE = tl.constexpr(2.0**60)
NO_SHARE = tl.constexpr(2.0**-60)
AT_ONCE = tl.constexpr(4)  # number of places whose sums are computed together
TINY = tl.constexpr(1.1754943508222875e-38)
NO_RANK = tl.constexpr(-2147483648)  # rank (`_entry`) of an id without probability
_GROUP = tl.constexpr(GROUP)
_RECORD = tl.constexpr(RECORD)
_COUNTERS = tl.constexpr(COUNTERS)


@triton.jit
def at_place(values, place, index):
    """Returns element `index` of the tensor `values` [PLACES]. `place` is arange(PLACES)."""
    return tl.sum(tl.where(place == index, values, 0.0), axis=0)


@triton.jit
def reported(record_ptr, place, num_places):
    """Loads the fields P_DRAFT, Q_DRAFT, NUM_LISTED and KIND of a row's records, each [PLACES].

    Fields that were not stored (distribution.py) have undefined values.
    """
    record_ptr += place * _RECORD
    known = place < num_places
    p = tl.load(record_ptr + P_DRAFT, mask=known, other=0).to(tl.float32, bitcast=True)
    q = tl.load(record_ptr + Q_DRAFT, mask=known, other=0).to(tl.float32, bitcast=True)
    num_listed = tl.load(record_ptr + NUM_LISTED, mask=known, other=0)
    return p, q, num_listed, tl.load(record_ptr + KIND, mask=known, other=INVALID)


@triton.jit
def _ratios(p, q, place, counts, seed, length, RULE: tl.constexpr):
    """Returns the ratio p/q of each draft token, its uniform random number, and c at each place, each fp32 [PLACES].

    The ratio is limited to 1 (`verify.accept_probability`), except under the rule block. c at place i is the product of
    the first i ratios, limited to 1 after each factor (`verify.block`). Under other rules c is 1.

    Args:
        p, q: probabilities of the draft tokens under the target and under the draft model, [PLACES].
        place: arange(PLACES).
        counts: number of valid draft tokens.
        seed, length: seed and length of the batch row, keys of the random numbers.
        RULE: rule of verification.
    """
    counted = place < counts
    p, q = tl.where(counted, p, 0.0), tl.where(counted, q, 0.0)
    ratio = tl.where(q > 0, tl.div_rn(p, tl.maximum(q, TINY)), 1.0)
    accept_u = uniform(seed, length + place, ACCEPT)
    carried = tl.full(place.shape, 1.0, tl.float32)
    if RULE == BY_BLOCK:
        c = tl.full([], 1.0, tl.float32)
        for start in range(0, counts, AT_ONCE):
            # sums of AT_ONCE places overlap, because they are independent; beyond `counts` the ratio is 1
            for more in tl.static_range(AT_ONCE):
                c = c * at_place(ratio, place, start + more)
                c = tl.where(c > 1.0, 1.0, c)  # a NaN stays a NaN
                carried = tl.where(place == start + more + 1, c, carried)
    else:
        ratio = tl.where(p > 0, tl.where(ratio > 1.0, 1.0, ratio), tl.where(p == p, 0.0, p))
    return ratio, accept_u, carried


@triton.jit
def _leading(flags, place, counts, PLACES: tl.constexpr):
    """Returns the number of True values before the first False value, among the first `counts` of flags [PLACES]."""
    return tl.min(tl.where(flags & (place < counts), PLACES, place), axis=0)


@triton.jit
def span(p, q, place, counts, seed, length, RULE: tl.constexpr, PLACES: tl.constexpr):
    """Returns the first and the last place where a batch row may end, and c at each place, fp32 [PLACES].

    A place is the index of a scored position. A row ends at the place where the token after its accepted draft tokens
    is sampled. For c and the arguments see `_ratios`.
    """
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
    """True if one of the places first..last has more listed ids than MAX_LISTED, or an unknown number of listed ids.

    Then all CTAs of the batch row sample together. `num_listed` and `kinds` are results of `reported`.
    """
    many = ((num_listed < 0) | (num_listed > MAX_LISTED)) & (kinds < GREEDY) & (place >= first) & (place <= last)
    return tl.max(many.to(tl.int32), axis=0) > 0


@triton.jit
def place_of(record_ptr, drafts_ptr, carried, place, at, counts, vocab):
    """Returns the target's distribution, the draft token, and the factor c at place `at` of a batch row.

    The draft token is -1 if there is none, or if it is not in 0 .. vocab - 1. `carried` has c at all places, see
    `span`.
    """
    draft = tl.load(drafts_ptr + at, mask=at < counts, other=-1)
    draft = tl.where((draft >= 0) & (draft < vocab), draft, -1).to(tl.int32)
    return load_distribution(record_ptr + at * _RECORD), draft, at_place(carried, place, at)


@triton.jit
def _drafted(p, index, q_ptr, drawn, draft):
    """Returns the probabilities q of ids `index` under the draft model. They are undefined where p is not positive.

    If q_ptr is None or `drawn` is 0, the draft token was not drawn: q is 1 on the id `draft`, else 0.
    """
    q = (index == draft).to(tl.float32)
    if q_ptr is not None:
        q = tl.where(drawn != 0, tl.load(q_ptr + index, mask=(p > 0) & (drawn != 0), other=0.0), q)
    return q


@triton.jit
def _excess(p, q, c):
    """Returns the residual max(c p - q, 0) of each id, without normalisation."""
    return tl.where(c * p > q, c * p - q, 0.0)


@triton.jit
def _entry(p, excess, time):
    """Returns an int32 rank of each id; the id with the highest rank is sampled.

    The rank is the bits of weight / time, with the id's random Exponential(1) time. The weight is the residual
    `excess`, or p if the residual is zero. Ranks from the residual are not negative; ranks from p are negative. So
    ranks from p matter only if the residual of all ids is zero. An id with p = 0 has the lowest rank, NO_RANK.
    """
    weights = tl.where(excess > 0, excess, p)
    bits = tl.where(weights > 0, weights / time, 0.0).to(tl.int32, bitcast=True)
    return tl.where(excess > 0, bits, bits | NO_RANK)


@triton.jit
def _merge(rank, index, share, counters_ptr, RULE: tl.constexpr):
    """Merges the highest rank among the ids `index` into the counters of a place, together with its id.

    Under the rule block it also adds `share`, the residual of the ids in fixed point, to the counter RESIDUAL.
    """
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
    drawn,
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
    """Samples among the ids of this CTA's chunks at one place, and sums their residual.

    The results are merged into the counters of the place. The loop keeps the best of every 4 ids, and compares these at
    the end, so no chunk waits for a reduction. Sums of 4 ids are added as integers, so the split into chunks does not
    change a bit.

    Args:
        q_ptr, drawn, draft: see `_drafted`.
        dist: `LineDistribution` of the place, not greedy.
        view: `View` of the place.
        tops_ptr: largest scaled logit of each of the `groups` groups of ids.
        counters_ptr: counters of the place.
        c: factor of p in the residual max(c p - q, 0).
        beyond: True if the place has a draft token and the rule has a residual.
        seed, position: keys of the random numbers.
        begin: this CTA's first chunk.
    """
    LANES: tl.constexpr = CHUNK // 4
    # the line is not greedy here; constants need no registers
    known, none = tl.full([], KNOWN, tl.int32), tl.full([], -1, tl.int32)
    dist = LINE_DISTRIBUTION(known, dist.largest, dist.normaliser, dist.key, dist.cut, none)
    best = tl.zeros([LANES], tl.int32) + NO_RANK
    who = tl.zeros([LANES], tl.int32)
    shares = tl.zeros([LANES], tl.int64)
    # disable_licm: values hoisted out of the loop would take registers
    for chunk in tl.range(begin, tl.cdiv(view.vocab, CHUNK), tl.num_programs(0), disable_licm=True):
        group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
        tops = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"))
        if key_of(tl.max(tops, axis=0)) >= dist.key:
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            p = probabilities(dist, view, index, min_p, STOPS)  # [CHUNK]
            time = times(seed, position, TARGET, chunk * CHUNK, CHUNK)
            excess = tl.zeros_like(p)
            if beyond:
                excess = _excess(p, _drafted(p, index, q_ptr, drawn, draft), c)
            rank = _entry(p, excess, time)
            if RULE == BY_BLOCK:
                shares += (tl.sum(tl.reshape(excess, [LANES, 4]), axis=1) * SHARE).to(tl.int64)
            ranks = tl.reshape(rank, [LANES, 4])  # LANES = CHUNK / 4
            highest = tl.max(ranks, axis=1)
            first = tl.min(tl.where(ranks == highest[:, None], tl.reshape(index, [LANES, 4]), 0x7FFFFFFF), axis=1)
            # ids ascend, so of equal ranks the one seen first stays
            who = tl.where(highest > best, first, who)
            best = tl.maximum(highest, best)
    _merge(best, who, shares, counters_ptr, RULE)


@triton.jit
def listed_from(start, end, found_ptr, MAX_FOUND: tl.constexpr, SIZE: tl.constexpr):
    """Loads the keys and the ids of SIZE listed ids of a place from index `start` on, each int32 [SIZE].

    They are undefined from index `end` on.
    """
    slot = start + tl.arange(0, SIZE)
    there = slot < end
    return tl.load(found_ptr + slot, mask=there, other=0), tl.load(found_ptr + MAX_FOUND + slot, mask=there, other=0)


@triton.jit
def sample_listed(
    q_ptr,
    drawn,
    dist,
    few,
    found_ptr,
    number,
    counters_ptr,
    draft,
    c,
    beyond,
    seed,
    position,
    min_p,
    RULE,
    MAX_FOUND,
    SIZE,
):
    """Samples at one place whose kept ids are all listed at `found_ptr`, in one CTA.

    `few` is the result of `listed_from` for the first SIZE ids. `number` is the number of listed ids. For the results
    and the other arguments see `sample_dense`.
    """
    key, index = few
    best = tl.zeros([SIZE], tl.int32) + NO_RANK
    who = tl.zeros([SIZE], tl.int32)
    shares = tl.zeros([SIZE], tl.int64)
    for start in range(0, number, SIZE):
        there = start + tl.arange(0, SIZE) < number
        p = share(dist, value_of(tl.where(there, key, KEY_LOWEST)), index, min_p)
        q = _drafted(tl.where(beyond, p, 0.0), index, q_ptr, drawn, draft)
        # computed here, to overlap with the loads above
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
def judged(
    first, last, record_ptr, counters_ptr, drafts_ptr, place, counts, num_drafts, vocab, seed, length, RULE, PLACES
):
    """Returns the number of accepted draft tokens of a batch row, and its block of tokens, int64 [PLACES].

    It runs after all CTAs of the row have sampled. The block has the accepted draft tokens, then the token sampled
    after them. `first` and `last` are results of `span`. `counts` is the number of the row's draft tokens before its
    first position with invalid logits.
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
        accepted = last
        if RULE == BY_BLOCK:
            carried = tl.load(record_ptr + place * _RECORD + CARRIED, mask=valid, other=0).to(tl.float32, bitcast=True)
            excess = shares.to(tl.float32) * NO_SHARE
            chance = tl.div_rn(excess, tl.maximum(excess + (1.0 - carried), TINY))
            chance = tl.where(kinds == INVALID, 0.0, chance)
            # place i comes after i drafts: the uniform number of draft i is that of place i - 1
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


@triton.jit(noinline=True)  # see logits.py
def _finish_row(
    source,
    records_ptr,
    counters_ptr,
    arrivals_ptr,
    state,  # StateRows
    scratch_ptr,
    ring,
    recorded,  # RecordRows
    row,
    low,
    high,
    counts,
    running,
    seed,
    length,
    num_places,
    tokens_width,
    block_stride,
    slots,
    entry_width,
    batch,
    places,
    details_width,
    RULE: tl.constexpr,
    TOP: tl.constexpr,
    PLACES: tl.constexpr,
    STOPS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
):
    """Decides how many draft tokens of a batch row are accepted, and commits the row. Clears the row's counters.

    It runs in the row's last CTA, after all CTAs have sampled. `low` and `high` are the first two results of `span`;
    the third is in the records. The other arguments are those of `_end_kernel`, and values that it has loaded.
    """
    tl.debug_barrier()  # if a CTA works alone, it waits here for the atomics of its own threads
    place = tl.arange(0, PLACES)
    vocab, num_drafts = source.vocab, num_places - 1
    row_records, row_counters = records_ptr + row * num_places * _RECORD, counters_ptr + row * num_places * _COUNTERS
    row_drafts = source.draft_tokens + row * source.drafts_stride
    drafts = tl.load(row_drafts + place, mask=place < num_drafts, other=0)
    accepted = tl.full([], -1, tl.int32)
    block = tl.where(place <= num_drafts, tl.minimum(tl.maximum(drafts, 0), vocab - 1), -1)
    if running:
        accepted, block = judged(
            *(low, high, row_records, row_counters, row_drafts, place, counts, num_drafts, vocab),
            *(seed, length, RULE, PLACES),
        )
    emitted = commit_row(
        row,
        accepted.to(tl.int64),
        block,
        state,
        scratch_ptr,
        ring,
        SIZES(tokens_width, source.stop_stride, block_stride, slots, entry_width, batch, places, num_drafts),
        source.logits,
        tl.cast(source.logits_stride, tl.int64),
        recorded,
        details_width,
        TOP,
        PLACES,
        STOPS,
        NUM_STOPS,
    )
    tl.atomic_add(source.output_counts + row * source.output_stride + block, 1, mask=place < emitted, sem="relaxed")
    # after the barrier in commit_row all threads have read the counters
    used = place <= num_drafts
    zeros = tl.zeros([PLACES], tl.int64)
    tl.store(row_counters + place * _COUNTERS + WINNER, zeros, mask=used)
    tl.store(row_counters + place * _COUNTERS + RESIDUAL_WINNER, zeros, mask=used)
    tl.store(row_counters + place * _COUNTERS + RESIDUAL, zeros, mask=used)
    tl.store(arrivals_ptr + row, 0)


LAUNCH = {"num_warps": 8, "maxnreg": 128}
PROGRAMS = 264  # approximate number of CTAs per launch: two per SM
MAX_LISTED = 1024  # largest number of listed ids of a place that one CTA samples alone
LISTED = 128  # number of listed ids loaded at a time: usually there are fewer, and a smaller kernel starts sooner


class EndWork(NamedTuple):
    """Kernel argument: tensors of `SampledWork`, and the distributions from which draft tokens were drawn."""

    counters: Any
    arrivals: Any
    records: Any
    groups: Any
    found: Any
    draft_probs: Any  # None: the state has no memory for them


def end_chunk() -> int:
    """Returns the number of ids per CTA in the third launch.

    It is smaller than in the first launch, because sampling needs more registers.
    """
    return max(GROUP, sampled_parts.CHUNK // 4)


@triton.jit(do_not_specialize=["num_places", "drawn", "parts", "details_width", *STATE_INTS])
def _end_kernel(
    source,
    work,  # EndWork
    state,  # StateRows
    scratch_ptr,
    ring,
    recorded,  # RecordRows
    num_places,  # k + 1
    drawn,  # 1: drafts were drawn from `work.draft_probs`; 0: each has probability 1
    q_row,
    q_place,
    tokens_width,
    block_stride,
    slots,
    entry_width,
    batch,
    places,  # K + 1
    parts,  # number of groups of CTAs among which the places of a row are split
    details_width,
    RULE: tl.constexpr,  # a value of RULES
    TOP: tl.constexpr,  # result of `logprobs.width_of`
    CHUNK: tl.constexpr,  # ids per CTA
    MAX_FOUND: tl.constexpr,  # capacity of a place's list
    MAX_LISTED: tl.constexpr,  # the constants above, at most MAX_FOUND
    LISTED: tl.constexpr,
    PLACES: tl.constexpr,
    STOPS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    counters_ptr, arrivals_ptr, records_ptr, q_ptr = work.counters, work.arrivals, work.records, work.draft_probs
    groups_ptr, found_ptr = work.groups, work.found
    vocab, groups = source.vocab, source.groups
    row, part = (tl.program_id(1) // parts).to(tl.int64), tl.program_id(1) % parts
    place = tl.arange(0, PLACES)
    row_records = records_ptr + row * num_places * _RECORD
    # loaded before any branch, so that the loads overlap
    running = tl.load(source.finish + row) == RUNNING
    counts = tl.minimum(tl.load(source.counts + row).to(tl.int32), num_places - 1)
    seed, length = tl.load(source.seeds + row), tl.load(source.lengths + row)
    temperature = tl.load(source.temperature + row)
    p, q, num_listed, kinds = reported(row_records, place, num_places)
    # drafts from the first position with invalid logits on are not valid
    counts = tl.minimum(counts, tl.min(tl.where(kinds == INVALID, place, PLACES), axis=0))
    handled = ((tl.program_id(0) == 0) & (part == 0)).to(tl.int32)
    workers = tl.full([], 1, tl.int32)  # in a row that samples nothing, the first CTA commits alone
    low, high, carried = counts * 0, counts, tl.full([PLACES], 1.0, tl.float32)
    if running & (temperature > 0):
        low, high, carried = span(p, q, place, counts, seed, length, RULE, PLACES)
        if RULE == BY_BLOCK:
            # for `_finish_row`, to which no tensors are passed: each CTA stores the same bits, and reads its own
            bits = carried.to(tl.int32, bitcast=True)
            tl.store(row_records + place * _RECORD + CARRIED, bits, mask=place < num_places)
        dense = is_shared(num_listed, kinds, place, low, high, MAX_LISTED)
        handled = dense.to(tl.int32)
        chunks = tl.cdiv(vocab, CHUNK)
        if dense:
            for at in tl.range(low + part, high + 1, parts, disable_licm=True):
                dist, draft, c = place_of(
                    row_records, source.draft_tokens + row * source.drafts_stride, carried, place, at, counts, vocab
                )
                if dist.kind < GREEDY:
                    # the first chunk of a place belongs to the CTA after that of the previous place's last chunk
                    turn = ((at - low) // parts * chunks) % tl.num_programs(0)
                    begin = (tl.program_id(0) + tl.num_programs(0) - turn) % tl.num_programs(0)
                    line, min_p = row * num_places + at, tl.load(source.min_p + row)
                    line_q = q_ptr
                    if q_ptr is not None:
                        line_q = q_ptr + row * q_row + at * tl.cast(q_place, tl.int64)
                    view = view_of(source, line, row, at)
                    sample_dense(
                        line_q,
                        drawn,
                        *(dist, view, groups_ptr + line * groups * 2, groups, counters_ptr + line * _COUNTERS),
                        *(draft, c, (at < counts) & (RULE != BY_COUPLING), seed, length + at, begin, min_p),
                        *(RULE, CHUNK, NUM_STOPS),
                    )
            workers = parts * tl.num_programs(0)
        else:
            # places with few ids: one CTA each
            mine = low + part * tl.num_programs(0) + tl.program_id(0)
            for at in range(mine, high + 1, parts * tl.num_programs(0)):
                handled += 1
                line = row * num_places + at
                line_found = found_ptr + line * (2 * MAX_FOUND)
                listed = listed_from(0, MAX_FOUND, line_found, MAX_FOUND, LISTED)
                number, min_p = tl.load(row_records + at * _RECORD + NUM_LISTED), tl.load(source.min_p + row)
                dist, draft, c = place_of(
                    row_records, source.draft_tokens + row * source.drafts_stride, carried, place, at, counts, vocab
                )
                if dist.kind < GREEDY:
                    line_q = q_ptr
                    if q_ptr is not None:
                        line_q = q_ptr + row * q_row + at * tl.cast(q_place, tl.int64)
                    sample_listed(
                        line_q,
                        drawn,
                        *(dist, listed, line_found, number, counters_ptr + line * _COUNTERS, draft, c),
                        *((at < counts) & (RULE != BY_COUPLING), seed, length + at, min_p, RULE, MAX_FOUND, LISTED),
                    )
            workers = high + 1 - low
    last = handled == workers
    if (handled > 0) & (last == 0):
        last = tl.atomic_add(arrivals_ptr + row, handled, sem="acq_rel") == workers - handled
    if last:
        _finish_row(
            *(source, records_ptr, counters_ptr, arrivals_ptr, state, scratch_ptr, ring, recorded, row, low, high),
            *(counts, running, seed, length, num_places, tokens_width, block_stride, slots, entry_width, batch, places),
            *(details_width, RULE, TOP, PLACES, STOPS, NUM_STOPS),
        )


def sampled_commit(
    logits: Tensor,
    rows: SampledRows,
    scratch: Any,
    work: Any,
    publish_to: tuple[Tensor, Tensor] | None = None,
    *,
    rule: str,
    deterministic: bool,
    draws: Draws | None,
    record: Record | None = None,
) -> None:
    """Verifies draft tokens by sampling and commits the decode step, as `reference.sampled_commit`, in three launches.

    Args:
        logits, rows, scratch, work, publish_to, rule, deterministic, record: see `reference.sampled_commit`.
        draws: not read. Random numbers come from the rows' seeds.

    Raises:
        ValueError: a layout other than in the table above, or scratch memory that is too small.
    """
    batch, places, vocab = logits.shape
    check_source(logits, rows, work)
    committing.check_rows(rows, batch, places - 1, scratch)
    drawn = not (deterministic or rule == COUPLED or places == 1)
    draft_probs = sampled_parts.draft_probs_of(rows)
    check_draft_probs(draft_probs if drawn else None, vocab)
    if record is not None:
        check_record(record, rows, vocab, places)
    drafts = 0 if rule == COUPLED else places - 1
    find_distributions(logits, rows, work, drafts=drafts, drawn=drawn, ragged=True, record=record)
    source = sampled_parts.source_of(logits, rows)
    tokens_width, _, *others = committing.sizes_of(rows, publish_to)
    _, details_width = logprobs.sizes_of(record)
    chunk = end_chunk()
    chunks, max_found = triton.cdiv(vocab, chunk), work.found.shape[2]
    # under the rule `rejection` a row samples at one place
    parts = 1 if rule == REJECTION else sampled_parts.parts_of(batch, places, chunks)
    # a CTA for each chunk, unless the rows alone fill the device
    programs = max(1, min(chunks, PROGRAMS // (batch * parts)))
    launch(
        _end_kernel,
        (programs, batch * parts),
        source,
        EndWork(work.counters, work.arrivals, work.records, work.groups, work.found, draft_probs),
        *(committing.state_of(rows), scratch, Ring(*(publish_to or (None, None)))),
        logprobs.record_rows(record, rows),
        *(places, int(drawn), *sampled_parts.strides_of(draft_probs)),
        *(tokens_width, *others, batch, rows.block.shape[1], parts),
        details_width,
        **{"RULE": RULES[rule], "TOP": logprobs.width_of(record, rows), "CHUNK": chunk, "MAX_FOUND": max_found},
        **{"MAX_LISTED": min(MAX_LISTED, max_found), "LISTED": min(LISTED, max_found)},
        **committing.blocks_of(rows),
        **LAUNCH,
        **sampled_parts.UNPIPELINED,
        **sampled_parts.OPTIONS,
    )
