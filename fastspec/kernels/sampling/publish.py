"""Publishes a step's results to a ring that the host polls, without a copy or a synchronisation.

`entries` is a ring of int64 [slots, 1 + Bmax * (5 + K)]. On CUDA it is in pinned host memory, to which the kernel
writes directly, also in a CUDA graph. Launch n (from 1, counted in `counter` int64 [1] on the device) fills slot
n % slots with one entry:

    n, then for each row b: number of emitted tokens, of accepted drafts, of valid drafts, finish state, block[0..K]

The sequence number n is stored last, after a fence at system scope. A host that reads n there sees the whole entry.

| argument                                | shape, dtype                    | notes                                |
|-----------------------------------------|---------------------------------|--------------------------------------|
| entries, counter                        | above                           | rows from B on are unchanged         |
| emitted, accepted, draft_counts, finish | [B] int64                       | fields of `rows`                     |
| block                                   | [B, K+1] int64                  | field of `rows`                      |
| details                                 | [slots, Bmax, K+1, 1+2N] int32  | or None. For each token of the block |
|                                         |                                 | its log-probability, the N most      |
|                                         |                                 | probable ids, and their N            |
|                                         |                                 | log-probabilities, as bits of fp32   |
| logprobs, top_ids, top_logprobs         | [B, K+1] fp32, then [B, K+1, N] | fields of `rows`, contiguous         |
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

WORDS = tl.constexpr(256)  # elements of an entry that are stored at a time
NUM_WARPS = 8
DETAILS_BLOCK = 2048


class Details(NamedTuple):
    """Kernel argument: log-probabilities to publish. All fields are None if no log-probabilities are published.

    Attributes:
        ring: int32 [slots, Bmax, K+1, 1+2N], ring buffer to which they are written.
        logprobs, top_ids, top_logprobs: fields of the decode state, see the table in the module's docstring.
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
    """Stores the results of all rows to the ring buffer's entry for step `sequence`, except the sequence number.

    Elements are stored in the order of their addresses, because scattered stores reach the host's memory slowly. Only
    one CTA may call it. Its loads bypass L1, because other CTAs may have stored the values in this launch.
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
    """Stores the sequence number of a ring buffer entry, which tells the host that the entry is complete.

    It also sets the counter of published steps to this number.

    The CTA that calls it has stored all other elements of the entry.
    """
    # the barrier makes all threads' stores visible to one thread. The fence at system scope comes from an
    # atomic on the counter, because few machines support atomics on host memory
    tl.debug_barrier()
    tl.atomic_xchg(counter_ptr, sequence, sem="acq_rel", scope="sys")
    tl.store(entries_ptr + sequence % slots * entry_width, sequence)


@triton.jit
def store_details(
    details_ptr,  # details of the entry's slot
    logprobs_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    total,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the log-probabilities and most probable ids of all tokens to a slot of the ring buffer `details`.

    `total` is the number of int32 elements to store. TOP is N, the number of most probable ids. Only one CTA may call
    it.
    """
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
    """Publishes the results of a step to the ring `entries`, as `reference.publish`, in one launch of one CTA.

    Raises:
        ValueError: the ring does not fit the rows, or a layout other than in the table above.
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
    """Checks the ring buffer to which results are published.

    Raises:
        ValueError: an entry has no room for the results of `rows`, or the device cannot write to the ring.
    """
    batch, places = rows.block.shape
    width, words = 4 + places, entries.shape[1]
    if not entries.is_contiguous() or (words - 1) % width or words <= batch * width:
        raise ValueError(
            f"entries is {told(entries)}; wanted contiguous [slots, 1 + B * {width}] with B >= {batch}: make the ring "
            "for all rows of the state"
        )
    _check_pinned("entries", entries, rows)


def check_recorded(rows: CommitRows) -> None:
    """Checks the tensors of log-probabilities in the decode state.

    Raises:
        ValueError: a shape, dtype or layout that the kernel would misread.
    """
    batch, places, top = rows.top_ids.shape
    check("logprobs", rows.logprobs, (batch, places), torch.float32)
    check("top_ids", rows.top_ids, (batch, places, top), torch.int64)
    check("top_logprobs", rows.top_logprobs, (batch, places, top), torch.float32)


def check_details(details: Tensor, rows: CommitRows) -> None:
    """Checks the ring buffer of log-probabilities, the argument `details` of `publish`.

    Raises:
        ValueError: the ring does not fit `rows`, or the device cannot write to it.
    """
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
