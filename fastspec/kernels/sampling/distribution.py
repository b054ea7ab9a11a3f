"""Sampling distributions in two launches and without a sort: processors, temperature, top-k, top-p, min-p.

The definition is `distribution.compute_probs` of `processors.process`. The first launch (groups.py) reads the logits
once. In the second, a line's programs find between which logits its threshold lies (bounds.py). Where few groups of ids
reach that far, as in language models, one program looks through these groups alone, in the order of ids. Otherwise all
of the line's programs take turns at its chunks: they count and weigh what lies above the bounds and note the candidates
between them, and the last to arrive goes on. The threshold is then found among the candidates (threshold.py).

What stands in the record of a line is its distribution: p(id) = exp(x - MAX) / NORMALISER where `kept` of logits.py, 0
elsewhere; for a GREEDY line one on BEST; for an INVALID line there is none. P_DRAFT and Q_DRAFT are the probabilities
of the draft at this place under the target's and the draft's distribution. NUM_LISTED is how many ids `found` lists,
among them all that the distribution keeps, in an order that depends on the line alone; -1 where it may list others, or
not all.

Differences to torch: sums are rounded otherwise, so where top-p falls within that rounding of an id's edge, one id
more or less may be kept. Ids that tie at the edge of top-p are kept in the order of ids, as torch's stable sort does.
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
from fastspec.kernels.sampling import groups as sampled_groups
from fastspec.kernels.sampling import logits as sampled_parts
from fastspec.kernels.sampling.bounds import described, filtered, merged
from fastspec.kernels.sampling.candidates import gather, list_groups, noted, read_off
from fastspec.kernels.sampling.groups import _groups_kernel
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
    processed,
    scaled,
    view_of,
)
from fastspec.kernels.sampling.threshold import PIECE, RANKED, fixed, normaliser_of, rank_candidates, search

# a program runs its code once, so it waits for instructions: many threads, each with few of them
LAUNCH = {"num_warps": 16}
CROWDED = {"maxnreg": 64}  # where there are more lines than PROGRAMS: two programs share a multiprocessor
PROGRAMS = 132  # of a launch, about: more do not find a line's distribution any sooner
_GROUP = tl.constexpr(GROUP)
_RECORD = tl.constexpr(RECORD)
_COUNTERS = tl.constexpr(COUNTERS)


class Scratch(NamedTuple):
    """The buffers of a `SampledWork` for the kernel: tensors here, pointers there."""

    counters: Any
    records: Any
    groups: Any
    found: Any
    listed: Any


class LineDistribution(NamedTuple):
    """What a line's record says of its distribution, as scalars on the device; the module docstring has the formula.

    Attributes:
        kind: int32, one of SEARCHED, KNOWN, GREEDY and INVALID.
        largest, normaliser: fp32, MAX and NORMALISER.
        key, cut: int32, the lowest key that is kept, and up to which id among equals.
        best: int32, the id of a GREEDY line.
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
    """The distribution of a line from its record."""
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
    """fp32 probabilities under a distribution that is neither invalid nor greedy, of ids with scaled logits x."""
    e = tl.exp(x - dist.largest)
    p = tl.div_rn(e, dist.normaliser + tl.zeros_like(e))
    return tl.where(kept(key_of(x), index, e, dist.key, dist.cut, min_p), p, 0.0)


@triton.jit
def probabilities(dist, view, index, min_p, STOPS: tl.constexpr):
    """fp32 probabilities under a distribution that is not invalid, at index int32."""
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
    count,  # candidates
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
    """(key, cut, fp32 normaliser) of a line whose candidates are all noted."""
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
        # if ranking the candidates did not decide, searching them would not either
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
def _draft_at(draft, logits_ptr, bias_ptr, q_ptr):
    """(logit, bias, probability when drafted) fp32 [16] of a draft int32 [16], as they lie in memory."""
    known = draft >= 0  # else it is no id
    x = tl.load(logits_ptr + draft, mask=known, other=-float("inf"))
    bias = tl.load(bias_ptr + draft, mask=known, other=0.0)
    q = tl.full(draft.shape, 1.0, tl.float32)
    if q_ptr is not None:
        q = tl.load(q_ptr + draft, mask=known, other=0.0)
    return x, bias, q


@triton.jit
def _weigh_draft(source, draft, read, dist, record_ptr, min_p, STOPS: tl.constexpr):
    """Stores the draft's probabilities under the target's and the draft's distribution, by what `_draft_at` read."""
    x = processed(view_of(*source), read[0] + read[1], draft, draft >= 0, STOPS)
    p = tl.max(share(dist, x, draft, min_p), axis=0)
    # nothing follows from an invalid line, and no comparison with NaN holds
    p = tl.where(dist.kind > GREEDY, float("nan"), p)
    tl.store(record_ptr + P_DRAFT, p.to(tl.int32, bitcast=True))
    tl.store(record_ptr + Q_DRAFT, tl.max(read[2], axis=0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=[*INTS, "drafts"])
def _distribution_kernel(
    source,
    work,  # Scratch
    q_ptr,  # None: the proposer is deterministic
    places,
    first,
    drafts,  # places that a draft stands at; 0: none is weighed
    q_row,
    q_place,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,  # groups that are described as one
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
    # loaded together, also for lines that are not wanted: no load waits for another
    wanted = tl.load(source.finish + row) == RUNNING
    if source.counts is not None:
        wanted = wanted & (place <= tl.load(source.counts + row))
    temperature = tl.load(source.temperature + row)
    top_k, top_p, min_p = tl.load(source.top_k + row), tl.load(source.top_p + row), tl.load(source.min_p + row)
    drafted = tl.load(source.draft_tokens + row * source.drafts_stride + place, mask=place < drafts, other=-1)
    tops_ptr = work.groups + line.to(tl.int64) * groups * 2
    tops, masses = merged(tops_ptr, tops_ptr + groups, groups, GROUPS // EACH, EACH)
    # what may need more than one program is described by each for itself, all alike
    shared = (temperature > 0) & filtered(top_k, top_p, min_p, vocab)
    if wanted & (shared | (tl.program_id(0) == 0)):
        # from it each makes a view for itself: kept in between, a view takes half the registers
        at = source, line, row, place
        mine = tl.program_id(0) == 0
        weighs = (place < drafts) & (temperature > 0)  # a greedy row is judged by match
        # loaded now and used at the end, so that nothing waits for it
        drafted = tl.where(weighs & (drafted >= 0) & (drafted < vocab), drafted, -1)
        draft = drafted.to(tl.int32) + tl.zeros([16], tl.int32)
        line_ptr = source.logits + line * tl.cast(source.logits_stride, tl.int64)
        row_bias = source.bias + row * source.bias_stride
        row_q = q_ptr
        if q_ptr is not None:
            row_q = q_ptr + row * q_row + place.to(tl.int64) * q_place
        read = _draft_at(draft, line_ptr, row_bias, row_q)
        kind, largest, normaliser, best, lower, upper, guessed = described(
            *(at, tops, masses, temperature, top_k, top_p, min_p, tl.cdiv(groups, EACH)),
            *(GROUPS // EACH, _GROUP * EACH, MAX_FOUND, STOPS),
        )
        key, cut, num_listed = lower.to(tl.int32), vocab, tl.full([], -1, tl.int32)
        if kind == SEARCHED:
            line_found = work.found + line.to(tl.int64) * (2 * MAX_FOUND)
            line_counters = work.counters + line * _COUNTERS
            line_listed = work.listed + line.to(tl.int64) * LISTED
            # without a bound above, or with nothing to look for
            alone = (upper == KEY_OPEN) | (upper == lower)
            lists = mine & alone
            number = list_groups(tops_ptr, groups, lower, line_listed, lists, LISTED, GROUPS // EACH, EACH)
            count, count_above = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
            mass_above, kept_above = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
            if (number <= LISTED) & alone:
                if mine:
                    tl.debug_barrier()  # others read what is listed
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
                tl.debug_barrier()  # candidates are read by other threads, counters have been read by all
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
    """Options of a launch, of which those that sums depend on are the same for all."""
    return LAUNCH | (CROWDED if lines > PROGRAMS else {})


def find_distributions(
    logits: Tensor,
    rows: Any,
    work: SampledWork,
    *,
    first: int = 0,
    drafts: int = 0,
    draft_probs: Tensor | None = None,
    ragged: bool = False,
    record: Record | None = None,
) -> None:
    """Fills the records of `work` for logits [B, R, V] of places first.. of each row, in two launches.

    Args:
        logits: fp32, of the ids 0..V-1, of which there may be fewer than the state knows.
        rows: the state of the rows.
        work: as large as these lines need.
        first: the first place; place j comes after the row's first j drafts.
        drafts: places below this hold a draft, whose probabilities are recorded.
        draft_probs: [B, K, V] that drafts were drawn from; None: the proposer is deterministic.
        ragged: places beyond a row's draft_counts are left out.
        record: log-probabilities to record of the raw logits, but for those of the tokens that are not known yet.
    """
    batch, places, vocab = logits.shape
    source = sampled_parts.source_of(logits, rows, ragged=ragged)
    shared = {"STOPS": rows.stop_ids.shape[1], **sampled_parts.OPTIONS}
    chunk = sampled_groups.CHUNK
    chunks = triton.cdiv(vocab, chunk)
    parts = sampled_parts.parts_of(batch, places, chunks)
    top, _ = logprobs.sizes_of(record)
    launch(
        _groups_kernel,
        (chunks, batch * parts),
        *(source, work.groups, logprobs.record_rows(record, rows)._replace(details=None)),
        *(places, first, parts, top, rows.block.shape[1]),
        CHUNK=chunk,
        PIECE=sampled_groups.piece_of(chunk),
        STAGES=sampled_groups.STAGES if parts < places else 1,
        **(sampled_groups.LAUNCH if record is None else {}),
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
        *(places, first, drafts, *((0, 0) if draft_probs is None else draft_probs.stride()[:2])),
        GROUPS=padded,
        EACH=triton.cdiv(padded, bounds.MAX_GROUPS),
        MAX_FOUND=max_found,
        LISTED=work.listed.shape[1],
        RANKED=min(RANKED, max_found),
        PIECE=PIECE,
        CHUNK=sampled_parts.CHUNK,
        **launch_of(lines),
        **shared,
    )
