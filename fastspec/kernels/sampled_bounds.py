"""First launch of a sampled step: every group's largest logit and mass, and between which logits a threshold must lie.

A program takes CHUNK ids of one line (sampled_parts.py), or several times as many. Relative to its own largest logit a
group of 32 ids needs no other program, so one read of the logits gives the line's largest logit, its normaliser, a
greedy row's pick, and bounds on the threshold of top-k and top-p; the last program to arrive at a line works them out:

- at most as many groups as ids reach a value, so the k-th largest of the groups' maxima is at most the k-th logit;
- ids below t weigh at most 32 exp(t) a group, and no more than their group does: where all of them together weigh
  less than top-p may remove, none of them is kept.

Where that leaves more candidates than the next launch can hold, one id of each group is a sample of the law: bounds
follow from it at 3.5 standard deviations (a flat law), or as many of the likeliest ids as can be held (a law with a
heavy head, of which a sample says little). The next launch checks such bounds.

Sums are taken in one order, over pieces that do not depend on the number of rows, so a line's record does not either.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.sampled_parts import (
    ARRIVED,
    BEST,
    BROKEN,
    COUNTERS,
    CUT,
    GREEDY,
    GROUP,
    GUESSED,
    INTS,
    KEY,
    KEY_LOWEST,
    KEY_OPEN,
    KIND,
    KNOWN,
    MAX,
    NORMALISER,
    RECORD,
    RUNNING,
    SEARCHED,
    UPPER,
    key_of,
    scaled,
    value_of,
    view_of,
)
from fastspec.kernels.sampled_search import added, largest_with

LAUNCH = {"num_warps": 8, "maxnreg": 128}  # two programs a multiprocessor
WIDE_LAUNCH = {"num_warps": 16}  # of more than WIDE_FROM groups, which would take more registers
WIDE_FROM = 2048
DEVIATIONS = tl.constexpr(3.5)  # of a sample's estimate: one line in two thousand misses its threshold
STRIDE = tl.constexpr(29)  # the sample of group g is its id 29 g mod 32
PIVOTS = tl.constexpr(8)  # tried in a step: more take longer to sum than they save
_GROUP = tl.constexpr(GROUP)
_RECORD = tl.constexpr(RECORD)
_COUNTERS = tl.constexpr(COUNTERS)


def launch_of(groups: int) -> dict[str, int]:
    """Options of a launch."""
    return WIDE_LAUNCH if groups > WIDE_FROM else LAUNCH


@triton.jit
def _narrowed(low, high, light):
    """The part of [low, high] between the last of evenly spaced pivots that is light, and the next."""
    step = (high - low) / (PIVOTS + 1)
    number = tl.sum(light.to(tl.int32), axis=0).to(tl.float32)
    return low + number * step, tl.minimum(low + (number + 1.0) * step, high)


@triton.jit
def _largest_below(x, weights, groups, largest, most):
    """A value t: what lies below it weighs at most `most`, by weights of groups whose maxima are x [1, N].

    Ids of a group whose maximum is at least t weigh at most its weight, and at most 32 exp(t - largest).
    """
    low = largest + tl.minimum(tl.log(most / (groups * _GROUP)), 0.0)
    high = largest
    for _ in range(3):
        pivots = low + (tl.arange(0, PIVOTS) + 1) * ((high - low) / (PIVOTS + 1))
        parts = tl.minimum(weights, tl.exp(pivots - largest)[:, None] * _GROUP)
        below = tl.sum(tl.where(x < pivots[:, None], weights, parts), axis=1)
        low, high = _narrowed(low, high, below <= most)
    return low


@triton.jit
def _quantile(x, weights, most, low, high):
    """Values about the largest t in [low, high] for which `weights` of x < t sum to at most `most`: below and above."""
    for _ in range(4):
        pivots = low + (tl.arange(0, PIVOTS) + 1) * ((high - low) / (PIVOTS + 1))
        below = tl.sum(tl.where(x < pivots[:, None], weights, 0.0), axis=1)
        low, high = _narrowed(low, high, below <= most)
    return low, high


@triton.jit
def _guessed(view, lower, upper, largest, normaliser, top_k, top_p, groups, GROUPS: tl.constexpr, MOST, STOPS):
    """(lower, upper, whether they are a guess) from one id of each group, unless the bounds given leave few enough."""
    group = tl.arange(0, GROUPS)[None, :]
    x = scaled(view, tl.where(group < groups, group * _GROUP + (group * STRIDE) % _GROUP, -1), STOPS)
    keys = key_of(x)
    ones = (keys > KEY_LOWEST).to(tl.int32)
    room = tl.maximum(tl.zeros([], tl.int32) + MOST * 4 // 5 // _GROUP, 1)  # samples of what can be held
    low, high = lower, upper
    if added((keys >= lower).to(tl.int32)) > room:
        if top_k > 0:
            rank = top_k.to(tl.float32) / _GROUP
            reach = DEVIATIONS * tl.sqrt(rank) + 2.0
            low = largest_with(keys, ones, tl.ceil(rank + reach).to(tl.int32))
            above = tl.floor(rank - reach).to(tl.int32)
            high = tl.where(above > 0, largest_with(keys, ones, tl.maximum(above, 1)) + 1, upper)
        else:
            weights = tl.exp(x - largest) * _GROUP
            light = (1.0 - top_p) * normaliser
            least = value_of(lower.to(tl.int32))
            edge, _ = _quantile(x, weights, light, least, largest)
            below = tl.where(x < edge, weights, 0.0)
            error = DEVIATIONS * tl.sqrt(added(below * below)) / tl.maximum(added(below), 1e-30)
            under, _ = _quantile(x, weights, light * (1.0 - error), least, edge)
            _, over = _quantile(x, weights, light * (1.0 + error), edge, largest)
            low = key_of(under).to(tl.int64)
            high = tl.where(error > 0, key_of(over).to(tl.int64) + 1, upper)
            if added(((keys >= low) & (keys < high)).to(tl.int32)) > room:
                # few ids hold most of the mass: the likeliest ones, as many as can be held
                low, high = largest_with(keys, ones, room), upper
        low = tl.maximum(low, KEY_LOWEST + 1)
    guessed = (low > lower) & (low < high)
    return tl.where(guessed, low, lower), tl.where(guessed, high, upper), guessed.to(tl.int32)


@triton.jit
def _bounded(view, tops, masses, largest, normaliser, top_k, top_p, min_p, groups, GROUPS, MOST, STOPS):
    """(lower, upper, guessed): every threshold lies at a key in [lower, upper), as far as it can be known here."""
    keys = key_of(tops)
    limits_k = (top_k > 0) & (top_k < view[13])
    limits_p = top_p < 1.0
    floor = key_of(largest + tl.log(tl.maximum(min_p, 1e-37)) - 1e-3).to(tl.int64)
    floor = tl.where((min_p > 0) & ((limits_k & limits_p) == 0), floor, KEY_LOWEST + 1)
    lower = tl.zeros([], tl.int64) + KEY_LOWEST + 1
    upper = tl.zeros([], tl.int64) + KEY_OPEN
    guessed = tl.zeros([], tl.int32)
    if limits_k:
        lower = tl.maximum(lower, largest_with(keys, (tops > -float("inf")).to(tl.int32), top_k))
    elif limits_p:
        # a little less, for sums of groups are rounded
        most = (1.0 - top_p) * normaliser * 0.999
        under = _largest_below(tops, masses, groups, largest, most)
        lower = tl.maximum(lower, key_of(under).to(tl.int64))
    lower = tl.maximum(lower, floor)
    if (limits_k | limits_p) == 0:
        upper = lower  # nothing to look for: all from here on are taken together
    elif (added((keys >= lower).to(tl.int32)) * _GROUP > MOST) & ((limits_k & limits_p) == 0):
        asked = tl.where(limits_k, top_k, 0)
        lower, upper, guessed = _guessed(
            view, lower, upper, largest, normaliser, asked, top_p, groups, GROUPS, MOST, STOPS
        )
    return lower, upper, guessed


@triton.jit
def _store(record_ptr, largest, normaliser, lower, upper, kind, best, guessed, vocab):
    tl.store(record_ptr + MAX, largest.to(tl.int32, bitcast=True))
    tl.store(record_ptr + NORMALISER, normaliser.to(tl.int32, bitcast=True))
    tl.store(record_ptr + KEY, lower.to(tl.int32))
    tl.store(record_ptr + CUT, vocab)
    tl.store(record_ptr + UPPER, upper.to(tl.int32))
    tl.store(record_ptr + KIND, kind)
    tl.store(record_ptr + BEST, best)
    tl.store(record_ptr + GUESSED, guessed)


@triton.jit
def _describe(
    view,
    record_ptr,
    tops_ptr,
    masses_ptr,
    temperature,
    top_k,
    top_p,
    min_p,
    groups,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Stores the record of a line whose groups are complete."""
    vocab = view[13]
    group = tl.arange(0, GROUPS)[None, :]
    tops = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"), cache_modifier=".cg")
    masses = tl.load(masses_ptr + group, mask=group < groups, other=0.0, cache_modifier=".cg")
    largest = tl.max(tl.max(tops, axis=1), axis=0)
    lower = tl.zeros([], tl.int64) + KEY_LOWEST + 1
    upper, guessed, best = lower, tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    kind = tl.zeros([], tl.int32) + KNOWN
    normaliser = tl.zeros([], tl.float32) + 1.0
    if (largest == float("inf")) | (largest == -float("inf")):
        kind = tl.zeros([], tl.int32) + BROKEN
    elif temperature <= 0:
        kind = tl.zeros([], tl.int32) + GREEDY
        holder = tl.min(tl.min(tl.where(tops == largest, group, GROUPS), axis=1), axis=0)
        index = holder * _GROUP + tl.arange(0, _GROUP)
        best = tl.min(tl.where(scaled(view, index, STOPS) == largest, index, 0x7FFFFFFF), axis=0)
    else:
        masses = masses * tl.exp(tops - largest)
        normaliser = added(masses)
        if ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0):
            kind = tl.zeros([], tl.int32) + SEARCHED
            lower, upper, guessed = _bounded(
                view, tops, masses, largest, normaliser, top_k, top_p, min_p, groups, GROUPS, MOST, STOPS
            )
    _store(record_ptr, largest, normaliser, lower, upper, kind, best, guessed, vocab)


@triton.jit(do_not_specialize=INTS)
def _bounds_kernel(
    logits_ptr,
    bias_ptr,
    prompt_ptr,
    output_ptr,
    drafts_ptr,
    stop_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    min_lengths_ptr,
    lengths_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    counts_ptr,  # None: every place of a row is judged
    finish_ptr,
    counters_ptr,
    records_ptr,
    groups_ptr,
    vocab,
    logits_stride,
    bias_stride,
    prompt_stride,
    output_stride,
    drafts_stride,
    stop_stride,
    places,
    first,
    groups,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.program_id(1)
    row, place = line // places, first + line % places
    wanted = tl.load(finish_ptr + row) == RUNNING
    if counts_ptr is not None:
        wanted = wanted & (place <= tl.load(counts_ptr + row))
    if wanted:
        view = view_of(
            logits_ptr,
            bias_ptr,
            prompt_ptr,
            output_ptr,
            drafts_ptr,
            stop_ptr,
            repetition_ptr,
            presence_ptr,
            frequency_ptr,
            min_lengths_ptr,
            lengths_ptr,
            temperature_ptr,
            logits_stride,
            bias_stride,
            prompt_stride,
            output_stride,
            drafts_stride,
            stop_stride,
            line,
            row,
            place,
            vocab,
        )
        tops_ptr = groups_ptr + line.to(tl.int64) * groups * 2
        temperature = tl.load(temperature_ptr + row)
        for chunk in range(tl.program_id(0), tl.cdiv(vocab, CHUNK), tl.num_programs(0)):
            x = scaled(view, chunk * CHUNK + tl.arange(0, CHUNK), STOPS)
            x = tl.reshape(x, [CHUNK // _GROUP, _GROUP])
            tops = tl.max(x, axis=1)
            group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
            tl.store(tops_ptr + group, tops, mask=group < groups)
            if temperature > 0:
                # a group of -inf alone weighs exp(-inf) = 0; one with +inf makes the line broken, whatever it weighs
                level = tl.where((tops > -float("inf")) & (tops < float("inf")), tops, 0.0)
                masses = tl.sum(tl.exp(x - level[:, None]), axis=1)
                tl.store(tops_ptr + groups + group, masses, mask=group < groups)
        # the counting thread's release covers its own stores; the barrier hands it those of the others
        tl.debug_barrier()
        arrivals_ptr = counters_ptr + line * _COUNTERS + ARRIVED
        arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            _describe(
                view,
                records_ptr + line * _RECORD,
                tops_ptr,
                tops_ptr + groups,
                temperature,
                tl.load(top_k_ptr + row),
                tl.load(top_p_ptr + row),
                tl.load(min_p_ptr + row),
                groups,
                GROUPS,
                MOST,
                STOPS,
            )
            tl.store(arrivals_ptr, 0)
