"""The threshold of a line's law: among the candidates near it, or by reading all of the line when they do not tell.

A step that waits for a sum of all threads takes 0.4 us, so few are taken: several pivots are tried in each, and no more
of them once one candidate is left; few candidates are compared in pairs, all at once.

All sums are integers, masses in fixed point (`UNIT`), so that the order in which candidates came cannot matter. A law
is (largest logit, normaliser, key, cut): it keeps the ids whose key is larger than `key`, those that equal it up to id
`cut`, and of these what is at least min_p of the largest (`sampled_parts.kept`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.sampled_parts import KEY_LOWEST, KEY_OPEN, NO_UNIT, UNIT, kept, key_of, scaled, value_of

PAIRED = 128  # candidates that are compared in pairs
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
def added(values):
    """The sum of [1, N]."""
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit
def largest_with(keys, weights, least):
    """The largest key t, int64, for which `weights` of keys [1, N] >= t sum to at least `least`; the lowest if none."""
    PIVOTS: tl.constexpr = 8 if keys.shape[1] <= 4096 else 1
    low = tl.zeros([], tl.int64) + KEY_LOWEST
    reached = added(weights)  # by keys >= low
    high = tl.where(reached >= least, tl.max(tl.max(keys, axis=1), axis=0).to(tl.int64), low)
    high = tl.maximum(high, low)
    while (low < high) & (reached > least):
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = low + (tl.arange(0, PIVOTS) + 1) * step
        sums = tl.sum(tl.where(keys >= pivots.to(tl.int32)[:, None], weights, 0), axis=1)
        enough = (sums >= least) & (pivots <= high)
        reached = tl.min(tl.where(enough, sums, reached), axis=0)
        low += tl.sum(enough.to(tl.int32), axis=0) * step
        high = tl.minimum(high, low + step - 1)
    if low < high:
        # as many as are wanted are left: the least of them
        left = tl.where((keys >= low) & (weights > 0), keys, 0x7FFFFFFF)
        low = tl.min(tl.min(left, axis=1), axis=0).to(tl.int64)
    return low


@triton.jit
def _edge(keys, mass, budget, low, high, PIVOTS: tl.constexpr):
    """The smallest key t, int64 in [low, high], such that keys [1, N] > t weigh less than the budget."""
    if added(tl.where(keys > low, mass, 0)) < budget:
        high = low
    reach = added((keys >= low).to(tl.int32))  # keys from low on
    beyond = reach * 0  # keys above high
    while (low < high) & (reach - beyond > 1):
        step = (high - low + 1 + PIVOTS) // (PIVOTS + 1)
        pivots = low - 1 + (tl.arange(0, PIVOTS) + 1) * step
        above = keys > pivots.to(tl.int32)[:, None]
        sums = tl.sum(tl.where(above, mass, 0), axis=1)
        counts = tl.sum(above.to(tl.int32), axis=1)
        short = (sums < budget) | (pivots >= high)
        reach = tl.min(tl.where(short, reach, counts), axis=0)
        beyond = tl.max(tl.where(short & (pivots < high), counts, beyond), axis=0)
        low += (PIVOTS - tl.sum(short.to(tl.int32), axis=0)) * step
        high = tl.minimum(high, low + step - 1)
    if low < high:
        # the weight changes at keys only, and one is left
        left = tl.where((keys >= low) & (keys <= high), keys, 0x7FFFFFFF)
        low = tl.minimum(tl.min(tl.min(left, axis=1), axis=0).to(tl.int64), high)
    return low


@triton.jit
def _kth_by_halves(keys, least, low, high):
    """`largest_with` in [low, high] of so many keys that only one pivot fits in registers."""
    while low < high:
        middle = (low + high + 1) >> 1
        enough = added((keys >= middle.to(tl.int32)).to(tl.int32)) >= least
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _edge_by_halves(keys, mass, budget, low, high):
    """`_edge`, likewise."""
    while low < high:
        middle = (low + high) >> 1
        short = added(tl.where(keys > middle.to(tl.int32), mass, 0)) < budget
        high = tl.where(short, middle, high)
        low = tl.where(short, low, middle + 1)
    return low


@triton.jit
def _paired_kth(keys, others, least):
    """The largest of keys [1, N] that at least `least` of the others [N, 1], the same ones, reach."""
    ranks = tl.sum((others >= keys).to(tl.int32), axis=0)[None, :]
    left = tl.where(ranks >= least, keys, -2147483648)
    return tl.max(tl.max(left, axis=1), axis=0).to(tl.int64)


@triton.jit
def _paired_edge(keys, mass, others, largest, budget, low, high):
    """`_edge`, all candidates against the others [N, 1], the same ones."""
    weights = fixed(tl.exp(tl.where(others > KEY_LOWEST, value_of(others), -float("inf")) - largest))
    above = tl.sum(tl.where(others > keys, weights, 0), axis=0)[None, :]
    left = tl.where((keys > low) & (above < budget), keys, 0x7FFFFFFF)
    first = tl.minimum(tl.min(tl.min(left, axis=1), axis=0).to(tl.int64), high)
    return tl.where(added(tl.where(keys > low, mass, 0)) < budget, low, first)


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
    IN_PAIRS: tl.constexpr,
):
    """(key, cut, fixed-point normaliser, whether these hold) from up to SIZE candidates."""
    slot = tl.arange(0, SIZE)[None, :]
    there = slot < count
    keys = tl.load(found_ptr + slot, mask=there, other=-2147483648, cache_modifier=".cg")
    mass = fixed(tl.exp(tl.where(there, value_of(keys), -float("inf")) - largest))
    if IN_PAIRS:
        column = tl.arange(0, SIZE)[:, None]
        others = tl.load(found_ptr + column, mask=column < count, other=-2147483648, cache_modifier=".cg")
    low = lower
    top = key_of(largest).to(tl.int64)  # no threshold lies above the largest
    sound = (upper == KEY_OPEN) | ((count_above < top_k) & (top_k > 0)) | (top_k == 0)
    if top_k > 0:
        if count_above + count >= top_k:
            least = (top_k - count_above).to(tl.int32)
            if IN_PAIRS:
                low = tl.maximum(low, _paired_kth(keys, others, least))
            elif SIZE <= 2048:
                low = tl.maximum(low, largest_with(keys, there.to(tl.int32), least))
            else:
                low = _kth_by_halves(keys, least, low, tl.minimum(upper - 1, top))
        else:
            sound = sound & (guessed == 0)
        total = mass_above + added(tl.where(keys >= low, mass, 0))
    cut = vocab
    if top_p < 1.0:
        budget = budget_of(total, top_p)
        sound = sound & ((upper == KEY_OPEN) | (mass_above < budget))
        reached = mass_above + added(tl.where(keys >= low, mass, 0)) >= budget
        sound = sound & (reached | (guessed == 0))
        high = tl.maximum(tl.minimum(upper, top), low)
        if IN_PAIRS:
            low = _paired_edge(keys, mass, others, largest, budget - mass_above, low, high)
        elif SIZE <= 2048:
            low = _edge(keys, mass, budget - mass_above, low, high, 8)
        else:
            low = _edge_by_halves(keys, mass, budget - mass_above, low, high)
        above = mass_above + added(tl.where(keys > low, mass, 0))
        equal = keys == low
        each = fixed(tl.exp(value_of(low.to(tl.int32)) - largest))
        taken = taken_of_equals(each, above, budget)
        if taken < added(equal.to(tl.int32)):
            ids = tl.load(found_ptr + MOST + slot, mask=there, other=0x7FFFFFFF, cache_modifier=".cg")
            cut = _id_of_rank(ids, equal, taken, vocab)
    # loaded anew, so that fewer registers are taken meanwhile
    keys = tl.load(found_ptr + slot, mask=there, other=KEY_LOWEST, cache_modifier=".cg")
    index = tl.load(found_ptr + MOST + slot, mask=there, other=0x7FFFFFFF, cache_modifier=".cg")
    e = tl.exp(value_of(keys) - largest)
    mass = fixed(e)
    keeps = kept(keys, index, e, low, cut, min_p)
    return low.to(tl.int32), cut, kept_above + added(tl.where(keeps, mass, 0)), sound


@triton.jit
def _id_of_rank(ids, equal, rank, vocab):
    """The smallest id up to which there are at least `rank` of those that are equal."""
    low, high = vocab * 0, vocab - 1
    while low < high:
        middle = (low + high) // 2
        enough = added((equal & (ids <= middle)).to(tl.int32)) >= rank
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _read(view, key, cut, largest, min_p, CHUNK: tl.constexpr, STOPS: tl.constexpr):
    """(count, mass) of all finite logits above `key`, or equal up to id `cut`, that min_p leaves."""
    count = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    for start in range(0, view[13], CHUNK):
        index = start + tl.arange(0, CHUNK)
        x = scaled(view, index, STOPS)
        e = tl.exp(x - largest)
        keeps = kept(key_of(x), index, e, key, cut, min_p)
        count += tl.sum(keeps.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(keeps, fixed(e), 0), axis=0)
    return count, mass


@triton.jit
def search_line(view, largest, total, top_k, top_p, min_p, CHUNK: tl.constexpr, STOPS: tl.constexpr):
    """(key, cut, fixed-point normaliser) by bisection, a read of the line for each step: slow, and always right.

    One loop with one read in it, for a read is most of the kernel's code. What is asked for in turn: how many logits
    are finite; the k-th; the threshold of top-p; how many equal it; up to which id these are kept; the normaliser.
    """
    vocab = view[13]
    low = tl.zeros([], tl.int64) + KEY_LOWEST + 1
    top = key_of(largest).to(tl.int64)  # no threshold lies above the largest
    high = top
    first, last, cut = vocab * 0, vocab - 1, vocab
    above_count, above = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    taken = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
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
        relative = tl.where(asked == SUM_UP, min_p, 0.0)
        count, mass = _read(view, tl.where(bisects, middle, low), upto, largest, relative, CHUNK, STOPS)
        after = asked + (bisects == 0).to(tl.int32)
        if asked == COUNT_FINITE:
            total = mass
            after = tl.where(count < top_k, edge, FIND_KTH)
        elif asked == FIND_KTH:
            enough = count >= top_k
            total = mass
            low = tl.where(bisects & enough, middle, low)
            high = tl.where(bisects, tl.where(enough, high, middle - 1), top)
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
    return low.to(tl.int32), cut, mass


@triton.jit
def normaliser_of(mass):
    """fp32 of a fixed-point mass."""
    return mass.to(tl.float32) * NO_UNIT
