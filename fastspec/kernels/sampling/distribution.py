"""Computes sampling distributions in two launches, without a sort: processors, temperature, top-k, top-p, min-p.

The definition is `distribution.compute_probs` of `processors.process`. A *line* is one logits row: the logits of one
scored position of one batch row. The *mass* of an id is exp(x - largest logit), x its scaled logit; masses of several
ids are added.

1. `_groups_kernel` reads the logits once. It stores the largest logit and the mass of each group of 32 ids. A group's
   mass is relative to its own largest logit, so CTAs share nothing. A CTA takes CHUNK ids of a row of the batch and
   goes through its scored positions. It loads the logits of STAGES - 1 positions ahead, because its speed depends on
   the number of loads in flight. If log-probabilities are recorded (logprobs.py), it reads the raw logits again, from
   L2.
2. `_distribution_kernel` computes bounds of each line's threshold (bounds.py). If few groups of ids reach the lower
   bound, as usual with language models, one CTA reads only these groups, in ascending order. Otherwise all CTAs of the
   line share its chunks: they count the ids above the bounds, add their masses, and store the candidates between the
   bounds. The last CTA to finish finds the threshold among the candidates (threshold.py).

The result is a record of int32 fields for each line:

| field | meaning |
|---|---|
| MAX, NORMALISER, KEY, CUT | p(id) = exp(x - MAX) / NORMALISER for the ids that `kept` of logits.py keeps, else 0 |
| KIND | of a GREEDY line p is 1 on the id BEST; an INVALID line has no distribution |
| P_DRAFT, Q_DRAFT | probabilities of the position's draft token under the target's and the draft's distribution |
| NUM_LISTED | number of ids in `found`, which include all that the distribution keeps. -1: unknown |

If NUM_LISTED is not negative, the order of the ids in `found` depends on the line alone.

Differences from torch: sums are rounded in another order. So if top-p is within that rounding of an id's cumulative
probability, one id more or less may be kept. Ids that tie at the threshold of top-p are kept in ascending order, as
with torch's stable sort.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch
from fastspec.kernels.reference.step import Record
from fastspec.kernels.sampling import bounds, logprobs
from fastspec.kernels.sampling import logits as sampled_parts
from fastspec.kernels.sampling.bounds import described, filtered, gather, list_groups, merged, noted, read_off
from fastspec.kernels.sampling.logits import (
    BEST,
    COUNT_ABOVE,
    COUNTERS,
    CUT,
    FOUND,
    GREEDY,
    GROUP,
    GUESSED,
    INTS,
    KEPT_ABOVE,
    KEY,
    KEY_OPEN,
    KIND,
    KNOWN,
    MASS_ABOVE,
    MAX,
    NORMALISER,
    NUM_LISTED,
    P_DRAFT,
    Q_DRAFT,
    RECORD,
    RUNNING,
    SEARCHED,
    UPPER,
    SampledWork,
    kept,
    key_of,
    level_of,
    penalised_at,
    processed,
    scaled,
    tempered,
    view_of,
)
from fastspec.kernels.sampling.logprobs import record_line
from fastspec.kernels.sampling.threshold import PIECE, RANKED, fixed, normaliser_of, rank_candidates, search

# --- the first launch ---


CHUNK = 2048  # ids per CTA of the first launch
STAGES = 3  # number of positions in the software pipeline of a CTA that processes several
GROUPS_LAUNCH = {"num_warps": 4, "maxnreg": 80}  # six CTAs per SM: 96 KiB in flight
_GROUP = tl.constexpr(GROUP)


def piece_of(chunk: int) -> int:
    """Returns the number of ids that a CTA with a chunk of `chunk` ids processes at a time in a row with penalties.

    It is smaller than the chunk, because penalties need registers.
    """
    return max(GROUP, chunk // 4)


@triton.jit
def _sum_up(x, tops_ptr, chunk, groups, weighs, CHUNK: tl.constexpr):
    """Stores the largest scaled logit of each group of ids in a chunk x [CHUNK].

    If `weighs` is True, it also stores the mass of each group.

    Args:
        tops_ptr: output of one logits row, fp32 [2, groups]: largest logit x0 of each group, then its mass, the sum of
            exp(x - x0).
        chunk: index of the chunk in the logits row.
        groups: number of groups.
    """
    x = tl.reshape(x, [CHUNK // _GROUP, _GROUP])
    tops = tl.max(x, axis=1)
    group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
    tl.store(tops_ptr + group, tops, mask=group < groups)
    if weighs:
        # a group with only -inf has mass exp(-inf) = 0; one with +inf makes the line invalid, whatever its mass
        masses = tl.sum(tl.exp(x - level_of(tops)[:, None]), axis=1)
        tl.store(tops_ptr + groups + group, masses, mask=group < groups)


@triton.jit
def _in_pieces(view, tops_ptr, groups, weighs, CHUNK: tl.constexpr, PIECE: tl.constexpr, STOPS: tl.constexpr):
    """Calls `_sum_up` for PIECE ids of a chunk at a time, in a logits row with penalties, which need registers."""
    for piece in range(0, CHUNK // PIECE):
        which = tl.program_id(0) * (CHUNK // PIECE) + piece
        x = scaled(view, which * PIECE + tl.arange(0, PIECE), STOPS)
        _sum_up(x, tops_ptr, which, groups, weighs, PIECE)


@triton.jit(do_not_specialize=[*INTS, "parts", "top", "state_places"])
def _groups_kernel(
    source,
    groups_ptr,
    recorded,  # RecordRows of logprobs.py
    places,
    first,
    ragged,  # 1: positions after a row's last valid draft token are skipped
    parts,  # number of CTAs among which a row's positions are split
    top,
    state_places,  # K + 1
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    # loaded before any branch, also for rows that do not run, so that the loads overlap
    running = tl.load(source.finish + row) == RUNNING
    counts = tl.load(source.counts + row).to(tl.int32)
    end = tl.where(ragged != 0, tl.minimum(places, counts + 1 - first), places)
    # with top-k the next launch sums the mass of the kept ids: masses of groups are not needed
    top_k = tl.load(source.top_k + row)
    weighs = (tl.load(source.temperature + row) > 0) & ((top_k <= 0) | (top_k >= source.vocab))
    biased = tl.load(source.unbiased + row) == 0
    length, least = tl.load(source.lengths + row), tl.load(source.min_lengths + row)
    view = view_of(source, row * places, row, first)
    vocab, groups = source.vocab, source.groups
    stride, width = tl.cast(source.logits_stride, tl.int64), tl.cast(groups, tl.int64) * 2
    row_ptr = groups_ptr + row * places * width
    if running & view.penalised:
        for at in range(part, end, parts):
            there = penalised_at(view, at * stride, length + first + at < least, first + at)
            _in_pieces(there, row_ptr + at * width, groups, weighs, CHUNK, PIECE, STOPS)
    elif running:
        index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        known = index < vocab
        bias = tl.load(view.bias + index, mask=known & biased, other=0.0)
        for at in tl.range(part, end, parts, num_stages=STAGES):
            x = tl.load(view.logits + at * stride + index, mask=known, other=-float("inf")) + bias
            x = tempered(view.stop_ids, length + first + at < least, view.temperature, x, index, known, STOPS)
            _sum_up(x, row_ptr + at * width, tl.program_id(0), groups, weighs, CHUNK)
    if recorded.levels is not None:  # noqa: SIM102  (a condition known at compile time stands alone)
        if running:
            index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
            for at in range(part, end, parts):
                line_ptr = source.logits + (row * places + at) * stride
                x = tl.load(line_ptr + index, mask=index < vocab, other=-float("inf"))
                record_line(
                    *(x, recorded, line_ptr, row * places + at, row * state_places + at),
                    *(tl.program_id(0), tl.num_programs(0), vocab, top, CHUNK, GROUPS, TOP),
                )


# --- the second launch ---


# a CTA runs its code only once, so it waits for instruction fetches: it has many threads, each with few instructions
LAUNCH = {"num_warps": 16}
CROWDED = {"maxnreg": 64}  # with more than PROGRAMS logits rows two CTAs share an SM
PROGRAMS = 132  # approximate number of CTAs per launch; with more, a logits row does not become faster
_RECORD = tl.constexpr(RECORD)
_COUNTERS = tl.constexpr(COUNTERS)


class Scratch(NamedTuple):
    """Kernel argument: scratch buffers. `SampledWork` describes them."""

    counters: Any
    records: Any
    groups: Any
    found: Any
    listed: Any


class LineDistribution(NamedTuple):
    """Sampling distribution of one logits row as scalars in a kernel.

        p(id) = exp(x - largest) / normaliser for the ids that are kept, else 0;   x is the id's scaled logit

    Attributes:
        kind: int32. INVALID: NaN or infinite logits, no distribution. GREEDY: p is 1 on the id `best`. KNOWN: the other
            fields are valid. SEARCHED: the threshold is not known yet.
        largest: fp32, largest scaled logit.
        normaliser: fp32, sum of exp(x - largest) over the kept ids.
        key: int32, key (`key_of`) of the lowest scaled logit that is kept.
        cut: int32, the last id that is kept among ids with this key.
        best: int32, the id with probability 1 if `kind` is GREEDY.
    """

    kind: Any
    largest: Any
    normaliser: Any
    key: Any
    cut: Any
    best: Any


LINE_DISTRIBUTION = tl.constexpr(LineDistribution)


@triton.jit
def load_distribution(record_ptr):
    """Loads the `LineDistribution` of a logits row from its record."""
    return LINE_DISTRIBUTION(
        tl.load(record_ptr + KIND),
        tl.load(record_ptr + MAX).to(tl.float32, bitcast=True),
        tl.load(record_ptr + NORMALISER).to(tl.float32, bitcast=True),
        tl.load(record_ptr + KEY),
        tl.load(record_ptr + CUT),
        tl.load(record_ptr + BEST),
    )


@triton.jit
def share(dist, x, index, min_p):
    """Returns fp32 probabilities of ids `index` with scaled logits x, under the `LineDistribution` dist.

    The distribution is neither INVALID nor GREEDY.
    """
    e = tl.exp(x - dist.largest)
    p = tl.div_rn(e, dist.normaliser + tl.zeros_like(e))
    return tl.where(kept(key_of(x), index, e, dist.key, dist.cut, min_p), p, 0.0)


@triton.jit
def probabilities(dist, view, index, min_p, STOPS: tl.constexpr):
    """Returns fp32 probabilities of ids `index` int32 under the `LineDistribution` dist.

    `view` is the `View` of the same logits row. The distribution is not INVALID.
    """
    p = (index == dist.best).to(tl.float32)
    if dist.kind != GREEDY:
        p = share(dist, scaled(view, index, STOPS), index, min_p)
    return p


@triton.jit
def _find_threshold(
    source,
    found_ptr,
    largest,
    normaliser,
    count,  # number of candidates
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
    RANKED: tl.constexpr,
    PIECE: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Finds the threshold of a logits row among its stored candidates.

    Returns (key, cut, fp32 normaliser) of `LineDistribution`. The argument `normaliser` is the total mass, or 1 with
    top-k. For the other arguments see bounds.py and `rank_candidates`.
    """
    vocab = source[0].vocab
    top_k = tl.where(top_k < vocab, top_k, 0).to(tl.int32)
    lower, upper = lower.to(tl.int32), upper.to(tl.int32)
    key, cut, mass, sound = lower, vocab, kept_above, tl.full([], 0, tl.int1)
    if count <= RANKED:
        key, cut, mass, sound = rank_candidates(
            *(found_ptr, largest, fixed(normaliser), count, count_above, mass_above, kept_above, lower, upper),
            *(guessed, top_k, top_p, min_p, vocab, MAX_FOUND, RANKED),
        )
    if sound == 0:
        # the threshold is not among the candidates, so a search of these would not find it: read the whole logits row
        key, cut, mass = search(
            *(source, found_ptr, (count > MAX_FOUND) | (count <= RANKED), largest, normaliser, count, count_above),
            *(mass_above, kept_above, lower, upper, guessed, top_k, top_p, min_p, MAX_FOUND, PIECE, STOPS),
        )
    return key, cut, normaliser_of(mass)


@triton.jit
def _store_distribution(record_ptr, dist, upper, guessed, num_listed):
    tl.store(record_ptr + KIND, dist.kind)
    tl.store(record_ptr + MAX, dist.largest.to(tl.int32, bitcast=True))
    tl.store(record_ptr + NORMALISER, dist.normaliser.to(tl.int32, bitcast=True))
    tl.store(record_ptr + KEY, dist.key)
    tl.store(record_ptr + CUT, dist.cut)
    tl.store(record_ptr + BEST, dist.best)
    tl.store(record_ptr + UPPER, upper.to(tl.int32))
    tl.store(record_ptr + GUESSED, guessed)
    tl.store(record_ptr + NUM_LISTED, num_listed)


@triton.jit
def _draft_at(draft, logits_ptr, bias_ptr, q_ptr, drawn):
    """Loads the logit, the logit bias and the draft model's probability of a draft token, each fp32 [16].

    `draft` is int32 [16] with 16 copies of the draft token, or of -1 if there is none. If q_ptr is None or `drawn` is
    0, the probability is 1.
    """
    known = draft >= 0
    x = tl.load(logits_ptr + draft, mask=known, other=-float("inf"))
    bias = tl.load(bias_ptr + draft, mask=known, other=0.0)
    q = tl.full(draft.shape, 1.0, tl.float32)
    if q_ptr is not None:
        q = tl.where(drawn != 0, tl.load(q_ptr + draft, mask=known & (drawn != 0), other=0.0), q)
    return x, bias, q


@triton.jit
def _weigh_draft(source, draft, read, dist, record_ptr, min_p, STOPS: tl.constexpr):
    """Stores the draft token's probabilities P_DRAFT and Q_DRAFT in the record of a logits row.

    `read` is the result of `_draft_at`, `dist` the `LineDistribution` of the logits row.
    """
    x = processed(view_of(*source), read[0] + read[1], draft, draft >= 0, STOPS)
    p = tl.max(share(dist, x, draft, min_p), axis=0)
    # NaN: every comparison with it is false, so a draft at an invalid line is never accepted
    p = tl.where(dist.kind > GREEDY, float("nan"), p)
    tl.store(record_ptr + P_DRAFT, p.to(tl.int32, bitcast=True))
    tl.store(record_ptr + Q_DRAFT, tl.max(read[2], axis=0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=[*INTS, "drafts", "drawn"])
def _distribution_kernel(
    source,
    work,  # Scratch
    q_ptr,  # None: there are no distributions of drafts
    places,
    first,
    ragged,  # 1: positions after a row's last valid draft token are skipped
    drawn,  # 1: drafts were drawn from the distributions at q_ptr; 0: each has probability 1
    drafts,  # number of places with a draft; 0: no probabilities of drafts are stored
    q_row,
    q_place,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,  # number of groups that are merged to one
    MAX_FOUND: tl.constexpr,
    LISTED: tl.constexpr,
    RANKED: tl.constexpr,
    PIECE: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.program_id(1)
    vocab, groups = source.vocab, source.groups
    row, place = (line // places).to(tl.int64), first + line % places
    # loaded before any branch, also for lines that are not needed, so that the loads overlap
    wanted = tl.load(source.finish + row) == RUNNING
    wanted = wanted & ((ragged == 0) | (place <= tl.load(source.counts + row)))
    temperature = tl.load(source.temperature + row)
    top_k, top_p, min_p = tl.load(source.top_k + row), tl.load(source.top_p + row), tl.load(source.min_p + row)
    drafted = tl.load(source.draft_tokens + row * source.drafts_stride + place, mask=place < drafts, other=-1)
    tops_ptr = work.groups + line.to(tl.int64) * groups * 2
    tops, masses = merged(tops_ptr, tops_ptr + groups, groups, GROUPS // EACH, EACH)
    # each CTA of a line that may need several describes the line, with equal results
    shared = (temperature > 0) & filtered(top_k, top_p, min_p, vocab)
    if wanted & (shared | (tl.program_id(0) == 0)):
        # each function calls `view_of` with these: a view that stays alive would take half of the registers
        at = source, line, row, place
        mine = tl.program_id(0) == 0
        # in a greedy row a draft is accepted if it equals the token of the target
        weighs = (place < drafts) & (temperature > 0)
        # loaded now and used at the end, to hide the latency
        drafted = tl.where(weighs & (drafted >= 0) & (drafted < vocab), drafted, -1)
        draft = drafted.to(tl.int32) + tl.zeros([16], tl.int32)
        line_ptr = source.logits + line * tl.cast(source.logits_stride, tl.int64)
        row_bias = source.bias + row * source.bias_stride
        row_q = q_ptr
        if q_ptr is not None:
            row_q = q_ptr + row * q_row + place.to(tl.int64) * q_place
        read = _draft_at(draft, line_ptr, row_bias, row_q, drawn)
        kind, largest, normaliser, best, lower, upper, guessed = described(
            *(at, tops, masses, temperature, top_k, top_p, min_p, tl.cdiv(groups, EACH)),
            *(GROUPS // EACH, _GROUP * EACH, MAX_FOUND, STOPS),
        )
        key, cut, num_listed = lower.to(tl.int32), vocab, tl.full([], -1, tl.int32)
        if kind == SEARCHED:
            line_found = work.found + line.to(tl.int64) * (2 * MAX_FOUND)
            line_counters = work.counters + line * _COUNTERS
            line_listed = work.listed + line.to(tl.int64) * LISTED
            # no upper bound, or the threshold is known: only ids from `lower` on matter
            alone = (upper == KEY_OPEN) | (upper == lower)
            lists = mine & alone
            number = list_groups(tops_ptr, groups, lower, line_listed, lists, LISTED, GROUPS // EACH, EACH)
            count, count_above = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
            mass_above, kept_above = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
            if (number <= LISTED) & alone:
                if mine:
                    tl.debug_barrier()  # the code below reads the list that other threads have stored
                    count = gather(at, line_listed, line_found, number, lower, MAX_FOUND, STOPS)
                    num_listed = tl.where(count <= MAX_FOUND, count, -1)
            else:
                mine = noted(
                    *(at, tops_ptr, line_counters, line_found, largest, min_p, lower.to(tl.int32)),
                    *(upper.to(tl.int32), groups, CHUNK, MAX_FOUND, STOPS),
                )
                if mine:
                    count = read_off(line_counters, FOUND).to(tl.int32)
                    count_above = read_off(line_counters, COUNT_ABOVE).to(tl.int32)
                    mass_above, kept_above = read_off(line_counters, MASS_ABOVE), read_off(line_counters, KEPT_ABOVE)
            if mine:
                # the code below reads candidates of other threads, and all threads have read the counters
                tl.debug_barrier()
                for word in tl.static_range(KEPT_ABOVE + 1):
                    tl.store(line_counters + word, 0)
                key, cut, normaliser = _find_threshold(
                    *(at, line_found, largest, normaliser, count, count_above, mass_above, kept_above),
                    *(lower, upper, guessed, top_k, top_p, min_p, MAX_FOUND, RANKED, PIECE, STOPS),
                )
                kind = tl.zeros([], tl.int32) + KNOWN
        if mine:
            dist = LINE_DISTRIBUTION(kind, largest, normaliser, key, cut, best)
            record_ptr = work.records + line * _RECORD
            _store_distribution(record_ptr, dist, upper, guessed, num_listed)
            if weighs:
                _weigh_draft(at, draft, read, dist, record_ptr, min_p, STOPS)


def launch_of(lines: int) -> dict[str, int]:
    """Returns the launch options for `lines` logits rows.

    Options that change the order of sums do not depend on `lines`.
    """
    return LAUNCH | (CROWDED if lines > PROGRAMS else {})


def find_distributions(
    logits: Tensor,
    rows: Any,
    work: SampledWork,
    *,
    first: int = 0,
    drafts: int = 0,
    drawn: bool = False,
    ragged: bool = False,
    record: Record | None = None,
) -> None:
    """Computes the sampling distributions of B * R logits rows in two launches, as the records of `work`.

    Args:
        logits: fp32 [B, R, V], logits of ids 0..V-1; V may be less than the vocabulary of the state. Their positions
            are lengths + first .. lengths + first + R - 1.
        rows: state of the rows.
        work: scratch memory with room for these logits rows, which gets the records.
        first: number of draft tokens before the first of these positions.
        drafts: number of draft tokens to verify. Records of positions j < drafts also get the probabilities of draft
            token j.
        drawn: True if draft tokens were drawn from `rows.draft_probs`. False: each has probability 1.
        ragged: True to skip positions after the last valid draft token of each row.
        record: request to record log-probabilities of the raw logits. The commit records the log-probabilities of the
            emitted tokens. None: nothing is recorded.
    """
    batch, places, vocab = logits.shape
    source, draft_probs = sampled_parts.source_of(logits, rows), sampled_parts.draft_probs_of(rows)
    shared = {"STOPS": rows.stop_ids.shape[1], **sampled_parts.OPTIONS}
    chunks = triton.cdiv(vocab, CHUNK)
    parts = sampled_parts.parts_of(batch, places, chunks)
    top, _ = logprobs.sizes_of(record)
    launch(
        _groups_kernel,
        (chunks, batch * parts),
        *(source, work.groups, logprobs.record_rows(record, rows)._replace(details=None)),
        *(places, first, int(ragged), parts, top, rows.block.shape[1]),
        CHUNK=CHUNK,
        PIECE=piece_of(CHUNK),
        STAGES=STAGES if parts < places else 1,
        **(GROUPS_LAUNCH if record is None else {}),
        **(shared | logprobs.constants_of(record, rows, vocab)),
    )
    lines = batch * places
    chunks = triton.cdiv(vocab, sampled_parts.CHUNK)
    max_found = work.found.shape[2]
    padded = max(16, triton.next_power_of_2(source.groups))
    launch(
        _distribution_kernel,
        (max(1, min(chunks, PROGRAMS // lines)), lines),
        *(source, Scratch(work.counters, work.records, work.groups, work.found, work.listed), draft_probs),
        *(places, first, int(ragged), int(drawn), drafts, *sampled_parts.strides_of(draft_probs)),
        GROUPS=padded,
        EACH=triton.cdiv(padded, bounds.MAX_GROUPS),
        MAX_FOUND=max_found,
        LISTED=work.listed.shape[1],
        RANKED=min(RANKED, max_found),
        PIECE=PIECE,
        CHUNK=sampled_parts.CHUNK,
        **launch_of(lines),
        **sampled_parts.UNPIPELINED,
        **shared,
    )
