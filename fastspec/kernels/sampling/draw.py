"""Draws a draft token from its distribution, and stores that distribution, in three launches.

The definition is `reference.sampled_draw`. distribution.py computes the rows' distributions in two launches. In the
third, a CTA takes CHUNK ids of a row. It stores their probabilities if verification needs them, and samples one of them
with the random numbers of `distribution.PhiloxDraws`. An atomic maximum finds the best of all CTAs. The last CTA of a
row to finish stores its token. A row with invalid logits (NaN or infinite, or all -inf) drafts id 0 with probability 1.
Rows that do not run are unchanged.

| argument    | shape, dtype     | notes                                                                   |
|-------------|------------------|-------------------------------------------------------------------------|
| logits      | [B, 1, V'] fp32  | V' <= V; contiguous over the vocabulary                                  |
| draft_probs | [B, K, V] fp32   | buffer of the state; zero from V' on. Not written if not kept            |
| work        | sampled_work     | counters are zero between launches: the last CTA that uses them clears them |
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.launch import launch
from fastspec.kernels.reference.sampled import SampledRows
from fastspec.kernels.sampling import logits as sampled_parts
from fastspec.kernels.sampling.distribution import find_distributions, load_distribution, probabilities
from fastspec.kernels.sampling.logits import (
    ARRIVED,
    COUNTERS,
    GREEDY,
    GROUP,
    INVALID,
    RECORD,
    RUNNING,
    WINNER,
    check_draft_probs,
    check_source,
    key_of,
    times,
    view_of,
    winner,
    winning_id,
)
from fastspec.sampling.verify import Draws

LAUNCH = {"num_warps": 8, "maxnreg": 128}
_GROUP = tl.constexpr(GROUP)
_RECORD = tl.constexpr(RECORD)
_COUNTERS = tl.constexpr(COUNTERS)


@triton.jit(do_not_specialize=["first", "j"])
def _draw_kernel(
    source,
    counters_ptr,
    records_ptr,
    groups_ptr,
    draft_probs_ptr,  # None: the distribution is not stored
    first,
    draft_probs_row,
    width,
    j,
    PURPOSE: tl.constexpr,
    CHUNK: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, line = tl.program_id(0), tl.program_id(1)
    row = line.to(tl.int64)
    if tl.load(source.finish + row) == RUNNING:
        dist = load_distribution(records_ptr + row * _RECORD)
        kind = dist.kind
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        line_counters = counters_ptr + row * _COUNTERS
        p = tl.where(kind == GREEDY, (index == dist.best).to(tl.float32), (index == 0).to(tl.float32))
        if kind < GREEDY:
            p = tl.zeros([CHUNK], tl.float32)
            group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
            tops_ptr = groups_ptr + row * source.groups * 2
            tops = tl.load(tops_ptr + group, mask=group < source.groups, other=-float("inf"))
            if key_of(tl.max(tops, axis=0)) >= dist.key:
                view = view_of(source, line, row, first)
                p = probabilities(dist, view, index, tl.load(source.min_p + row), STOPS)
                position = tl.load(source.lengths + row) + j
                best = winner(p, times(tl.load(source.seeds + row), position, PURPOSE, chunk * CHUNK, CHUNK), index)
                if best > 0:
                    tl.atomic_max(line_counters + WINNER, best, sem="relaxed")
        if draft_probs_ptr is not None:
            tl.store(draft_probs_ptr + row * draft_probs_row + index, p, mask=index < width)
        arrived = tl.atomic_add(line_counters + ARRIVED, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            sampled = tl.load(line_counters + WINNER, cache_modifier=".cg")
            drawn = tl.where(
                kind == GREEDY, dist.best, tl.where(kind == INVALID, 0, winning_id(tl.maximum(sampled, 1)))
            )
            tl.store(source.draft_tokens + row * source.drafts_stride + j, drawn.to(tl.int64))
            tl.debug_barrier()  # all threads have read WINNER
            tl.store(line_counters + WINNER, 0)
            tl.store(line_counters + ARRIVED, 0)


def sampled_draw(
    logits: Tensor,
    rows: SampledRows,
    j: int,
    work: Any,
    *,
    purpose: int,
    keep_draft_probs: bool,
    draws: Draws | None,
) -> None:
    """Draws draft token number j of every row, as `reference.sampled_draw`, in three launches.

    Args:
        logits, rows, j, work, purpose, keep_draft_probs: see `reference.sampled_draw`.
        draws: not read. Random numbers come from the rows' seeds.

    Raises:
        ValueError: a layout other than in the table above, or the scratch memory is too small.
    """
    check_source(logits, rows, work)
    batch, _, vocab = logits.shape
    probs = rows.draft_probs[:, j] if keep_draft_probs else None
    check_draft_probs(probs, vocab)
    find_distributions(logits, rows, work, first=j)
    source = sampled_parts.source_of(logits, rows)
    width = vocab if probs is None else probs.shape[1]
    launch(
        _draw_kernel,
        (triton.cdiv(width, sampled_parts.CHUNK), batch),
        source,
        *(work.counters, work.records, work.groups, probs),
        j,
        *(0 if probs is None else probs.stride(0), width, j),
        PURPOSE=purpose,
        CHUNK=sampled_parts.CHUNK,
        STOPS=rows.stop_ids.shape[1],
        **LAUNCH,
        **sampled_parts.UNPIPELINED,
        **sampled_parts.OPTIONS,
    )
