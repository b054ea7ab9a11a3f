"""Commits the verified tokens of a decode step in one launch. Launches that also verify use the same device code.

The definition is `fastspec.sampling.verify.commit`. A CTA commits one batch row. The CTA that finishes last publishes
the results of all rows (publish.py).

| argument   | shape, dtype         | notes                                                                        |
|------------|----------------------|------------------------------------------------------------------------------|
| accepted   | [B] int64            | number of accepted draft tokens                                              |
| block      | [B, k+1] int64       | accepted draft tokens and one more; rows may be views of longer rows         |
| rows       | state of B rows      | see `fastspec.state.DecodeState`; rows of tables may be views of longer rows |
| scratch    | scratch_of(...)      | zero between launches: the last CTA that uses a counter clears it            |
| publish_to | (entries, counter)   | see publish.py                                                               |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, check_room, check_table
from fastspec.kernels.common.launch import launch
from fastspec.kernels.sampling.logprobs import RecordRows, record_block
from fastspec.kernels.sampling.publish import check_ring, store_details, store_entry, store_sequence
from fastspec.sampling import verify
from fastspec.sampling.verify import CommitRows

RUNNING = tl.constexpr(verify.RUNNING)
STOPPED = tl.constexpr(verify.STOPPED)
AT_LIMIT = tl.constexpr(verify.AT_LIMIT)

NUM_WARPS = 2
STATE_INTS = ["batch", "num_drafts", "places", "slots", "entry_width", "block_stride", "stop_stride", "tokens_width"]
COLUMNS = ("lengths", "limits", "draft_lengths", "finish", "draft_counts", "emitted", "accepted")
DETAILS_BLOCK = tl.constexpr(512)  # int32 elements of log-probabilities that are stored at a time
_MIN_PLACES = 32  # so that one compiled kernel serves all usual k


class StateRows(NamedTuple):
    """Kernel argument: fields of `fastspec.state.DecodeState` that a commit uses, and the row stride of `tokens`."""

    tokens: Any
    lengths: Any
    limits: Any
    draft_lengths: Any
    finish: Any
    stop_ids: Any
    draft_counts: Any
    block: Any
    emitted: Any
    accepted: Any
    tokens_stride: int


class RowSizes(NamedTuple):
    """Sizes and strides that `commit_row` reads. They vary between launches.

    Each is a separate parameter of the kernels, because `do_not_specialize` (`STATE_INTS`) cannot name parts of tuples.
    """

    tokens_width: Any
    stop_stride: Any
    block_stride: Any
    slots: Any
    entry_width: Any
    batch: Any
    places: Any  # K + 1
    num_drafts: Any


class Ring(NamedTuple):
    """Kernel argument: the ring buffer to which a step's results are published, and its counter (publish.py).

    Both fields are None if the results are not published.
    """

    entries: Any
    counter: Any


SIZES = tl.constexpr(RowSizes)


@triton.jit
def commit_row(
    row,
    accepted,
    block,  # int64 [PLACES]; -1 from place num_drafts + 1 on
    state,  # StateRows
    scratch_ptr,
    ring,
    sizes,  # RowSizes
    logits_ptr,  # [B, k+1, V]; read only if log-probabilities are recorded
    logits_stride,
    recorded,  # RecordRows of logprobs.py
    details_width,
    TOP: tl.constexpr,
    PLACES: tl.constexpr,
    STOPS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
):
    """Commits the verified tokens of one batch row, as `verify.commit`, in one CTA.

    The CTA that commits the last row publishes the results of all rows. If log-probabilities are recorded, those of the
    emitted tokens are stored before the commit.

    Args:
        row: index of the batch row.
        accepted: number of accepted draft tokens. Negative: the row emits no token.
        details_width: stride of the ring buffer of log-probabilities.
        TOP: number of most probable ids for which the decode state has memory.

    Returns:
        The number of emitted tokens.
    """
    entries_ptr, counter_ptr = ring.entries, ring.counter
    tokens_width, stop_stride, block_stride = sizes.tokens_width, sizes.stop_stride, sizes.block_stride
    slots, entry_width, batch = sizes.slots, sizes.entry_width, sizes.batch
    places, num_drafts = sizes.places, sizes.num_drafts
    place = tl.arange(0, PLACES)
    stop = tl.arange(0, STOPS)
    was = tl.load(state.finish + row)
    running = was == RUNNING
    length = tl.load(state.lengths + row)
    room = tl.load(state.limits + row) - length
    counts = tl.load(state.draft_counts + row)
    stop_ids = tl.load(state.stop_ids + row * stop_stride + stop, mask=stop < NUM_STOPS, other=-1)
    if entries_ptr is not None:
        # `store_sequence` counts the step only after every row is committed
        sequence = tl.load(counter_ptr) + 1
        beyond = (place > num_drafts) & (place < places)
        old_block = tl.load(state.block + row * block_stride + place, mask=beyond, other=0)

    same = (block[:, None] == stop_ids[None, :]) & (stop < NUM_STOPS)[None, :]
    is_stop = (tl.max(same.to(tl.int32), axis=1) > 0) & (place <= accepted)
    upto_stop = tl.min(tl.where(is_stop, place + 1, num_drafts + 2), axis=0)
    count = tl.where(running, tl.maximum(tl.minimum(tl.minimum(accepted + 1, upto_stop), room), 0), 0)
    stopped = (upto_stop <= room) & (upto_stop <= num_drafts + 1)
    finish = tl.where(stopped, STOPPED, tl.where(count == room, AT_LIMIT, RUNNING))
    finish = tl.where(running, finish, was)
    accepted = tl.where(running, accepted, -1)
    fed = length - 1 + tl.minimum(counts, count)

    # all warps must have read the row before one of them writes to it
    tl.debug_barrier()
    # in range for every valid length; clamped because the kernel cannot check lengths
    at = tl.minimum(tl.maximum(length + place, 0), tokens_width - 1)
    tl.store(state.tokens + row * state.tokens_stride + at, block, mask=place < count)
    tl.store(state.draft_lengths + row, fed, mask=running & (counts > 0) & (num_drafts > 0))
    tl.store(state.lengths + row, length + count)
    tl.store(state.finish + row, finish)
    tl.store(state.block + row * block_stride + place, block, mask=place <= num_drafts)
    tl.store(state.emitted + row, count)
    tl.store(state.accepted + row, accepted)
    if recorded.levels is not None:
        lines = recorded.levels, recorded.logprobs
        record_block(logits_ptr, logits_stride, *lines, row, block, place, count, num_drafts, places)
    if entries_ptr is not None:
        before = (batch - 1).to(tl.int64)
        if batch == 1:
            entry_ptr = entries_ptr + sequence % slots * entry_width + 1
            tl.store(entry_ptr, count)
            tl.store(entry_ptr + 1, accepted)
            tl.store(entry_ptr + 2, tl.where(num_drafts > 0, counts, 0))
            tl.store(entry_ptr + 3, finish)
            tl.store(entry_ptr + 4 + place, tl.where(place <= num_drafts, block, old_block), mask=place < places)
        else:
            # the atomic's release covers one thread's stores; the barrier adds those of all others
            tl.debug_barrier()
            before = tl.atomic_add(scratch_ptr, 1, sem="acq_rel")
        if before == batch - 1:
            tl.store(scratch_ptr, 0)
            if batch > 1:  # by one CTA: a fence per row would wait until its stores have reached the host's memory
                tl.debug_barrier()
                store_entry(
                    entries_ptr,
                    sequence,
                    state.emitted,
                    state.accepted,
                    state.draft_counts,
                    state.finish,
                    state.block,
                    block_stride,
                    slots,
                    entry_width,
                    batch,
                    places,
                    num_drafts > 0,
                )
            if recorded.details is not None:
                tl.debug_barrier()  # with one row, other threads of this CTA have just stored the log-probabilities
                slot_ptr = recorded.details + sequence % slots * details_width
                total = batch * places * (1 + 2 * TOP)
                stored = recorded.logprobs, recorded.top_ids, recorded.top_logprobs
                store_details(slot_ptr, *stored, total, TOP, DETAILS_BLOCK)
            store_sequence(entries_ptr, counter_ptr, slots, entry_width, sequence)
    return count


@triton.jit(do_not_specialize=STATE_INTS)
def _commit_kernel(
    given_accepted_ptr,
    given_block_ptr,
    state,
    scratch_ptr,
    ring,
    recorded,  # RecordRows, all None
    given_stride,
    tokens_width,
    stop_stride,
    block_stride,
    slots,
    entry_width,
    batch,
    places,
    num_drafts,
    PLACES: tl.constexpr,
    STOPS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    block = tl.load(given_block_ptr + row * given_stride + place, mask=place <= num_drafts, other=-1)
    commit_row(
        row,
        tl.load(given_accepted_ptr + row),
        block,
        state,
        scratch_ptr,
        ring,
        SIZES(tokens_width, stop_stride, block_stride, slots, entry_width, batch, places, num_drafts),
        None,
        0,
        recorded,
        0,
        0,
        PLACES,
        STOPS,
        NUM_STOPS,
    )


def scratch_of(batch: int, max_drafts: int, device: torch.device) -> Tensor:
    """Allocates zeroed scratch memory of the commit kernels, for up to `batch` rows with `max_drafts` draft tokens.

    It has one counter of committed rows, then one counter of finished CTAs for each row, then one integer for the
    argmax of each scored position.
    """
    return torch.zeros(1 + batch * (max_drafts + 2), dtype=torch.int64, device=device)


def commit(
    accepted: Tensor,
    block: Tensor,
    rows: CommitRows,
    scratch: Any,
    publish_to: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Commits the verified tokens of a decode step, as `reference.commit`, in one launch.

    Unlike the definition, it does not write to the last column of `rows.tokens`, which has no valid token.

    Raises:
        ValueError: a layout other than in the module's table, or the scratch memory is too small.
    """
    batch, places = block.shape
    check_rows(rows, batch, places - 1, scratch)
    check("accepted", accepted, (batch,), torch.int64)
    check_table("block", block, batch, places)
    launch(
        _commit_kernel,
        (batch,),
        accepted,
        block,
        state_of(rows),
        scratch,
        Ring(*(publish_to or (None, None))),
        RecordRows(),
        block.stride(0),
        *sizes_of(rows, publish_to),
        batch,
        rows.block.shape[1],
        places - 1,
        num_warps=NUM_WARPS,
        **blocks_of(rows),
    )


def check_rows(rows: CommitRows, batch: int, num_drafts: int, scratch: Tensor) -> None:
    """Checks the tensors of the decode state `rows` and the scratch memory that `commit_row` uses.

    Raises:
        ValueError: a layout that the kernels would misread, or a buffer that is too small.
    """
    for name in COLUMNS:
        check(name, getattr(rows, name), (batch,), torch.int64)
    for name, width in (("tokens", 1), ("stop_ids", 1), ("block", num_drafts + 1), ("draft_tokens", num_drafts)):
        check_table(name, getattr(rows, name), batch, width)
    check_room("scratch", scratch, 1 + batch * (num_drafts + 2), f"make it with scratch_of({batch}, {num_drafts}, ...)")


def state_of(rows: CommitRows) -> StateRows:
    """Builds the kernel argument `state` from the decode state of the batch rows."""
    return StateRows(
        rows.tokens,
        rows.lengths,
        rows.limits,
        rows.draft_lengths,
        rows.finish,
        rows.stop_ids,
        rows.draft_counts,
        rows.block,
        rows.emitted,
        rows.accepted,
        rows.tokens.stride(0),
    )


def sizes_of(rows: CommitRows, publish_to: tuple[Tensor, Tensor] | None) -> tuple[int, ...]:
    """Returns the kernel arguments tokens_width, stop_stride, block_stride, slots and entry_width, in this order.

    Args:
        rows: decode state.
        publish_to: (ring buffer, counter) to which results are published. None: they are not published.

    Raises:
        ValueError: the ring buffer does not fit `rows`.
    """
    if publish_to is not None:
        check_ring(publish_to[0], rows)
    slots, width = (1, 1) if publish_to is None else publish_to[0].shape
    return rows.tokens.shape[1], rows.stop_ids.stride(0), rows.block.stride(0), slots, width


def blocks_of(rows: CommitRows) -> dict[str, int]:
    """Returns the constexpr arguments PLACES, STOPS and NUM_STOPS of `commit_row`, by name.

    PLACES is the number of columns of `rows.block`, rounded up to a power of two that is at least `_MIN_PLACES`.
    NUM_STOPS is the number of columns of `rows.stop_ids`. STOPS is NUM_STOPS, rounded up to a power of two.
    """
    stops = rows.stop_ids.shape[1]
    places = max(_MIN_PLACES, triton.next_power_of_2(rows.block.shape[1]))
    return {"PLACES": places, "STOPS": triton.next_power_of_2(stops), "NUM_STOPS": stops}
