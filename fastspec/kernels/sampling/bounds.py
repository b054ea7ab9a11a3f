"""Computes bounds of the threshold of top-k and top-p, and collects the ids between the bounds (candidates).

Each logits row has a threshold: top-k, top-p and min-p keep the ids whose logits are at or above it. The first launch
of distribution.py stores two numbers for each group of 32 ids: the largest logit, and the mass, which is a sum of
exponentials (logits.py). These numbers alone give bounds of the threshold:

- top-k: each group whose largest logit reaches t has an id that does. So if k groups reach t, t is at most the k-th
  largest logit. The same holds for sets of four groups. For a small k, sets give as good a bound, with a quarter of the
  additions.
- top-p: in a group whose largest logit reaches t, the ids below t have at most the group's mass without that logit, and
  at most 31 exp(t). In any other group, all mass is below t. If the total is less than the mass that top-p may remove,
  no id below t is kept.

If too many candidates remain, one id of each group serves as a sample of the distribution. For a flat distribution the
bounds are 3.5 standard deviations of the sample apart. For one with a few likely ids they include as many of the
likeliest ids as fit. Such bounds are guesses (GUESSED) and are checked afterwards.

Sums have one order, over pieces that do not depend on the number of logits rows. So the result for a logits row does
not depend on the others.

Arguments that most functions have:

- `source`: the arguments of `view_of` as a tuple: (`Source`, index of the logits row in the launch, index of the batch
  row, number of draft tokens before the position)
- `x`, `tops`: largest scaled logit of each group; `masses`, `weights`: mass of each group
- `largest`: largest scaled logit of the logits row
- `lower`, `upper`: bounds of the threshold as keys, int64. A key (`key_of`) is an integer that orders as the logit
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.sampling.logits import (
    ARRIVED,
    COUNT_ABOVE,
    FOUND,
    GREEDY,
    GROUP,
    INVALID,
    KEPT_ABOVE,
    KEY_LOWEST,
    KEY_OPEN,
    KNOWN,
    MASS_ABOVE,
    SEARCHED,
    key_of,
    scaled,
    value_of,
    view_of,
)
from fastspec.kernels.sampling.threshold import fixed

# standard deviations of a sample's estimate: the guess is wrong for one logits row in two thousand
DEVIATIONS = tl.constexpr(3.5)
STRIDE = tl.constexpr(29)  # the sample of group g is its id 29 g mod 32
REACH = tl.constexpr(16.0)  # the k-th largest of the groups' maxima is first searched in largest - REACH .. largest
SET = tl.constexpr(4)  # groups that are merged to one, if FEW * k is at most the number of groups
FEW = tl.constexpr(16)
ROUNDED = tl.constexpr(1e-6)  # upper limit of the rounding error of a sum of groups' masses, relative to the sum
PIVOTS = tl.constexpr(8)  # number of values that a step of a search tries; with more, a step takes too long
MAX_GROUPS = 4096  # larger vocabularies merge several groups to one, to save registers
_GROUP = tl.constexpr(GROUP)


@triton.jit
def filtered(top_k, top_p, min_p, vocab):
    """True if top-k, top-p or min-p can remove ids."""
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0)


@triton.jit
def _narrowed(low, high, light):
    """Narrows the interval [low, high] in a search for the largest value that fulfils a condition.

    The condition was tested for PIVOTS evenly spaced values in the interval (pivots). `light` [PIVOTS] has the results:
    True for the first pivots, then False. Returns the last pivot with True (or `low`), and the first pivot with False
    (or `high`).
    """
    step = (high - low) / (PIVOTS + 1)
    number = tl.sum(light.to(tl.int32), axis=0).to(tl.float32)
    return low + number * step, tl.minimum(low + (number + 1.0) * step, high)


@triton.jit
def added(values):
    """Returns the sum of values [1, N] as a scalar."""
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit
def largest_with(keys, weights, least):
    """Returns the largest key t, int64, such that the weights of all keys >= t sum to at least `least`.

    `keys` and `weights` are [1, N]. Returns KEY_LOWEST if there is no such key.
    """
    low = tl.zeros([], tl.int64) + KEY_LOWEST
    reached = added(weights)  # sum of weights of keys >= low
    high = tl.where(reached >= least, tl.max(tl.max(keys, axis=1), axis=0).to(tl.int64), low)
    high = tl.maximum(high, low)
    while (low < high) & (reached > least):
        step = (high - low) // (PIVOTS + 1) + 1
        pivots = low + (tl.arange(0, PIVOTS) + 1) * step
        sums = tl.sum(tl.where(keys >= tl.minimum(pivots, KEY_OPEN).to(tl.int32)[:, None], weights, 0), axis=1)
        enough = (sums >= least) & (pivots <= high)
        reached = tl.min(tl.where(enough, sums, reached), axis=0)
        low += tl.sum(enough.to(tl.int32), axis=0) * step
        high = tl.minimum(high, low + step - 1)
    if low < high:
        # exactly `least` keys are left: take the smallest of them
        left = tl.where((keys >= low) & (weights > 0), keys, 0x7FFFFFFF)
        low = tl.min(tl.min(left, axis=1), axis=0).to(tl.int64)
    return low


@triton.jit
def _largest_below(x, weights, rest, groups, largest, max_mass, WIDTH):
    """Returns a logit t such that the ids with logits below t have a total mass of at most `max_mass`.

    Args:
        x: largest logit of each group of ids, [1, N].
        weights: mass of each group, [1, N].
        rest: mass of each group without the id with the largest logit, [1, N].
        groups: number of groups.
        largest: largest logit of the logits row.
        max_mass: largest allowed mass.
        WIDTH: number of ids of a group.
    """
    low = largest + tl.minimum(tl.log(max_mass / (groups * WIDTH)), 0.0)
    high = largest
    for _ in range(3):
        pivots = low + (tl.arange(0, PIVOTS) + 1) * ((high - low) / (PIVOTS + 1))
        parts = tl.minimum(rest, tl.exp(pivots - largest)[:, None] * (WIDTH - 1))
        below = tl.sum(tl.where(x < pivots[:, None], weights, parts), axis=1)
        low, high = _narrowed(low, high, below <= max_mass)
    return low


@triton.jit
def _quantile(x, weights, max_mass, low, high):
    """Searches [low, high] for the largest t such that the weights of elements x < t sum to at most `max_mass`.

    x and weights are [1, N]. Returns the ends of a short interval that contains t.
    """
    for _ in range(4):
        pivots = low + (tl.arange(0, PIVOTS) + 1) * ((high - low) / (PIVOTS + 1))
        below = tl.sum(tl.where(x < pivots[:, None], weights, 0.0), axis=1)
        low, high = _narrowed(low, high, below <= max_mass)
    return low, high


@triton.jit
def _reached_by(tops, largest, least):
    """Returns the key (`key_of`), int64, of a value t such that at least `least` of the values tops [1, N] are >= t.

    The number of these values is not much larger than `least`. Returns KEY_LOWEST if there is no such t. The search
    tries evenly spaced values, not keys. This suits the distribution of logits: one to three steps are enough.
    """
    low, high = largest - REACH, largest
    reached = tl.zeros([], tl.int32)
    steps = tl.zeros([], tl.int32)
    while ((reached < least) | (reached > least + least // 2 + 16)) & (steps < 10):
        step = (high - low) / PIVOTS
        pivots = low + tl.arange(0, PIVOTS) * step
        counts = tl.sum((tops >= pivots[:, None]).to(tl.int32), axis=1)
        enough = counts >= least
        number = tl.sum(enough.to(tl.int32), axis=0)
        if number > 0:
            reached = tl.min(tl.where(enough, counts, 0x7FFFFFFF), axis=0)
            last = low + (number - 1).to(tl.float32) * step
            high = tl.minimum(low + number.to(tl.float32) * step, high)
            low = last
        else:
            high = low
            low = largest + (low - largest) * 64.0  # repeated five times this exceeds the range of a model's logits
        steps += 1
    return tl.where(reached >= least, key_of(low + 0.0), KEY_LOWEST).to(tl.int64)


@triton.jit
def _kth_at_least(tops, largest, top_k, GROUPS: tl.constexpr):
    """Returns a lower bound of the key (`key_of`) of a logits row's k-th largest logit, k = top_k.

    It is computed from `tops` [1, GROUPS], the largest logit of each group of ids.
    """
    if top_k * FEW <= GROUPS:
        sets = tl.max(tl.reshape(tops, [GROUPS // SET, SET]), axis=1)
        key = _reached_by(sets[None, :], largest, top_k)
    else:
        key = _reached_by(tops, largest, top_k)
    return key


@triton.jit(noinline=True)  # see logits.py
def _guessed(
    source, lower, upper, largest, normaliser, top_k, top_p, groups, GROUPS: tl.constexpr, WIDTH, MAX_FOUND, STOPS
):
    """Guesses closer bounds of the threshold from a sample: the logits of one id of each group.

    Args:
        lower, upper: known bounds of the threshold, as keys.
        normaliser: total mass of the logits row.
        WIDTH: number of ids of a group.
        MAX_FOUND: number of candidates that can be stored.

    Returns:
        (lower, upper, 1) with guessed bounds. (lower, upper, 0) with the known bounds, if there are few enough ids
        between them, or if the sample gives no closer bounds.
    """
    tl.debug_barrier()
    group = tl.arange(0, GROUPS)[None, :]
    x = scaled(view_of(*source), tl.where(group < groups, group * WIDTH + (group * STRIDE) % _GROUP, -1), STOPS)
    keys = key_of(x)
    ones = (keys > KEY_LOWEST).to(tl.int32)
    room = tl.maximum(tl.zeros([], tl.int32) + MAX_FOUND * 4 // 5 // WIDTH, 1)  # number of samples in 4/5 MAX_FOUND ids
    low, high = lower, upper
    if added((keys >= lower).to(tl.int32)) > room:
        rank = top_k.to(tl.float32) / WIDTH
        reach = DEVIATIONS * tl.sqrt(rank) + 2.0
        below = tl.ceil(rank + reach).to(tl.int32)  # number of samples at or above the lower bound
        above = tl.floor(rank - reach).to(tl.int32)  # number at or above the upper bound; 0: no upper bound
        if top_k == 0:
            low, high = _sampled_edge(
                x, largest, (1.0 - top_p) * normaliser, value_of(lower.to(tl.int32)), upper, WIDTH
            )
            # if few ids hold most of the mass, take as many of the likeliest as fit
            many = added(((keys >= low) & (keys < high)).to(tl.int32)) > room
            below = tl.where(many, room, 0)
            high = tl.where(many, upper, high)
            above = 0
        for side in range(2):
            least = tl.where(side == 0, below, above)
            if least > 0:
                key = largest_with(keys, ones, least)
                low = tl.where(side == 0, key, low)
                high = tl.where(side == 0, high, key + 1)
        low = tl.maximum(low, KEY_LOWEST + 1)
    guessed = (low > lower) & (low < high)
    tl.debug_barrier()
    return tl.where(guessed, low, lower), tl.where(guessed, high, upper), guessed.to(tl.int32)


@triton.jit
def _sampled_edge(x, largest, light, least, upper, WIDTH):
    """Estimates the threshold of top-p from a sample of logits x [1, N].

    Returns a key below the estimated threshold and a key above it.

    Args:
        x: logits of the sample. Each stands for WIDTH ids.
        largest: largest logit of the logits row.
        light: mass that top-p removes.
        least: logit that is known to be at most the threshold.
        upper: key to return as the upper one if the sample has no error estimate.
        WIDTH: number of ids of a group.
    """
    weights = tl.exp(x - largest) * WIDTH
    low, high = least, largest
    error, under, wide = light * 0.0, least, light
    # side 0: the threshold by the sample; 1: its lower bound; 2: its upper bound, by the sample's error
    for side in range(3):
        edge, over = _quantile(x, weights, wide, low, high)
        if side == 0:
            below = tl.where(x < edge, weights, 0.0)
            error = DEVIATIONS * tl.sqrt(added(below * below)) / tl.maximum(added(below), 1e-30)
            high = edge
            wide = light * (1.0 - error)
        elif side == 1:
            under = edge
            low, high = high, largest
            wide = light * (1.0 + error)
        else:
            high = over
    key = tl.where(error > 0, key_of(high + 0.0).to(tl.int64) + 1, upper)
    return key_of(under + 0.0).to(tl.int64), key


@triton.jit
def _bounded(source, tops, lower, largest, normaliser, top_k, top_p, min_p, groups, GROUPS, WIDTH, MAX_FOUND, STOPS):
    """Computes bounds of a logits row's threshold from a known lower bound, min-p, and a sample of the logits.

    Returns (lower, upper, guessed). If `guessed` is 0, the key of the threshold is in [lower, upper). If `guessed` is
    1, it may be outside, which must be checked.
    """
    limits_k = (top_k > 0) & (top_k < source[0].vocab)
    limits_p = top_p < 1.0
    floor = key_of(largest + tl.log(tl.maximum(min_p, 1e-37)) - 1e-3).to(tl.int64)
    floor = tl.where((min_p > 0) & ((limits_k & limits_p) == 0), floor, KEY_LOWEST + 1)
    lower = tl.maximum(lower, floor)
    upper = tl.zeros([], tl.int64) + KEY_OPEN
    guessed = tl.zeros([], tl.int32)
    both = limits_k & limits_p
    if (limits_k | limits_p) == 0:
        upper = lower  # min-p alone: the threshold is known
    elif both:
        pass
    elif added((key_of(tops) >= lower).to(tl.int32)) * WIDTH > MAX_FOUND:
        asked = tl.where(limits_k, top_k, 0)
        lower, upper, guessed = _guessed(
            source, lower, upper, largest, normaliser, asked, top_p, groups, GROUPS, WIDTH, MAX_FOUND, STOPS
        )
    return lower, upper, guessed


@triton.jit
def merged(tops_ptr, masses_ptr, groups, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """Loads the largest logits and masses of a logits row's groups, and merges every EACH neighbouring groups to one.

    Returns the largest logit of each merged group, and its mass relative to that logit, both fp32 [1, GROUPS]. For
    greedy rows and rows with top-k no masses are stored. The masses returned for them are undefined.
    """
    group = tl.arange(0, GROUPS)[None, :] * EACH
    tops = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"))
    masses = tl.load(masses_ptr + group, mask=group < groups, other=0.0)
    for more in tl.static_range(1, EACH):
        others = tl.load(tops_ptr + group + more, mask=group + more < groups, other=-float("inf"))
        weights = tl.load(masses_ptr + group + more, mask=group + more < groups, other=0.0)
        top = tl.maximum(tops, others)
        level = tl.where(top > -float("inf"), top, 0.0)
        masses = masses * tl.exp(tops - level) + weights * tl.exp(others - level)
        tops = top
    return tops, masses


@triton.jit
def described(
    source,
    tops,
    masses,
    temperature,
    top_k,
    top_p,
    min_p,
    groups,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAX_FOUND: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Classifies a logits row, and computes its normaliser and bounds of its threshold, from groups of WIDTH ids.

    `tops` and `masses` [1, GROUPS] are the groups' largest logits and masses. The first `groups` elements are valid.

    Returns:
        kind: INVALID (NaN or infinite logits), GREEDY (no sampling), KNOWN (nothing is filtered), or SEARCHED (the
            threshold is to be found).
        largest: largest scaled logit.
        normaliser: total mass; 1 with top-k, because only the mass of kept ids matters then.
        best: id of the largest logit of a GREEDY row.
        lower, upper, guessed: see `_bounded`.
    """
    vocab = source[0].vocab
    largest = tl.max(tl.max(tops, axis=1), axis=0)
    lower = tl.zeros([], tl.int64) + KEY_LOWEST + 1
    upper, guessed, best = lower, tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    kind = tl.zeros([], tl.int32) + KNOWN
    normaliser = tl.zeros([], tl.float32) + 1.0
    if (largest == float("inf")) | (largest == -float("inf")):
        kind = tl.zeros([], tl.int32) + INVALID
    elif temperature <= 0:
        kind = tl.zeros([], tl.int32) + GREEDY
        group = tl.arange(0, GROUPS)[None, :]
        holder = tl.min(tl.min(tl.where(tops == largest, group, GROUPS), axis=1), axis=0)
        index = holder * WIDTH + tl.arange(0, WIDTH)
        best = tl.min(tl.where(scaled(view_of(*source), index, STOPS) == largest, index, 0x7FFFFFFF), axis=0)
    else:
        if (top_k > 0) & (top_k < vocab):
            # the normaliser is the mass of kept ids: the mass of a group is not needed
            lower = tl.maximum(lower, _kth_at_least(tops, largest, top_k.to(tl.int32), GROUPS))
        else:
            relative = tl.exp(tops - largest)
            masses = masses * relative
            normaliser = added(masses)
            if top_p < 1.0:
                # slightly less than 1 - top_p, because sums of groups are rounded
                max_mass = tl.maximum((1.0 - top_p) * 0.999 - ROUNDED, 1e-30) * normaliser
                # the largest id of a group has exactly 1 of the group's relative mass
                rest = tl.maximum(masses - relative, 0.0)
                under = _largest_below(tops, masses, rest, groups, largest, max_mass, WIDTH)
                lower = tl.maximum(lower, key_of(under + 0.0).to(tl.int64))
        if filtered(top_k, top_p, min_p, vocab):
            kind = tl.zeros([], tl.int32) + SEARCHED
            lower, upper, guessed = _bounded(
                source, tops, lower, largest, normaliser, top_k, top_p, min_p, groups, GROUPS, WIDTH, MAX_FOUND, STOPS
            )
    return kind, largest, normaliser, best, lower, upper, guessed


# --- candidates ---


LISTED_PIECE = tl.constexpr(128)  # number of listed groups that are read at a time


@triton.jit
def _note(source, start, counters_ptr, found_ptr, largest, min_p, lower, upper, CHUNK, MAX_FOUND, STOPS):
    """Counts and collects ids in a chunk of CHUNK ids, from id `start` on, of a logits row that several CTAs share.

    The number and the mass of ids with keys >= `upper` are added to the counters. Ids with keys in [lower, upper) are
    stored as candidates at `found_ptr`, up to MAX_FOUND of them.
    """
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


@triton.jit(noinline=True)  # see logits.py
def noted(source, tops_ptr, counters_ptr, found_ptr, largest, min_p, lower, upper, groups, CHUNK, MAX_FOUND, STOPS):
    """Counts and collects ids in this CTA's chunks of a logits row, see `_note`.

    Returns True in the CTA that finishes last among the CTAs of the logits row.
    """
    tl.debug_barrier()
    # disable_licm: values hoisted out of the loop would take registers
    for chunk in tl.range(tl.program_id(0), tl.cdiv(source[0].vocab, CHUNK), tl.num_programs(0), disable_licm=True):
        group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
        tops = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"))
        if key_of(tl.max(tops, axis=0)) >= lower:
            _note(source, chunk * CHUNK, counters_ptr, found_ptr, largest, min_p, lower, upper, CHUNK, MAX_FOUND, STOPS)
    # the atomic's release covers one thread's stores; the barrier adds those of all others
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr + ARRIVED, 1, sem="acq_rel") == tl.num_programs(0) - 1
    tl.debug_barrier()
    return last


@triton.jit
def read_off(counters_ptr, word):
    """Loads the counter with index `word`, which several CTAs have incremented. The load bypasses L1."""
    return tl.load(counters_ptr + word, cache_modifier=".cg")


@triton.jit
def _places_of(near):
    """Numbers the elements of near int32 [ROWS, COLUMNS] that are 1, from 0 on and row by row.

    Returns (the index of each such element [ROWS, COLUMNS], the number of such elements). Two short scans are faster
    than a long scan over all threads of a CTA.
    """
    in_row = tl.sum(near, axis=1)
    before = tl.cumsum(in_row, axis=0) - in_row
    return before[:, None] + tl.cumsum(near, axis=1) - near, tl.sum(in_row, axis=0)


@triton.jit
def list_groups(tops_ptr, groups, lower, listed_ptr, lists, max_listed, SIZE: tl.constexpr, EACH: tl.constexpr):
    """Returns the number of groups of ids whose largest logit has a key of at least `lower`.

    If `lists` is True, it stores the indices of the first `max_listed` of these groups at `listed_ptr`, in ascending
    order. It reads SIZE groups at a time, EACH times.
    """
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
    """Stores the ids with keys of at least `lower` in the listed groups as candidates, in ascending order.

    The indices of the groups are at `listed_ptr`; `number` is their number. Returns the number of such ids. Only the
    first MAX_FOUND of them are stored at `found_ptr`.
    """
    count = number * 0
    for start in tl.range(0, number, LISTED_PIECE, disable_licm=True):
        slot = start + tl.arange(0, LISTED_PIECE)
        # group -1 gives ids below zero, which `scaled` masks
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
