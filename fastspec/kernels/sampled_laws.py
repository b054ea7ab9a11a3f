"""The laws of a sampled step in short, by two launches and without a sort: processors, temperature, top-k, top-p,
min-p.

The law is `sampling.law` of `processors.process`. The first launch (sampled_bounds.py) finds between which logits each
line's threshold lies. In the second, a program takes CHUNK ids of a line again, unless none of them matters: it counts
and weighs what lies above these bounds and notes the candidates between them; the last program to arrive at a line
finds the threshold among those (sampled_search.py). A line without filters needs no second look.

What stands in the record of a line is its law: p(id) = exp(x - MAX) / NORMALISER where sampled_parts.kept, 0
elsewhere; for a GREEDY line one on BEST; for a BROKEN line there is none. P_DRAFT and Q_DRAFT are the probabilities of
the draft at this place under the target's and the draft's law.

Differences to torch: sums are rounded otherwise, so where top-p falls within that rounding of an id's edge, one id
more or less may be kept. Ids that tie at the edge of top-p are kept in the order of ids, as torch's stable sort does.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels import sampled_bounds, sampled_parts
from fastspec.kernels.device import has_pdl, launch
from fastspec.kernels.sampled_bounds import _bounds_kernel
from fastspec.kernels.sampled_parts import (
    ARRIVED,
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
    P_DRAFT,
    Q_DRAFT,
    RECORD,
    RUNNING,
    SEARCHED,
    UPPER,
    SampledWork,
    kept,
    key_of,
    scaled,
    view_of,
)
from fastspec.kernels.sampled_search import PAIRED, fixed, normaliser_of, search_candidates, search_line

LAUNCH = {"num_warps": 16}
FEW = 1024  # candidates that are looked at in one smaller piece
_GROUP = tl.constexpr(GROUP)
_RECORD = tl.constexpr(RECORD)
_COUNTERS = tl.constexpr(COUNTERS)


@triton.jit
def law_of(record_ptr):
    """(kind, largest, normaliser, key, cut, best) of a line."""
    return (
        tl.load(record_ptr + KIND),
        tl.load(record_ptr + MAX).to(tl.float32, bitcast=True),
        tl.load(record_ptr + NORMALISER).to(tl.float32, bitcast=True),
        tl.load(record_ptr + KEY),
        tl.load(record_ptr + CUT),
        tl.load(record_ptr + BEST),
    )


@triton.jit
def probabilities(law, view, index, min_p, STOPS: tl.constexpr):
    """fp32 probabilities under a law that is not broken, at index int32."""
    kind, largest, normaliser, threshold, cut, best = law[0], law[1], law[2], law[3], law[4], law[5]
    p = (index == best).to(tl.float32)
    if kind != GREEDY:
        x = scaled(view, index, STOPS)
        e = tl.exp(x - largest)
        p = tl.where(kept(key_of(x), index, e, threshold, cut, min_p), tl.div_rn(e, normaliser + tl.zeros_like(e)), 0.0)
    return p


@triton.jit
def _note(view, start, counters_ptr, found_ptr, largest, min_p, lower, upper, CHUNK, MOST, STOPS):
    """Counts and weighs what is above the bounds in a chunk; notes the candidates between them."""
    index = start + tl.arange(0, CHUNK)
    x = scaled(view, index, STOPS)
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
        fits = (near > 0) & (slot < MOST)
        tl.store(found_ptr + slot, keys, mask=fits)
        tl.store(found_ptr + MOST + slot, index, mask=fits)


@triton.jit
def _settle(view, record_ptr, counters_ptr, found_ptr, top_k, top_p, min_p, CHUNK, MOST, FEW, PAIRED, STOPS):
    """Completes the record of a line whose candidates are all noted."""
    vocab = view[13]
    largest = tl.load(record_ptr + MAX).to(tl.float32, bitcast=True)
    total = fixed(tl.load(record_ptr + NORMALISER).to(tl.float32, bitcast=True))
    lower = tl.load(record_ptr + KEY).to(tl.int64)
    upper = tl.load(record_ptr + UPPER).to(tl.int64)
    guessed = tl.load(record_ptr + GUESSED)
    count = tl.load(counters_ptr + FOUND, cache_modifier=".cg")
    count_above = tl.load(counters_ptr + COUNT_ABOVE, cache_modifier=".cg")
    mass_above = tl.load(counters_ptr + MASS_ABOVE, cache_modifier=".cg")
    kept_above = tl.load(counters_ptr + KEPT_ABOVE, cache_modifier=".cg")
    top_k = tl.where(top_k < vocab, top_k, 0)
    key, cut, mass, sound = lower.to(tl.int32), vocab, kept_above, count <= MOST
    if count <= PAIRED:
        key, cut, mass, sound = search_candidates(
            *(found_ptr, largest, total, count, count_above, mass_above, kept_above, lower, upper, guessed),
            *(top_k, top_p, min_p, vocab, MOST, PAIRED, True),
        )
    elif count <= FEW:
        key, cut, mass, sound = search_candidates(
            *(found_ptr, largest, total, count, count_above, mass_above, kept_above, lower, upper, guessed),
            *(top_k, top_p, min_p, vocab, MOST, FEW, False),
        )
    elif count <= MOST:
        key, cut, mass, sound = search_candidates(
            *(found_ptr, largest, total, count, count_above, mass_above, kept_above, lower, upper, guessed),
            *(top_k, top_p, min_p, vocab, MOST, MOST, False),
        )
    if sound == 0:
        key, cut, mass = search_line(view, largest, total, top_k, top_p, min_p, CHUNK, STOPS)
    tl.store(record_ptr + NORMALISER, normaliser_of(mass).to(tl.int32, bitcast=True))
    tl.store(record_ptr + KEY, key)
    tl.store(record_ptr + CUT, cut)
    tl.store(record_ptr + KIND, KNOWN)
    tl.store(counters_ptr + FOUND, 0)
    tl.store(counters_ptr + COUNT_ABOVE, 0)
    tl.store(counters_ptr + MASS_ABOVE, 0)
    tl.store(counters_ptr + KEPT_ABOVE, 0)


@triton.jit
def _weigh_draft(view, record_ptr, q_ptr, min_p, place, STOPS: tl.constexpr):
    """Stores what the target's and the draft's law make of the draft at this place."""
    draft = tl.load(view[4] + place)
    law = law_of(record_ptr)
    lanes = tl.zeros([16], tl.int32) + draft.to(tl.int32)
    p = tl.max(probabilities(law, view, lanes, min_p, STOPS), axis=0)
    # nothing follows from a broken law, and no comparison with NaN holds
    p = tl.where(law[0] > GREEDY, float("nan"), p)
    q = tl.full([], 1.0, tl.float32)
    if q_ptr is not None:
        q = tl.load(q_ptr + draft, mask=(draft >= 0) & (draft < view[13]), other=0.0)
    tl.store(record_ptr + P_DRAFT, p.to(tl.int32, bitcast=True))
    tl.store(record_ptr + Q_DRAFT, q.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=[*INTS, "drafts"])
def _laws_kernel(
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
    counts_ptr,
    finish_ptr,
    counters_ptr,
    records_ptr,
    groups_ptr,
    found_ptr,
    q_ptr,  # None: drafts were certain
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
    drafts,  # places that a draft stands at; 0: none is weighed
    q_row,
    q_place,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    FEW: tl.constexpr,
    PAIRED: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.program_id(1)
    row, place = (line // places).to(tl.int64), first + line % places
    wanted = tl.load(finish_ptr + row) == RUNNING
    if counts_ptr is not None:
        wanted = wanted & (place <= tl.load(counts_ptr + row))
    record_ptr = records_ptr + line * _RECORD
    last = wanted & (tl.program_id(0) == 0)
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
        min_p = tl.load(min_p_ptr + row)
        if tl.load(record_ptr + KIND) == SEARCHED:
            line_counters = counters_ptr + line * _COUNTERS
            line_found = found_ptr + line.to(tl.int64) * (2 * MOST)
            lower = tl.load(record_ptr + KEY)
            upper = tl.load(record_ptr + UPPER)
            largest = tl.load(record_ptr + MAX).to(tl.float32, bitcast=True)
            tops_ptr = groups_ptr + line.to(tl.int64) * groups * 2
            for chunk in range(tl.program_id(0), tl.cdiv(vocab, CHUNK), tl.num_programs(0)):
                group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
                tops = tl.load(tops_ptr + group, mask=group < groups, other=-float("inf"))
                if key_of(tl.max(tops, axis=0)) >= lower:
                    _note(
                        *(view, chunk * CHUNK, line_counters, line_found, largest, min_p, lower, upper),
                        *(CHUNK, MOST, STOPS),
                    )
            tl.debug_barrier()  # as in sampled_bounds.py
            arrived = tl.atomic_add(line_counters + ARRIVED, 1, sem="acq_rel")
            last = arrived == tl.num_programs(0) - 1
            if last:
                top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
                _settle(
                    *(view, record_ptr, line_counters, line_found, top_k, top_p, min_p),
                    *(CHUNK, MOST, FEW, PAIRED, STOPS),
                )
                tl.store(line_counters + ARRIVED, 0)
                tl.debug_barrier()  # the record is read by every thread below
        if last & (place < drafts):
            row_q = q_ptr
            if q_ptr is not None:
                row_q = q_ptr + row * q_row + place.to(tl.int64) * q_place
            _weigh_draft(view, record_ptr, row_q, min_p, place, STOPS)


def find_laws(
    logits: Tensor,
    rows: Any,
    work: SampledWork,
    *,
    first: int = 0,
    drafts: int = 0,
    laws: Tensor | None = None,
    ragged: bool = False,
) -> None:
    """Fills the records of `work` for logits [B, R, V] of places first.. of each row, in two launches.

    Args:
        logits: fp32, of the ids 0..V-1, of which there may be fewer than the state knows.
        rows: the state of the rows.
        work: as large as these lines need.
        first: the first place; place j comes after the row's first j drafts.
        drafts: places below this hold a draft, whose probabilities are recorded.
        laws: [B, K, V] that drafts were drawn from; None: they were certain.
        ragged: places beyond a row's draft_counts are left out.
    """
    batch, places, vocab = logits.shape
    source = list(sampled_parts.source_of(logits, rows))
    if not ragged:
        source[-2] = None
    sizes = sampled_parts.sizes_of(logits, rows, first)
    stops = rows.stop_ids.shape[1]
    chunk, most = sampled_parts.CHUNK, work.found.shape[2]
    pdl = has_pdl(logits.device)
    grid = sampled_parts.grid_of(vocab, chunk, batch * places)
    shared = {"CHUNK": chunk, "MOST": most, "STOPS": stops, "PDL": pdl, "launch_pdl": pdl, **sampled_parts.OPTIONS}
    launch(
        _bounds_kernel,
        grid,
        *source,
        work.counters,
        work.records,
        work.groups,
        *sizes,
        GROUPS=max(16, triton.next_power_of_2(sizes[-1])),
        **sampled_bounds.launch_of(sizes[-1]),
        **shared,
    )
    strides = (0, 0) if laws is None else (laws.stride(0), laws.stride(1))
    launch(
        _laws_kernel,
        grid,
        *source,
        *(work.counters, work.records, work.groups, work.found, laws),
        *sizes,
        *(drafts, *strides),
        FEW=min(FEW, most),
        PAIRED=min(PAIRED, most),
        **LAUNCH,
        **shared,
    )
