"""The end of a sampled step in three launches: distributions, then acceptance, the last token and the bookkeeping.

The definition is `fastspec.sampling.verify`: `rejection`, `block` or `coupled` over `distribution.compute_probs` of
`processors.process`, with places flagged as by `processors.flag_invalid`, then `commit` and `processors.count`.
distribution.py finds every line's distribution in two launches. In the third, every program computes the row's carried
ratios and its uniform numbers for itself, and so knows at which places the row may still end: under rejection one;
under block one if the last draft's number is below its probability, else all before it; under coupled all. At those a
program samples among some ids under p and under max(c p - q, 0), and sums the latter. Winners are merged by an atomic
maximum and sums in fixed point, so neither chunks nor the order of arrival can matter. The last program to arrive at a
row accepts and commits it (commit.py). Where the distribution of every such place has few ids, one program a place
takes part, and where nothing is sampled, one. Random numbers are those of `distribution.PhiloxDraws`.

A greedy row's distribution is one on its argmax, so it is judged by match, whatever the rule.

| argument    | shape, dtype     | notes                                                            |
|-------------|------------------|------------------------------------------------------------------|
| logits      | [B, k+1, V] fp32 | V < 2^19; contiguous, or places at one common stride             |
| draft_probs | [B, K, V] fp32   | of the state; not read where drafts are deterministic                 |
| scratch     | as commit.py     |                                                                  |
| work        | sampled_work     | counters are zero between launches: the last to use them clears  |
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
from fastspec.kernels.sampling.accept import (
    BY_COUPLING,
    RULES,
    is_shared,
    judged,
    listed_from,
    place_of,
    reported,
    sample_dense,
    sample_listed,
    span,
)
from fastspec.kernels.sampling.commit import SIZES, STATE_INTS, Ring, commit_row
from fastspec.kernels.sampling.distribution import find_distributions
from fastspec.kernels.sampling.logits import (
    COUNTERS,
    GREEDY,
    GROUP,
    INVALID,
    NUM_LISTED,
    RECORD,
    RESIDUAL,
    RESIDUAL_WINNER,
    RUNNING,
    WINNER,
    check_draft_probs,
    check_source,
    view_of,
)
from fastspec.kernels.sampling.logprobs import check_record
from fastspec.sampling.rules import COUPLED, REJECTION
from fastspec.sampling.verify import Draws

LAUNCH = {"num_warps": 8, "maxnreg": 128}
PROGRAMS = 264  # of a launch, about: two a multiprocessor
MAX_LISTED = 1024  # listed ids that one program samples among
LISTED = 128  # of them at a time: mostly there are fewer, and less code starts sooner
_GROUP = tl.constexpr(GROUP)
_RECORD = tl.constexpr(RECORD)
_COUNTERS = tl.constexpr(COUNTERS)


class EndWork(NamedTuple):
    """Tensors of `SampledWork`, and the draft's probabilities."""

    counters: Any
    arrivals: Any
    records: Any
    groups: Any
    found: Any
    draft_probs: Any  # None: the proposer is deterministic


class EndBlocks(NamedTuple):
    """Constants of the last launch.

    Attributes:
        RULE: by which drafts are judged, of accept.RULES. TOP: of logprobs.width_of. CHUNK: ids per program.
        MAX_FOUND: ids of a place that were listed at most. MAX_LISTED, LISTED: as above, no more than these.
    """

    RULE: int
    TOP: int
    CHUNK: int
    MAX_FOUND: int
    MAX_LISTED: int
    LISTED: int


def end_chunk() -> int:
    """Ids per program of the last launch: fewer, for sampling takes more registers than the distribution."""
    return max(GROUP, sampled_parts.CHUNK // 4)


@triton.jit(do_not_specialize=["num_places", "parts", "details_width", *STATE_INTS])
def _end_kernel(
    source,
    work,  # EndWork
    state,  # StateRows
    scratch_ptr,
    ring,
    recorded,  # RecordRows
    num_places,  # k + 1
    q_row,
    q_place,
    tokens_width,
    block_stride,
    slots,
    entry_width,
    batch,
    places,  # K + 1
    parts,  # programs that share out the places of a row
    details_width,
    LAUNCHED: tl.constexpr,  # EndBlocks
    BLOCKS: tl.constexpr,  # CommitBlocks
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    RULE: tl.constexpr = LAUNCHED.RULE
    CHUNK: tl.constexpr = LAUNCHED.CHUNK
    MAX_FOUND: tl.constexpr = LAUNCHED.MAX_FOUND
    LISTED: tl.constexpr = LAUNCHED.LISTED
    PLACES: tl.constexpr = BLOCKS.PLACES
    counters_ptr, arrivals_ptr, records_ptr, q_ptr = work.counters, work.arrivals, work.records, work.draft_probs
    groups_ptr, found_ptr = work.groups, work.found
    vocab, groups = source.vocab, source.groups
    row, part = (tl.program_id(1) // parts).to(tl.int64), tl.program_id(1) % parts
    place = tl.arange(0, PLACES)
    row_records = records_ptr + row * num_places * _RECORD
    # loaded together, wanted or not: no load waits for another
    running = tl.load(source.finish + row) == RUNNING
    counts = tl.minimum(tl.load(source.counts + row).to(tl.int32), num_places - 1)
    seed, length = tl.load(source.seeds + row), tl.load(source.lengths + row)
    temperature = tl.load(source.temperature + row)
    p, q, num_listed, kinds = reported(row_records, place, num_places)
    # drafts behind a place without a distribution do not count; places behind the drafts are not among these
    counts = tl.minimum(counts, tl.min(tl.where(kinds == INVALID, place, PLACES), axis=0))
    handled = ((tl.program_id(0) == 0) & (part == 0)).to(tl.int32)
    workers = tl.full([], 1, tl.int32)  # a row that samples nothing is judged by its first program alone
    low, high, carried = counts * 0, counts, tl.full([PLACES], 1.0, tl.float32)
    if running & (temperature > 0):
        low, high, carried = span(p, q, place, counts, seed, length, RULE, PLACES)
        dense = is_shared(num_listed, kinds, place, low, high, LAUNCHED.MAX_LISTED)
        handled = dense.to(tl.int32)
        chunks = tl.cdiv(vocab, CHUNK)
        if dense:
            for at in tl.range(low + part, high + 1, parts, disable_licm=True):
                dist, draft, c = place_of(
                    row_records, source.draft_tokens + row * source.drafts_stride, carried, place, at, counts, vocab
                )
                if dist.kind < GREEDY:
                    # a place begins with the program after the last of the place before
                    turn = ((at - low) // parts * chunks) % tl.num_programs(0)
                    begin = (tl.program_id(0) + tl.num_programs(0) - turn) % tl.num_programs(0)
                    line, min_p = row * num_places + at, tl.load(source.min_p + row)
                    line_q = q_ptr
                    if q_ptr is not None:
                        line_q = q_ptr + row * q_row + at * tl.cast(q_place, tl.int64)
                    view = view_of(source, line, row, at)
                    sample_dense(
                        line_q,
                        *(dist, view, groups_ptr + line * groups * 2, groups, counters_ptr + line * _COUNTERS),
                        *(draft, c, (at < counts) & (RULE != BY_COUPLING), seed, length + at, begin, min_p),
                        *(RULE, CHUNK, BLOCKS.NUM_STOPS),
                    )
            workers = parts * tl.num_programs(0)
        else:
            # few ids a place: one program each
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
                        *(dist, listed, line_found, number, counters_ptr + line * _COUNTERS, draft, c),
                        *((at < counts) & (RULE != BY_COUPLING), seed, length + at, min_p, RULE, MAX_FOUND, LISTED),
                    )
            workers = high + 1 - low
    last = handled == workers
    if (handled > 0) & (last == 0):
        last = tl.atomic_add(arrivals_ptr + row, handled, sem="acq_rel") == workers - handled
    if last:
        tl.debug_barrier()  # if it works alone, its own threads have ranked ids
        num_drafts, row_counters = num_places - 1, counters_ptr + row * num_places * _COUNTERS
        row_drafts = source.draft_tokens + row * source.drafts_stride
        drafts = tl.load(row_drafts + place, mask=place < num_drafts, other=0)
        accepted = tl.full([], -1, tl.int32)
        block = tl.where(place <= num_drafts, tl.minimum(tl.maximum(drafts, 0), vocab - 1), -1)
        if running:
            accepted, block = judged(
                *((low, high, carried), row_records, row_counters, row_drafts, place, counts, num_drafts, vocab),
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
            LAUNCHED.TOP,
            BLOCKS,
        )
        tl.atomic_add(source.output_counts + row * source.output_stride + block, 1, mask=place < emitted, sem="relaxed")
        # after the barrier in commit_row: all have read
        used = place <= num_drafts
        zeros = tl.zeros([PLACES], tl.int64)
        tl.store(row_counters + place * _COUNTERS + WINNER, zeros, mask=used)
        tl.store(row_counters + place * _COUNTERS + RESIDUAL_WINNER, zeros, mask=used)
        tl.store(row_counters + place * _COUNTERS + RESIDUAL, zeros, mask=used)
        tl.store(arrivals_ptr + row, 0)


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
    """As `reference.sampled_commit`, which defines it; draws are those of the rows' seeds, whatever `draws` is.

    Raises:
        ValueError: a layout is not as above, or a work area is too small.
    """
    batch, places, vocab = logits.shape
    check_source(logits, rows, work)
    committing.check_rows(rows, batch, places - 1, scratch)
    draft_probs = None if deterministic or rule == COUPLED or places == 1 else rows.draft_probs
    check_draft_probs(draft_probs, vocab)
    if record is not None:
        check_record(record, rows, vocab, places)
    drafts = 0 if rule == COUPLED else places - 1
    find_distributions(logits, rows, work, drafts=drafts, draft_probs=draft_probs, ragged=True, record=record)
    source = sampled_parts.source_of(logits, rows)
    tokens_width, _, *others = committing.sizes_of(rows, publish_to)
    _, details_width = logprobs.sizes_of(record)
    chunk = end_chunk()
    chunks, max_found = triton.cdiv(vocab, chunk), work.found.shape[2]
    # under rejection one place of a row is sampled
    parts = 1 if rule == REJECTION else sampled_parts.parts_of(batch, places, chunks)
    # all of a row's chunks at a place, unless there are rows enough to fill the device
    programs = max(1, min(chunks, PROGRAMS // (batch * parts)))
    launch(
        _end_kernel,
        (programs, batch * parts),
        source,
        EndWork(work.counters, work.arrivals, work.records, work.groups, work.found, draft_probs),
        *(committing.state_of(rows), scratch, Ring(*(publish_to or (None, None)))),
        logprobs.record_rows(record, rows),
        places,
        *((0, 0) if draft_probs is None else draft_probs.stride()[:2]),
        *(tokens_width, *others, batch, rows.block.shape[1], parts),
        details_width,
        LAUNCHED=EndBlocks(
            RULES[rule],
            logprobs.width_of(record, rows),
            chunk,
            max_found,
            min(MAX_LISTED, max_found),
            min(LISTED, max_found),
        ),
        BLOCKS=committing.blocks_of(rows),
        **LAUNCH,
        **sampled_parts.OPTIONS,
    )
