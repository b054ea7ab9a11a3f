"""A step's results, stored where the host polls for them: no copy, no synchronization, the same from a CUDA graph.

`entries` is a ring of int64 [slots, 1 + Bmax * (5 + K)]; on CUDA it lies in pinned host memory, which the kernel
writes directly. The n-th launch (counting from 1 in `counter` int64 [1], on the device) fills slot n % slots:

    n, then for each row b: emitted, accepted, drafts that counted, finish, block[0..K]

The sequence number n is stored last, after a fence at system scope: a host that reads n there sees the entry whole.

| argument                                | shape, dtype                    | notes                                |
|-----------------------------------------|---------------------------------|--------------------------------------|
| entries, counter                        | above                           | rows from B on are left              |
| emitted, accepted, draft_counts, finish | [B] int64                       | of `rows`                            |
| block                                   | [B, K+1] int64                  | of `rows`                            |
| details                                 | [slots, Bmax, K+1, 1+2N] int32  | optional: log-probability, N ids,    |
|                                         |                                 | N log-probabilities, as bits of fp32 |
| logprobs, top_ids, top_logprobs         | [B, K+1] fp32, then [B, K+1, N] | of `rows`, contiguous, for details   |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.common.checks import check, told
from fastspec.kernels.common.launch import launch
from fastspec.sampling.verify import CommitRows

WORDS = tl.constexpr(256)  # of an entry at a time
NUM_WARPS = 8
DETAILS_BLOCK = 2048


class Details(NamedTuple):
    """Log-probabilities for a kernel: tensors here, pointers there; all None where none are published.

    Attributes:
        ring: int32 [slots, Bmax, K+1, 1+2N], where they go.
        logprobs, top_ids, top_logprobs: of the rows, as in the table above.
    """

    ring: Any
    logprobs: Any
    top_ids: Any
    top_logprobs: Any


@triton.jit
def store_entry(
    entries_ptr,
    sequence,
    emitted_ptr,
    accepted_ptr,
    counts_ptr,
    finish_ptr,
    block_ptr,
    block_stride,
    slots,
    entry_width,
    batch,
    places,  # K + 1
    drafting,
):
    """Stores all of entry `sequence` but its number, word after word: few words at a time cross to the host slowly.

    One program alone may do so. Read past L1: others may have stored what is read in this launch.
    """
    entry_ptr = entries_ptr + sequence % slots * entry_width + 1
    for first in range(0, batch * (4 + places), WORDS):
        word = first + tl.arange(0, WORDS)
        row, field = word // (4 + places), word % (4 + places)
        valid = row < batch
        at = row * block_stride + field - 4
        value = tl.load(block_ptr + at, mask=valid & (field >= 4), other=0, cache_modifier=".cg")
        value += tl.load(emitted_ptr + row, mask=valid & (field == 0), other=0, cache_modifier=".cg")
        value += tl.load(accepted_ptr + row, mask=valid & (field == 1), other=0, cache_modifier=".cg")
        counted = valid & (field == 2) & (drafting != 0)
        value += tl.load(counts_ptr + row, mask=counted, other=0, cache_modifier=".cg")
        value += tl.load(finish_ptr + row, mask=valid & (field == 3), other=0, cache_modifier=".cg")
        tl.store(entry_ptr + word, value, mask=valid)


@triton.jit
def store_sequence(entries_ptr, counter_ptr, slots, entry_width, sequence):
    """Stores the sequence number of an entry whose rest this program has stored, and counts it."""
    # the barrier hands the stores of all threads to the one that goes on; its fence, at system scope, is that of an
    # atomic on the counter, since few machines have atomics on the host's memory
    tl.debug_barrier()
    tl.atomic_xchg(counter_ptr, sequence, sem="acq_rel", scope="sys")
    tl.store(entries_ptr + sequence % slots * entry_width, sequence)


@triton.jit
def store_details(
    details_ptr,  # of the entry's slot
    logprobs_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    total,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bits of the log-probabilities of all places, `total` words in all; one program alone, as `store_entry`."""
    width: tl.constexpr = 1 + 2 * TOP
    for first in range(0, total, BLOCK):
        word = first + tl.arange(0, BLOCK)
        place, field = word // width, word % width
        valid = word < total
        ranked = valid & (field > 0) & (field <= TOP)
        beyond = valid & (field > TOP)
        own = tl.load(logprobs_ptr + place, mask=valid & (field == 0), other=0.0, cache_modifier=".cg")
        ids = tl.load(top_ids_ptr + place * TOP + field - 1, mask=ranked, other=0, cache_modifier=".cg")
        at = place * TOP + field - 1 - TOP
        others = tl.load(top_logprobs_ptr + at, mask=beyond, other=0.0, cache_modifier=".cg")
        bits = tl.where(field == 0, own, others).to(tl.int32, bitcast=True)
        tl.store(details_ptr + word, tl.where(ranked, ids.to(tl.int32), bits), mask=valid)


@triton.jit(do_not_specialize=["batch", "places", "drafting", "slots", "entry_width", "block_stride", "details_width"])
def _publish_kernel(
    entries_ptr,
    counter_ptr,
    emitted_ptr,
    accepted_ptr,
    counts_ptr,
    finish_ptr,
    block_ptr,
    details,  # Details
    block_stride,
    slots,
    entry_width,
    details_width,
    batch,
    places,
    drafting,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.load(counter_ptr) + 1
    store_entry(
        entries_ptr,
        sequence,
        emitted_ptr,
        accepted_ptr,
        counts_ptr,
        finish_ptr,
        block_ptr,
        block_stride,
        slots,
        entry_width,
        batch,
        places,
        drafting,
    )
    if details.ring is not None:
        slot_ptr = details.ring + sequence % slots * details_width
        total = batch * places * (1 + 2 * TOP)
        store_details(slot_ptr, details.logprobs, details.top_ids, details.top_logprobs, total, TOP, BLOCK)
    store_sequence(entries_ptr, counter_ptr, slots, entry_width, sequence)


def publish(
    entries: Tensor, counter: Tensor, rows: CommitRows, *, drafting: bool, details: Tensor | None = None
) -> None:
    """As `reference.publish`, which defines it.

    Raises:
        ValueError: the ring does not fit the rows, or a layout is not as above.
    """
    check_ring(entries, rows)
    batch, places = rows.block.shape
    if details is not None:
        check_recorded(rows)
        check_details(details, rows)
    recorded = (None, None, None) if details is None else (rows.logprobs, rows.top_ids, rows.top_logprobs)
    launch(
        _publish_kernel,
        (1,),
        entries,
        counter,
        rows.emitted,
        rows.accepted,
        rows.draft_counts,
        rows.finish,
        rows.block,
        Details(details, *recorded),
        rows.block.stride(0),
        entries.shape[0],
        entries.shape[1],
        0 if details is None else details.stride(0),
        batch,
        places,
        int(drafting),
        TOP=0 if details is None else rows.top_ids.shape[2],
        BLOCK=DETAILS_BLOCK,
        num_warps=NUM_WARPS,
    )


def check_ring(entries: Tensor, rows: CommitRows) -> None:
    """Raises ValueError at a ring that an entry of `rows` does not fit, or that the device cannot write to."""
    batch, places = rows.block.shape
    width, words = 4 + places, entries.shape[1]
    if not entries.is_contiguous() or (words - 1) % width or words <= batch * width:
        raise ValueError(
            f"entries is {told(entries)}; wanted contiguous [slots, 1 + B * {width}] with B >= {batch}: make the ring "
            "for all rows of the state"
        )
    _check_pinned("entries", entries, rows)


def check_recorded(rows: CommitRows) -> None:
    """Raises ValueError at log-probabilities of `rows` that would be misread."""
    batch, places, top = rows.top_ids.shape
    check("logprobs", rows.logprobs, (batch, places), torch.float32)
    check("top_ids", rows.top_ids, (batch, places, top), torch.int64)
    check("top_logprobs", rows.top_logprobs, (batch, places, top), torch.float32)


def check_details(details: Tensor, rows: CommitRows) -> None:
    """Raises ValueError at a ring of log-probabilities that does not fit `rows`, or that cannot be written to."""
    batch, places, top = rows.top_ids.shape
    fits = details.dim() == 4 and details.shape[1] >= batch and details.shape[2:] == (places, 1 + 2 * top)
    if not fits or not details.is_contiguous():
        raise ValueError(
            f"details is {told(details)}; wanted contiguous [slots, B, {places}, {1 + 2 * top}] with B >= {batch}: "
            "make the ring for all rows of the state"
        )
    _check_pinned("details", details, rows)


def _check_pinned(name: str, ring: Tensor, rows: CommitRows) -> None:
    if rows.block.is_cuda and not ring.is_cuda and not ring.is_pinned():
        raise ValueError(f"{name} is not pinned; a kernel on {rows.block.device} writes to it: allocate it pinned")
