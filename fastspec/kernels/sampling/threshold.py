"""Finds the threshold of top-k and top-p of one logits row among the candidates of bounds.py.

If the threshold is not among the candidates, all ids of the logits row are read. Up to RANKED candidates are all
compared with each other. More candidates, and whole logits rows, are searched in one loop. Each iteration reads the ids
once and tests several possible thresholds (pivots). One loop serves all cases: less code is fetched, which is faster
than a loop for each case.

The *mass* of an id is exp(x - largest logit), x its scaled logit. A *key* (`key_of`) is an int32 that orders as the
logit. All sums are integers (masses are in fixed point, see `UNIT`). So the order of candidates does not change a sum.
The result is (key, cut, normaliser): `kept` of logits.py says which ids are kept, the normaliser is their mass.

Arguments that most functions have:

- `source`: the arguments of `view_of` for this logits row, as a tuple
- `found_ptr`: keys of the candidates, and their ids MAX_FOUND elements further
- `lower`, `upper`: the candidates are all ids with keys in [lower, upper), of which there are `count`. `guessed` is 1
  if the threshold may lie outside
- `count_above`, `mass_above`: number and mass of the ids with keys from `upper` on; `kept_above`: the mass of those
  that min-p keeps
- `largest`: largest scaled logit. `top_k`: 0 for no top-k
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.sampling.logits import (
    KEY_LOWEST,
    KEY_OPEN,
    NO_UNIT,
    UNIT,
    kept,
    key_of,
    scaled,
    value_of,
    view_of,
)

RANKED = 128  # up to this many candidates are compared with each other
PIECE = 1024  # number of ids that `search` reads at a time
OTHERS = tl.constexpr(32)  # number of candidates compared with all others at a time
COUNTED = tl.constexpr(53)  # up to 512 fixed-point masses sum to less than 2^COUNTED
# not called PIVOTS as in bounds.py, because Triton's cache needs one value per global name of a kernel
_PIVOTS = tl.constexpr(4)
MAX_MASS = tl.constexpr(2**62)
ASK_COUNT, FIND_KTH, ASK_TOTAL, FIND_EDGE, ASK_ABOVE, ASK_EQUALS, FIND_CUT, SUM_UP = map(tl.constexpr, range(8))


@triton.jit
def fixed(mass):
    """Converts a mass from fp32 to int64 fixed point, as a multiple of 1 / UNIT."""
    return (mass * UNIT).to(tl.int64)


@triton.jit
def mass_of(key, largest):
    """Returns the mass exp(x - largest) of the logit x whose key (`key_of`) is `key`, in int64 fixed point."""
    return fixed(tl.exp(value_of(key) - largest))


@triton.jit
def taken_of_equals(mass, above, budget):
    """Returns the number of ids that top-p keeps among several ids with equal logits.

    They are kept one after the other, while the mass of all ids before them is below `budget`. All masses are in fixed
    point.

    Args:
        mass: mass of each of these ids.
        above: mass of the ids with larger logits.
        budget: mass that top-p must keep.
    """
    each = tl.maximum(mass, 1)
    return (budget - above + each - 1) // each


@triton.jit
def budget_of(total, top_p):
    """Returns the fixed-point mass that top-p must keep: total - (1 - top_p) total. 1 - top_p is fp32, as in torch."""
    light = ((1.0 - top_p).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(total - light, 1)


@triton.jit
def _ranks(found_ptr, keys, largest, count, SIZE: tl.constexpr):
    """Compares each of the keys `keys` [SIZE] with the keys of all candidates.

    Returns three tensors [SIZE] for these keys. The first has the number of candidates with equal or larger keys. The
    second has the number of candidates with larger keys, the third their mass in fixed point.
    """
    reach = tl.zeros([OTHERS, SIZE], tl.int32)
    above = tl.zeros([OTHERS, SIZE], tl.int64)
    column = tl.arange(0, OTHERS)
    others = tl.load(found_ptr + column, mask=column < count, other=KEY_LOWEST, cache_modifier=".cg")
    for start in range(0, count, OTHERS):
        column = start + OTHERS + tl.arange(0, OTHERS)
        # loaded one iteration ahead
        later = tl.load(found_ptr + column, mask=column < count, other=KEY_LOWEST, cache_modifier=".cg")
        # number and mass in one integer: one sum gives both
        weights = mass_of(others, largest) + (tl.full([], 1, tl.int64) << COUNTED)
        reach += (others[:, None] >= keys[None, :]).to(tl.int32)
        above += tl.where(others[:, None] > keys[None, :], weights[:, None], 0)
        others = later
    both = tl.sum(above, axis=0)
    number = both >> COUNTED
    return tl.sum(reach, axis=0), number.to(tl.int32), both - (number << COUNTED)


@triton.jit
def _max_and_min(key, mass, other_key, other_mass):
    return tl.maximum(key, other_key), tl.minimum(mass, other_mass)


@triton.jit
def _min_and_max(key, mass, reach, over, other_key, other_mass, other_reach, other_over):
    return (
        tl.minimum(key, other_key),
        tl.maximum(mass, other_mass),
        tl.maximum(reach, other_reach),
        tl.maximum(over, other_over),
    )


@triton.jit(noinline=True)  # see logits.py
def rank_candidates(
    found_ptr,
    largest,
    total,  # fixed-point mass of all ids of the logits row
    count,  # number of candidates, up to SIZE
    count_above,
    mass_above,
    kept_above,
    lower,
    upper,
    guessed,
    top_k,  # 0: no top-k
    top_p,
    min_p,
    vocab,
    MAX_FOUND: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Finds the threshold of a logits row with up to SIZE candidates.

    Returns (key, cut, fixed-point normaliser, valid).
    `valid` is 0 if the threshold is not among the candidates; then the other results have no meaning.
    """
    tl.debug_barrier()
    slot = tl.arange(0, SIZE)
    there = slot < count
    keys = tl.load(found_ptr + slot, mask=there, other=KEY_LOWEST, cache_modifier=".cg")
    index = tl.load(found_ptr + MAX_FOUND + slot, mask=there, other=0x7FFFFFFF, cache_modifier=".cg")
    e = tl.exp(value_of(keys) - largest)
    mass = fixed(e)
    low, cut = lower, vocab
    sound = tl.full([], 1, tl.int1)
    if (top_k > 0) | (top_p < 1.0):
        reach, over, above = _ranks(found_ptr, keys, largest, count, SIZE)
        # with fewer than k candidates, take all of them
        rank = tl.where(top_k > 0, tl.minimum(top_k - count_above, count), count)
        enough = there & (reach >= rank)
        # the mass at or above a key decreases with the key, so one reduction finds the k-th key and the mass from it on
        upto = mass_above + above + (reach - over) * mass
        kth, inside = tl.reduce((tl.where(enough, keys, KEY_LOWEST), tl.where(enough, upto, MAX_MASS)), 0, _max_and_min)
        inside = tl.where(count > 0, inside, mass_above)
        if top_k > 0:
            sound = (upper == KEY_OPEN) | (count_above < top_k)
            whole = count_above + count >= top_k
            low = tl.where(whole, tl.maximum(low, kth), low)
            sound = sound & (whole | (guessed == 0))
        if top_p < 1.0:
            budget = budget_of(tl.where(top_k > 0, inside, total), top_p)
            reached = inside >= budget
            sound = sound & ((upper == KEY_OPEN) | (mass_above < budget)) & (reached | (guessed == 0))
            short = there & (keys >= low) & (mass_above + above < budget)
            edge, over_it, upto_it, beyond_it = tl.reduce(
                (
                    tl.where(short, keys, 0x7FFFFFFF),
                    tl.where(short, above, 0),
                    tl.where(short, reach, 0),
                    tl.where(short, over, 0),
                ),
                0,
                _min_and_max,
            )
            low = tl.where(reached & (edge < 0x7FFFFFFF), edge, low)
            equals = upto_it - beyond_it
            if reached & (equals > 1):
                taken = taken_of_equals(mass_of(low, largest), mass_above + over_it, budget)
                if taken < equals:
                    cut = _id_of_rank(index, there & (keys == low), taken, vocab)
    keeps = kept(keys, index, e, low, cut, min_p)
    normaliser = kept_above + tl.sum(tl.where(keeps, mass, 0), axis=0)
    tl.debug_barrier()
    return low, cut, normaliser, sound


@triton.jit
def _id_of_rank(ids, equal, rank, vocab):
    """Returns the rank-th lowest id, counted from 1, among the elements of `ids` where `equal` is True."""
    low, high = vocab * 0, vocab - 1
    while low < high:
        middle = (low + high) // 2
        enough = tl.sum((equal & (ids <= middle)).to(tl.int32), axis=0) >= rank
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _weigh(
    source, found_ptr, whole, count, pivots, cuts, largest, least, by_mass, MAX_FOUND, SIZE: tl.constexpr, STOPS
):
    """Returns the number of ids that `kept` keeps with each pair of threshold and cut, int64 [PIVOTS].

    The thresholds are in `pivots`, the cuts in `cuts`. If `by_mass` is True, it returns the fixed-point mass of these
    ids instead of their number. Ids with a mass below `least` do not count. If `whole` is True, the first `count` ids
    of the logits row are read, else the first `count` candidates.
    """
    sums = tl.zeros([_PIVOTS, SIZE], tl.int64)
    for start in tl.range(0, count, SIZE, disable_licm=True):
        index = start + tl.arange(0, SIZE)
        noted = (index < count) & (whole == 0)
        keys = tl.load(found_ptr + index, mask=noted, other=KEY_LOWEST, cache_modifier=".cg")
        ids = tl.load(found_ptr + MAX_FOUND + index, mask=noted, other=0, cache_modifier=".cg")
        if whole:
            keys, ids = key_of(scaled(view_of(*source), index, STOPS)), index
        e = tl.exp(value_of(keys) - largest)
        weights = tl.where(by_mass, fixed(e), 1)
        keeps = kept(keys[None, :], ids[None, :], e[None, :], pivots[:, None], cuts[:, None], least)
        sums += tl.where(keeps, weights[None, :], 0)
    return tl.sum(sums, axis=1)


@triton.jit(noinline=True)  # see logits.py
def search(
    source,
    found_ptr,
    whole,  # True: read the whole logits row instead of candidates
    largest,
    normaliser,
    count,
    count_above,
    mass_above,
    kept_above,
    lower,
    upper,
    guessed,
    top_k,
    top_p,
    min_p,
    MAX_FOUND: tl.constexpr,
    SIZE: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Finds the threshold of a logits row with any number of candidates.

    Returns (key, cut, fixed-point normaliser). If the threshold is not among the candidates, it reads the whole logits
    row. A threshold is the largest key such that enough ids, by number or by mass, have this or a larger key. Each
    iteration answers one question (`asked`), in this order:

        ASK_COUNT   how many ids there are       FIND_KTH    the k-th largest key
        ASK_TOTAL   the mass at or above it      FIND_EDGE   the threshold of top-p
        ASK_ABOVE   the mass above it            ASK_EQUALS  how many ids equal it
        FIND_CUT    the last of these kept       SUM_UP      the normaliser
    """
    tl.debug_barrier()
    vocab = source[0].vocab
    turn = tl.arange(0, _PIVOTS)
    top = key_of(largest)  # no threshold is above the largest logit
    edge = tl.where(top_p < 1.0, ASK_TOTAL, SUM_UP)
    asked = tl.where(top_k > 0, ASK_COUNT, edge)
    low, high = lower, lower
    first, last, cut = vocab * 0, vocab - 1, vocab
    # what the sum must reach: k, a mass, or a number of ids with equal keys; in the end `goal` is the normaliser
    goal = tl.zeros([], tl.int64) + top_k - count_above
    fails = whole
    while asked <= SUM_UP:
        if fails:
            # the threshold is not among the candidates: start again, with the whole logits row
            whole, asked = tl.full([], 1, tl.int1), tl.where(top_k > 0, ASK_COUNT, edge)
            low, upper, guessed = low * 0 + (KEY_LOWEST + 1), upper * 0 + KEY_OPEN, guessed * 0
            count, count_above, mass_above, kept_above = vocab, count_above * 0, mass_above * 0, kept_above * 0
            goal = tl.zeros([], tl.int64) + top_k
        finds = (asked == FIND_KTH) | (asked == FIND_EDGE)
        by_mass = (asked == ASK_TOTAL) | (asked == FIND_EDGE) | (asked == ASK_ABOVE) | (asked == SUM_UP)
        apart = (high.to(tl.int64) - low) // (_PIVOTS + 1) + 1  # below 2^30
        step = tl.where(finds, apart.to(tl.int32), (asked == ASK_EQUALS).to(tl.int32))
        pivots = low.to(tl.int64) + tl.where(finds, step, (asked == ASK_ABOVE).to(tl.int32)) + turn.to(tl.int64) * step
        pivots = tl.minimum(pivots, KEY_OPEN).to(tl.int32)
        stride = (last - first) // (_PIVOTS + 1) + 1
        cuts = tl.where(asked == FIND_CUT, first - 1 + (turn + 1) * stride, tl.where(asked == SUM_UP, cut, vocab))
        sums = _weigh(
            *(source, found_ptr, whole, count, pivots, cuts, largest, tl.where(asked == SUM_UP, min_p, 0.0), by_mass),
            *(MAX_FOUND, SIZE, STOPS),
        )
        one = tl.sum(tl.where(turn == 0, sums, 0), axis=0)
        fails = tl.full([], 0, tl.int1)
        if asked == ASK_COUNT:
            fails = ((upper < KEY_OPEN) & (goal <= 0)) | ((one < goal) & (guessed != 0))
            asked = tl.where(one >= goal, FIND_KTH, edge)
            high = tl.maximum(tl.minimum(upper - 1, top), low)
        elif asked == ASK_TOTAL:
            total = tl.where(top_k > 0, mass_above + one, fixed(normaliser))
            goal = budget_of(total, top_p) - mass_above
            fails = ((upper < KEY_OPEN) & (goal <= 0)) | ((one < goal) & (guessed != 0))
            asked = tl.where(one < goal, SUM_UP, FIND_EDGE)
            high = tl.maximum(tl.minimum(upper - 1, top), low)
        elif finds:
            low += tl.sum(((sums >= goal) & (pivots <= high)).to(tl.int32), axis=0) * step
            high = tl.minimum(high.to(tl.int64), low.to(tl.int64) + step - 1).to(tl.int32)
            asked = tl.where(low < high, asked, tl.where(asked == FIND_KTH, edge, ASK_ABOVE))
        elif asked == ASK_ABOVE:
            goal = taken_of_equals(mass_of(low, largest), one, goal)
            asked += 1
        elif asked == ASK_EQUALS:
            beyond = tl.sum(tl.where(turn == 1, sums, 0), axis=0)
            asked = tl.where(goal < one - beyond, FIND_CUT, SUM_UP)
            goal += beyond
        elif asked == FIND_CUT:
            first += tl.sum((sums < goal).to(tl.int32), axis=0) * stride
            last = tl.minimum(last, first + stride - 1)
            cut = first
            asked = tl.where(first < last, FIND_CUT, SUM_UP)
        else:
            goal = kept_above + one
            asked += 1
    tl.debug_barrier()
    return low, cut, goal


@triton.jit
def normaliser_of(mass):
    """Converts a mass from int64 fixed point to fp32."""
    return mass.to(tl.float32) * NO_UNIT
