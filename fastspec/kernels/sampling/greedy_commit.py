"""Verifies draft tokens of greedy rows and commits the step, in one launch.

The definition is `fastspec.sampling.verify`: `greedy`, with invalid logits handled as by
`fastspec.sampling.processors.flag_invalid`, then `commit`. A CTA takes CHUNK logits of one scored position. It packs
the largest of them and its lowest id into one integer that orders as (logit, -id). An atomic maximum merges the
integers of the CTAs of a position. That is exact, so neither the chunks nor the order of CTAs changes a bit. The last
CTA of a row to finish commits that row (commit.py).

| argument | shape, dtype     | notes                                                            |
|----------|------------------|------------------------------------------------------------------|
| logits   | [B, k+1, V] fp32 | V < 2^31; contiguous, or positions at one common stride          |
|          | `PartKeys`       | instead: the largest logits of 2, 4 or 8 parts of the vocabulary |

The other arguments are those of commit.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check_logits
from fastspec.kernels.common.launch import launch
from fastspec.kernels.reference.linear import PartKeys
from fastspec.kernels.reference.step import Record
from fastspec.kernels.sampling import logprobs
from fastspec.kernels.sampling.commit import (
    SIZES,
    STATE_INTS,
    Ring,
    blocks_of,
    check_rows,
    commit_row,
    sizes_of,
    state_of,
)
from fastspec.kernels.sampling.logprobs import RECORD_INTS, check_record, record_line, record_rows
from fastspec.sampling.verify import STOPPED, CommitRows

# (smallest number of scored positions in the batch, logits per CTA, warps). The arithmetic is exact, so this choice
# changes no bits
LAUNCH = ((48, 8192, 8), (0, 4096, 4))


class Lines(NamedTuple):
    """Kernel argument: logits rows (lines), the draft tokens that they verify, and their sizes.

    A line has the logits of one of the k + 1 scored positions of a batch row.
    """

    logits: Any  # fp32 [B (k+1), V]; None if keys are given
    drafts: Any  # int64 [B, >= k]
    vocab: int
    logits_stride: int
    drafts_stride: int
    # int64 [B (k+1), parts], keys of `PartKeys` instead of logits; CHUNK is then the number of parts
    keys: Any = None
    width: int = 0  # number of ids in a part


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _best_of(x, index):
    """Packs the largest element of x fp32 and its index into one int64 > 0.

    As in torch.argmax, NaN is the largest, and the lowest index is taken if several elements are equal. Results compare
    as (element, -index), with -0 equal to 0.
    """
    top = tl.reduce(x, 0, _larger)
    if top == top:  # False if there is a NaN
        first = tl.min(tl.where(x == top, index, 0x7FFFFFFF), axis=0)
    else:
        first = tl.min(tl.where(x != x, index, 0x7FFFFFFF), axis=0)
    bits = top.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, magnitude)
    key = tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, key)
    return ((key.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - first)


@triton.jit(do_not_specialize=[*STATE_INTS, *RECORD_INTS])
def _verify_kernel(
    given,  # Lines
    state,  # StateRows
    scratch_ptr,
    ring,
    recorded,  # RecordRows
    tokens_width,
    stop_stride,
    block_stride,
    slots,
    entry_width,
    batch,
    places,
    num_drafts,
    top,
    details_width,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    PLACES: tl.constexpr,
    STOPS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits_ptr, logits_stride, vocab = given.logits, given.logits_stride, given.vocab
    chunk, line = tl.program_id(0), tl.program_id(1)
    row = (line // (num_drafts + 1)).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    if given.keys is not None:
        key = tl.load(given.keys + line.to(tl.int64) * CHUNK + index)
        best = tl.max(tl.where(key > 0, key - index * given.width, 0), axis=0)
    else:
        # padding beyond the vocabulary is -inf: it loses ties because its index is higher
        x = tl.load(logits_ptr + line.to(tl.int64) * logits_stride + index, mask=index < vocab, other=-float("inf"))
        if recorded.levels is not None:
            line_ptr = logits_ptr + line.to(tl.int64) * logits_stride
            record_line(
                *(x, recorded, line_ptr, line),
                *(row * places + line % (num_drafts + 1), chunk, tl.num_programs(0), vocab, top, CHUNK, GROUPS, TOP),
            )
            tl.debug_barrier()  # all threads must have stored before the row's counter is incremented
        best = _best_of(x, index)
    row_arrivals_ptr = scratch_ptr + 1 + row
    tl.atomic_max(scratch_ptr + 1 + batch + line, best, sem="relaxed")
    arrived = tl.atomic_add(row_arrivals_ptr, 1, sem="acq_rel")
    if arrived == (num_drafts + 1) * tl.num_programs(0) - 1:
        place = tl.arange(0, PLACES)
        in_block = place <= num_drafts
        best_ptr = scratch_ptr + 1 + batch + row * (num_drafts + 1) + place
        ranked = tl.load(best_ptr, mask=in_block, other=0, cache_modifier=".cg")
        picks = tl.where(in_block, 0x7FFFFFFF - (ranked & 0x7FFFFFFF), -1)
        drafts = tl.load(given.drafts + row * given.drafts_stride + place, mask=place < num_drafts, other=-2)
        counted = place < tl.load(state.draft_counts + row)
        accepted = tl.min(tl.where((picks == drafts) & counted, PLACES, place), axis=0).to(tl.int64)
        # a position whose largest logit is NaN or infinite is invalid
        level = (ranked >> 31) - 0x80000000
        lowest = -0x7F800001 if given.keys is not None else -0x7F800000  # of negative infinity
        invalid = in_block & ((level >= 0x7F800000) | (level <= lowest))
        first_invalid = tl.min(tl.where(invalid, place, PLACES), axis=0).to(tl.int64)
        accepted = tl.where(first_invalid <= accepted, first_invalid - 1, accepted)
        commit_row(
            row,
            accepted,
            picks,
            state,
            scratch_ptr,
            ring,
            SIZES(tokens_width, stop_stride, block_stride, slots, entry_width, batch, places, num_drafts),
            logits_ptr,
            logits_stride,
            recorded,
            details_width,
            TOP,
            PLACES,
            STOPS,
            NUM_STOPS,
        )
        tl.store(best_ptr, tl.zeros([PLACES], tl.int64), mask=in_block)  # after the barrier in commit_row
        tl.store(row_arrivals_ptr, 0)


def verify_commit(
    logits: Tensor | PartKeys,
    rows: CommitRows,
    scratch: Any,
    publish_to: tuple[Tensor, Tensor] | None = None,
    record: Record | None = None,
) -> None:
    """Verifies the draft tokens of a greedy decode step and commits it, as `reference.verify_commit`, in one launch.

    Unlike the definition, it does not write to the last column of `rows.tokens`, which has no valid token.

    Raises:
        ValueError: a layout other than in the table above, or the scratch memory is too small.
    """
    lines, chunk, warps = _lines_of(logits, rows.draft_tokens, recorded=record is not None)
    batch, places = rows.draft_counts.shape[0], (logits.keys if isinstance(logits, PartKeys) else logits).shape[1]
    check_rows(rows, batch, places - 1, scratch)
    if record is not None:
        check_record(record, rows, lines.vocab, places)
    grid = (triton.cdiv(lines.vocab, chunk), batch * places)
    launch(
        _verify_kernel,
        grid,
        lines,
        state_of(rows),
        scratch,
        Ring(*(publish_to or (None, None))),
        record_rows(record, rows),
        *sizes_of(rows, publish_to),
        batch,
        rows.block.shape[1],
        places - 1,
        *logprobs.sizes_of(record),
        CHUNK=chunk,
        **blocks_of(rows),
        **({"num_warps": warps} | logprobs.constants_of(record, rows, lines.vocab)),
    )


def record_logprobs(logits: Tensor, rows: CommitRows, scratch: Any, record: Record) -> None:
    """Stores log-probabilities as `reference.record_logprobs`, with the bits that the commit of a step records.

    It launches the kernel of a greedy step with copies of the state in which no row runs. The kernel leaves the largest
    logit and the log-sum-exp of each logits row in `record.work`.

    Raises:
        ValueError: a layout other than in the table above, or the scratch memory is too small.
    """
    batch, places = logits.shape[:2]
    idle: Any = replace(
        cast("Any", rows),
        finish=torch.full_like(rows.finish, STOPPED),
        **{name: getattr(rows, name).clone() for name in ("emitted", "accepted", "block")},
    )
    verify_commit(logits, idle, scratch, None, Record(record.top, record.work))
    levels = record.work.levels[: batch * places].view(batch, places, 2)
    chosen = logits.gather(2, rows.block[:, :places, None])[:, :, 0]
    rows.logprobs[:, :places] = chosen - levels[:, :, 0] - levels[:, :, 1]


def _lines_of(logits: Tensor | PartKeys, drafts: Tensor, *, recorded: bool) -> tuple[Lines, int, int]:
    """Returns the kernel argument `Lines`, the number of logits (or of keys) per CTA, and the number of warps.

    Args:
        logits: logits of the scored positions, or the keys that stand for them.
        drafts: draft tokens.
        recorded: True if log-probabilities are recorded, which needs logits.
    """
    if isinstance(logits, PartKeys):
        keys, parts = logits.keys, logits.keys.shape[-1]
        if recorded or keys.dtype != torch.int64 or not keys.is_contiguous() or parts & (parts - 1):
            raise ValueError(
                f"keys are {keys.dtype} {tuple(keys.shape)}; wanted contiguous int64 of 2, 4 or 8 parts, and nothing "
                "to record"
            )
        return Lines(None, drafts, parts, 0, drafts.stride(0), keys, logits.width), parts, 1
    check_logits(logits)
    batch, places, vocab = logits.shape
    lines = logits.flatten(0, 1)  # a view if places have one stride, else a copy
    # smaller chunks if log-probabilities are recorded: one CTA ranks the ids of a position, and more CTAs hide its
    # latency
    chunk, warps = next(entry[1:] for entry in LAUNCH if entry[0] <= (0 if recorded else batch * places))
    return Lines(lines, drafts, vocab, lines.stride(0), drafts.stride(0)), chunk, warps
