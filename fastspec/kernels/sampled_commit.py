"""The end of a sampled step in three launches: laws, then acceptance, the last token and the step's bookkeeping.

The law is `fastspec.verify`: `rejection`, `block` or `coupled` over `sampling.law` of `processors.process`, marked as
`processors.marked`, then `commit` and `processors.count`. sampled_laws.py finds every line's law in two launches. In
the third, every program forms the row's carried ratios and its coins for itself, and so knows which places can still
end the row: under rejection one; under block one if the last draft's coin falls, else all before it; under coupled
all. At those a program takes CHUNK ids: their race under p and under max(c p - q, 0), and the sum of the latter.
Winners are merged by an atomic maximum and sums in fixed point, so neither chunks nor arrival order can matter. The
last program to arrive at a row accepts and commits it (commit.py). Random numbers are those of `sampling.PhiloxDraws`.

A greedy row's law is one on its pick, so it is judged by match, whatever the rule.

| argument    | shape, dtype     | notes                                                            |
|-------------|------------------|------------------------------------------------------------------|
| logits      | [B, k+1, V] fp32 | V < 2^19; contiguous, or places at one common stride             |
| draft_probs | [B, K, V] fp32   | of the state; not read where drafts were certain                 |
| scratch     | as commit.py     |                                                                  |
| work        | sampled_work     | counters are zero between launches: the last to use them clears  |

What it should cost on an H200 at V = 128256, from its bytes and its dependent chains: the first launch reads B (k+1) V
logits and B V biases once, at B = 1 from the L2 cache (2 us, and 3 to 8 us for the bounds, which are bisections of 20
to 32 dependent sums over the groups' maxima); the second reads again what matters (1 to 2 us) and bisects among the
candidates (3 us, 8 where there are thousands); the third 2 to 4 us. So 15 to 25 us at B = 1. At B = 32 and k = 5 the
logits are 98 MB: 22 us to read, half of which is left in the cache for the second launch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec import sampling
from fastspec.kernels import commit as committing
from fastspec.kernels import sampled_parts
from fastspec.kernels.commit import STATE_INTS, commit_row
from fastspec.kernels.device import has_pdl, launch
from fastspec.kernels.sampled_laws import find_laws, law_of, probabilities
from fastspec.kernels.sampled_parts import (
    BEST,
    BEYOND,
    BROKEN,
    COUNTERS,
    GREEDY,
    GROUP,
    INTS,
    KIND,
    P_DRAFT,
    Q_DRAFT,
    RACE,
    RACE_BEYOND,
    RECORD,
    RUNNING,
    SampledWork,
    check_source,
    coin,
    key_of,
    times,
    view_of,
    winner,
    winning_id,
)
from fastspec.modes import BLOCK, COUPLED, REJECTION

LAUNCH = {"num_warps": 8, "maxnreg": 128}
RULES = {REJECTION: 0, BLOCK: 1, COUPLED: 2}
BY_REJECTION, BY_BLOCK, BY_COUPLING = map(tl.constexpr, RULES.values())
ACCEPT, TARGET = tl.constexpr(sampling.ACCEPT), tl.constexpr(sampling.TARGET)
# fixed point: what p has beyond q weighs at most one
SHARE = tl.constexpr(2.0**60)
NO_SHARE = tl.constexpr(2.0**-60)
TINY = tl.constexpr(1.1754943508222875e-38)
_GROUP = tl.constexpr(GROUP)
_RECORD = tl.constexpr(RECORD)
_COUNTERS = tl.constexpr(COUNTERS)


@triton.jit
def _at(values, place, index):
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
            c = c * _at(ratio, place, j)
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
def _span(record_ptr, place, counts, seed, length, RULE: tl.constexpr, PLACES: tl.constexpr):
    """(first, last) of the places at which a row may end, and c_i [PLACES]."""
    ratio, coins, carried = _ratios(record_ptr, place, counts, seed, length, RULE)
    first = counts * 0
    last = counts
    if RULE == BY_REJECTION:
        first = _leading(coins < ratio, place, counts, PLACES)
        last = first
    if RULE == BY_BLOCK:
        fallen = (counts == 0) | (_at(coins, place, counts - 1) < _at(carried, place, counts))
        first = tl.where(fallen, counts, 0)
        last = tl.where(fallen, counts, counts - 1)
    return first, last, carried


@triton.jit
def _race(law, view, counters_ptr, q_ptr, draft, c, beyond, seed, position, start, min_p, CHUNK, STOPS):
    """Lets the ids of a chunk race for a place, and sums what p has beyond q."""
    index = start + tl.arange(0, CHUNK)
    p = probabilities(law, view, index, min_p, STOPS)
    time = times(seed, position, TARGET, start, CHUNK)
    best = winner(p, time, index)
    if best > 0:
        tl.atomic_max(counters_ptr + RACE, best, sem="relaxed")
    if beyond:
        q = (index == draft).to(tl.float32)
        if q_ptr is not None:
            q = tl.load(q_ptr + index, mask=p > 0, other=0.0)
        excess = tl.maximum(c * p - q, 0.0)
        best = winner(excess, time, index)
        if best > 0:
            tl.atomic_max(counters_ptr + RACE_BEYOND, best, sem="relaxed")
            tl.atomic_add(counters_ptr + BEYOND, (tl.sum(excess, axis=0) * SHARE).to(tl.int64), sem="relaxed")


@triton.jit
def _judged(
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
        first, last, carried = _span(record_ptr, place, counts, seed, length, RULE, PLACES)
        accepted = last
        if RULE == BY_BLOCK:
            excess = shares.to(tl.float32) * NO_SHARE
            chance = tl.div_rn(excess, tl.maximum(excess + (1.0 - carried), TINY))
            chance = tl.where(kinds == BROKEN, 0.0, chance)
            # place i comes after i drafts; the coin of the last of them is that of the place before
            fallen = (coin(seed, length + place - 1, ACCEPT) < chance) & (place > 0) & (place < counts)
            accepted = tl.where(first == counts, counts, tl.max(tl.where(fallen, place, 0), axis=0))
        residual = (accepted < counts) & (_at(beyond.to(tl.float32), place, accepted) > 0)
        picks = tl.where(residual, winning_id(tl.maximum(beyond, 1)), picks)
        picks = tl.where(place == accepted, picks, drafts)
    broken = (kinds == BROKEN) & valid
    first_broken = tl.min(tl.where(broken, place, PLACES), axis=0)
    block = tl.where(valid, picks, drafts)
    block = tl.minimum(tl.maximum(block, 0), vocab - 1)
    return tl.where(first_broken <= accepted, -1 - first_broken, accepted), tl.where(place <= num_drafts, block, -1)


@triton.jit(do_not_specialize=[*INTS, *STATE_INTS, "q_row", "q_place"])
def _end_kernel(
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
    min_p_ptr,
    counts_ptr,
    finish_ptr,
    seeds_ptr,
    counters_ptr,
    arrivals_ptr,
    records_ptr,
    groups_ptr,
    q_ptr,  # None: drafts were certain
    tokens_ptr,
    limits_ptr,
    draft_lengths_ptr,
    block_ptr,
    emitted_ptr,
    accepted_ptr,
    scratch_ptr,
    entries_ptr,  # None: nothing is published
    counter_ptr,
    vocab,
    logits_stride,
    bias_stride,
    prompt_stride,
    output_stride,
    drafts_stride,
    stop_stride,
    num_places,  # k + 1
    first,
    groups,
    q_row,
    q_place,
    tokens_stride,
    tokens_width,
    block_stride,
    slots,
    entry_width,
    batch,
    places,  # K + 1
    RULE: tl.constexpr,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    STOPS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, line = tl.program_id(0), tl.program_id(1)
    row, at = (line // num_places).to(tl.int64), line % num_places
    running = tl.load(finish_ptr + row) == RUNNING
    counts = tl.minimum(tl.load(counts_ptr + row).to(tl.int32), num_places - 1)
    seed, length = tl.load(seeds_ptr + row), tl.load(lengths_ptr + row)
    place = tl.arange(0, PLACES)
    row_records = records_ptr + row * num_places * _RECORD
    row_counters = counters_ptr + row * num_places * _COUNTERS
    if running & (at <= counts):
        law = law_of(row_records + at * _RECORD)
        if law[0] < GREEDY:
            low, high, carried = _span(row_records, place, counts, seed, length, RULE, PLACES)
            group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
            tops_ptr = groups_ptr + line.to(tl.int64) * groups * 2
            tops = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"))
            if (at >= low) & (at <= high) & (key_of(tl.max(tops, axis=0)) >= law[3]):
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
                    at,
                    vocab,
                )
                beyond = (at < counts) & (RULE != BY_COUPLING)
                line_q = q_ptr
                if q_ptr is not None:
                    line_q = q_ptr + row * q_row + at.to(tl.int64) * q_place
                _race(
                    law,
                    view,
                    row_counters + at * _COUNTERS,
                    line_q,
                    tl.load(view[4] + at, mask=at < counts, other=-1),
                    _at(carried, place, at),
                    beyond,
                    seed,
                    length + at,
                    chunk * CHUNK,
                    tl.load(min_p_ptr + row),
                    CHUNK,
                    NUM_STOPS,
                )
    arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if arrived == num_places * tl.num_programs(0) - 1:
        num_drafts = num_places - 1
        row_drafts = drafts_ptr + row * drafts_stride
        drafts = tl.load(row_drafts + place, mask=place < num_drafts, other=0)
        accepted = tl.full([], -1, tl.int32)
        block = tl.where(place <= num_drafts, tl.minimum(tl.maximum(drafts, 0), vocab - 1), -1)
        if running:
            accepted, block = _judged(
                *(row_records, row_counters, row_drafts, place, counts, num_drafts, vocab, seed, length, RULE, PLACES)
            )
        emitted = commit_row(
            row,
            accepted.to(tl.int64),
            block,
            tokens_ptr,
            lengths_ptr,
            limits_ptr,
            draft_lengths_ptr,
            finish_ptr,
            stop_ptr,
            counts_ptr,
            block_ptr,
            emitted_ptr,
            accepted_ptr,
            scratch_ptr,
            entries_ptr,
            counter_ptr,
            tokens_stride,
            tokens_width,
            stop_stride,
            block_stride,
            slots,
            entry_width,
            batch,
            places,
            num_drafts,
            PLACES,
            STOPS,
            NUM_STOPS,
        )
        tl.atomic_add(output_ptr + row * output_stride + block, 1, mask=place < emitted, sem="relaxed")
        # behind the barrier in commit_row: all have read
        used = place <= num_drafts
        zeros = tl.zeros([PLACES], tl.int64)
        tl.store(row_counters + place * _COUNTERS + RACE, zeros, mask=used)
        tl.store(row_counters + place * _COUNTERS + RACE_BEYOND, zeros, mask=used)
        tl.store(row_counters + place * _COUNTERS + BEYOND, zeros, mask=used)
        tl.store(arrivals_ptr + row, 0)


def sampled_commit(
    logits: Tensor,
    rows: Any,
    scratch: Tensor,
    work: SampledWork,
    publish_to: tuple[Tensor, Tensor] | None = None,
    *,
    rule: str,
    certain: bool,
    draws: object = None,
) -> None:
    """As `reference.sampled_commit`, which defines it; draws are those of the rows' seeds, whatever `draws` is.

    Raises:
        ValueError: a layout is not as above, or a work area is too small.
    """
    batch, places, vocab = logits.shape
    check_source(logits, rows, work)
    committing.check_rows(rows, batch, places - 1, scratch)
    laws = None if certain or rule == COUPLED or places == 1 else rows.draft_probs
    if laws is not None and (laws.stride(2) != 1 or laws.shape[2] < vocab):
        raise ValueError(f"draft_probs must be contiguous over the vocabulary and hold {vocab} ids")
    drafts = 0 if rule == COUPLED else places - 1
    find_laws(logits, rows, work, drafts=drafts, laws=laws, ragged=True)
    source = sampled_parts.source_of(logits, rows)
    tokens_stride, tokens_width, _, *others = committing.sizes_of(rows, publish_to)
    pdl = has_pdl(logits.device)
    launch(
        _end_kernel,
        (triton.cdiv(vocab, sampled_parts.CHUNK), batch * places),
        *source[:12],
        *source[14:],
        rows.seeds,
        *(work.counters, work.arrivals, work.records, work.groups, laws),
        *(rows.tokens, rows.limits, rows.draft_lengths, rows.block, rows.emitted, rows.accepted, scratch),
        *(publish_to or (None, None)),
        *sampled_parts.sizes_of(logits, rows, 0),
        *((0, 0) if laws is None else laws.stride()[:2]),
        *(tokens_stride, tokens_width, *others, batch, rows.block.shape[1]),
        RULE=RULES[rule],
        CHUNK=sampled_parts.CHUNK,
        PDL=pdl,
        **LAUNCH,
        launch_pdl=pdl,
        **sampled_parts.OPTIONS,
        **committing.constants_of(rows),
    )
