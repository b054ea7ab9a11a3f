"""Log-probabilities of emitted tokens and of the most probable ids, computed by the kernels that end a step.

The definition is `reference.step.record_logprobs`. A line is one logits row: the logits of one scored position of one
row of the batch.

1. The first kernel that reads the logits is in greedy_commit.py or distribution.py. For each group of 64 ids it stores
   the largest logit, and the group's mass: the sum of exp(x - largest) over its logits x.
2. The last CTA of a line to finish adds the masses and ranks ids. The n largest logits are in the n groups with the
   largest maxima. Of equal logits the lowest id comes first.
3. The CTA that commits a row reads the logits of its emitted tokens.

Sums are in fixed point, so they do not depend on chunks, on the order of CTAs, or on how a reduction is compiled. A
line has the same bits in a greedy step and in one that samples.

| argument | shape, dtype                | notes                                                                     |
|----------|-----------------------------|---------------------------------------------------------------------------|
| logits   | [B, k+1, V] fp32            | V < 2^19                                                                  |
| arrivals | [lines] int64               | zero between launches: the last CTA to finish clears it                   |
| groups   | [lines, 2, >= V / 64] fp32  | largest logit of a group, and the group's mass relative to that           |
| levels   | [lines, 2] fp32             | largest logit of a line, and log of the sum of exp(x - largest)           |
| others   | see publish.py              | `logprobs` is stored for emitted tokens only                              |

At a position whose largest logit is NaN or infinite nothing is emitted; the values recorded there have no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.reference.step import Record
from fastspec.kernels.sampling.logits import MAX_IDS, OPTIONS, key_of, level_of, value_of
from fastspec.kernels.sampling.publish import check_details, check_recorded
from fastspec.sampling.verify import CommitRows

GROUP = 64  # number of neighbouring ids whose largest logit and mass are stored
PIECE = tl.constexpr(1024)  # number of groups whose masses are added at a time
MAX_TOP = 32  # largest number of most probable ids of a logits row, and so of groups to read
NUM_WARPS = 8  # for launches that record: ranking takes registers
RECORD_INTS = ["top", "details_width"]  # for do_not_specialize: one compiled kernel serves all values
NONE = tl.constexpr(-2147483648)  # key of padding, and of ids that are already ranked
# unsigned 32-bit fixed-point numbers are multiples of NO_ID_UNIT; the mass of 64 ids is at most 64
ID_UNIT = tl.constexpr(2.0**25)
NO_ID_UNIT = tl.constexpr(2.0**-25)
# int64 fixed-point numbers are multiples of NO_GROUP_UNIT; the mass of 2^19 ids is at most 2^19
GROUP_UNIT = tl.constexpr(2.0**40)
NO_GROUP_UNIT = tl.constexpr(2.0**-40)
# not called _GROUP as in logits.py, because Triton's cache needs one value per name in a kernel
_WIDTH = tl.constexpr(GROUP)
_MAX_TOP = tl.constexpr(MAX_TOP)


@dataclass(frozen=True, slots=True)
class RecordWork:
    """Scratch memory for recording log-probabilities. The table in the module's docstring describes the tensors."""

    arrivals: Tensor
    groups: Tensor
    levels: Tensor


class RecordRows(NamedTuple):
    """Kernel argument for recording log-probabilities: the tensors of `RecordWork`, and the outputs.

    Outputs are the fields `top_ids`, `top_logprobs` and `logprobs` of the decode state, and the ring buffer `details`
    (publish.py). All fields are None if nothing is recorded.
    """

    arrivals: Any = None
    groups: Any = None
    levels: Any = None
    top_ids: Any = None
    top_logprobs: Any = None
    logprobs: Any = None
    details: Any = None


def record_work(batch: int, max_drafts: int, vocab: int, device: torch.device) -> RecordWork:
    """Allocates scratch memory for recording log-probabilities.

    Args:
        batch: largest number of batch rows.
        max_drafts: largest number of draft tokens of a row.
        vocab: size of the vocabulary.
        device: device of the model.
    """
    lines = batch * (max_drafts + 1)
    return RecordWork(
        torch.zeros(lines, dtype=torch.int64, device=device),
        torch.zeros(lines, 2, triton.cdiv(vocab, GROUP), dtype=torch.float32, device=device),
        torch.zeros(lines, 2, dtype=torch.float32, device=device),
    )


def record_work_bytes(batch: int, max_drafts: int, vocab: int) -> int:
    """Returns the bytes of device memory that `record_work` allocates for the same arguments."""
    return int(batch * (max_drafts + 1) * (8 + 8 * triton.cdiv(vocab, GROUP) + 8))


@triton.jit
def _sum_up(x, groups_ptr, chunk, groups, CHUNK: tl.constexpr):
    """Stores the largest logit and the sum of exp(x - largest) of each group of 64 logits in a chunk x [CHUNK].

    Args:
        groups_ptr: output of one logits row, fp32 [2, groups].
        chunk: index of the chunk in the logits row.
        groups: number of groups in the logits row.
    """
    x = tl.reshape(tl.where(x == x, x, float("inf")), [CHUNK // _WIDTH, _WIDTH])
    largest = tl.max(x, axis=1)
    weights = tl.exp(x - level_of(largest)[:, None])
    mass = tl.sum((weights * ID_UNIT + 0.5).to(tl.uint32), axis=1).to(tl.float32) * NO_ID_UNIT
    group = chunk * (CHUNK // _WIDTH) + tl.arange(0, CHUNK // _WIDTH)
    tl.store(groups_ptr + group, largest, mask=group < groups)
    tl.store(groups_ptr + groups + group, mass, mask=group < groups)


@triton.jit
def _weigh(groups_ptr, groups, SIZE: tl.constexpr):
    """Returns (level, log of the sum of exp(x - level)) over all logits x of a logits row.

    `level` is the largest logit, or 0 if the largest is not finite. It is computed from what `_sum_up` stored. SIZE
    groups are processed at a time.
    """
    largest = tl.full([SIZE], -float("inf"), tl.float32)
    for first in tl.range(0, groups, SIZE):
        group = first + tl.arange(0, SIZE)
        x = tl.load(groups_ptr + group, mask=group < groups, other=-float("inf"), cache_modifier=".cg")
        largest = tl.maximum(largest, x)
    level = level_of(tl.max(largest, axis=0))
    total = tl.zeros([SIZE], tl.int64)
    for first in tl.range(0, groups, SIZE):
        group = first + tl.arange(0, SIZE)
        x = tl.load(groups_ptr + group, mask=group < groups, other=-float("inf"), cache_modifier=".cg")
        mass = tl.load(groups_ptr + groups + group, mask=group < groups, other=0.0, cache_modifier=".cg")
        total += (mass * tl.exp(x - level) * GROUP_UNIT + 0.5).to(tl.int64)
    return level, tl.log(tl.sum(total, axis=0).to(tl.float32) * NO_GROUP_UNIT)


@triton.jit
def _first_groups(groups_ptr, groups, top, GROUPS: tl.constexpr):
    """Returns the indices of the `top` groups with the largest maxima, int32 [MAX_TOP], in descending order of maxima.

    Of equal maxima the lowest index comes first. Elements from `top` on are `groups`, the number of groups.
    """
    group = tl.arange(0, GROUPS)
    rank = tl.arange(0, _MAX_TOP)
    largest = tl.load(groups_ptr + group, mask=group < groups, other=0.0, cache_modifier=".cg")
    keys = tl.where(group < groups, key_of(largest + 0.0), NONE)
    first = tl.zeros([_MAX_TOP], tl.int32) + groups
    for i in range(0, top):
        best = tl.max(keys, axis=0)
        which = tl.min(tl.where((keys == best) & (keys != NONE), group, groups), axis=0)
        keys = tl.where(group == which, NONE, keys)
        first = tl.where(rank == i, which, first)
    return first


@triton.jit
def _rank(line_ptr, groups_ptr, top_ids_ptr, top_logprobs_ptr, level, log_mass, groups, vocab, top, GROUPS):
    """Stores the ids and log-probabilities of the `top` largest logits of a logits row, in descending order.

    `level` and `log_mass` are the results of `_weigh`.
    """
    group = _first_groups(groups_ptr, groups, top, GROUPS)
    index = tl.reshape(group[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :], [_MAX_TOP * _WIDTH])
    x = tl.load(line_ptr + index, mask=index < vocab, other=0.0)
    keys = tl.where(index < vocab, key_of(tl.where(x == x, x, float("inf")) + 0.0), NONE)
    for i in range(0, top):
        best = tl.max(keys, axis=0)
        first = tl.min(tl.where(keys == best, index, 0x7FFFFFFF), axis=0)
        keys = tl.where(index == first, NONE, keys)
        tl.store(top_ids_ptr + i, first.to(tl.int64))
        tl.store(top_logprobs_ptr + i, value_of(best) - level - log_mass)


@triton.jit
def record_line(
    x,  # fp32 [CHUNK], -inf beyond V
    record,  # RecordRows
    line_ptr,
    line,  # index among the lines of the launch
    place,  # index of the line among all places of the state
    chunk,
    chunks,
    vocab,
    top,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
):
    """Stores the largest logit and the mass of each group in a chunk of logits x.

    The CTA of the logits row that finishes last adds the masses, and stores the most probable ids. `top` is the number
    of these ids. TOP is the number of ids for which the decode state has memory.
    """
    line, place = line.to(tl.int64), place.to(tl.int64) * TOP
    groups = tl.cdiv(vocab, _WIDTH)
    arrivals_ptr, groups_ptr = record.arrivals + line, record.groups + line * groups * 2
    levels_ptr = record.levels + line * 2
    top_ids_ptr, top_logprobs_ptr = record.top_ids + place, record.top_logprobs + place
    _sum_up(x, groups_ptr, chunk, groups, CHUNK)
    # the atomic's release covers one thread's stores; the barrier adds those of all others
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == chunks - 1:
        tl.store(arrivals_ptr, 0)
        level, log_mass = _weigh(groups_ptr, groups, min(PIECE, GROUPS))
        tl.store(levels_ptr, level)
        tl.store(levels_ptr + 1, log_mass)
        if top > 0:
            _rank(line_ptr, groups_ptr, top_ids_ptr, top_logprobs_ptr, level, log_mass, groups, vocab, top, GROUPS)


@triton.jit
def record_block(logits_ptr, logits_stride, levels_ptr, logprobs_ptr, row, block, place, emitted, num_drafts, places):
    """Stores the log-probabilities of the first `emitted` tokens in a batch row's `block`, int64 [PLACES].

    `place` is arange(PLACES). `levels_ptr` points to `RecordWork.levels`. `places` is K + 1.
    """
    line = row * (num_drafts + 1) + place
    known = place < emitted
    x = tl.load(logits_ptr + line * logits_stride + block, mask=known, other=0.0)
    level = tl.load(levels_ptr + line * 2, mask=known, other=0.0, cache_modifier=".cg")
    log_mass = tl.load(levels_ptr + line * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
    tl.store(logprobs_ptr + row * places + place, x - level - log_mass, mask=known)


def record_rows(record: Record | None, rows: CommitRows) -> RecordRows:
    """Builds the kernel argument `recorded`. All its fields are None if `record` is None."""
    if record is None:
        return RecordRows()
    work, found = record.work, (rows.top_ids, rows.top_logprobs, rows.logprobs)
    return RecordRows(work.arrivals, work.groups, work.levels, *found, record.details)


def sizes_of(record: Record | None) -> tuple[int, int]:
    """Returns the kernel arguments `top` (number of most probable ids) and `details_width` (stride of the ring buffer).

    Both are 0 if `record` is None.
    """
    if record is None:
        return 0, 0
    return record.top, 0 if record.details is None else record.details.stride(0)


def width_of(record: Record | None, rows: CommitRows) -> int:
    """Returns the constexpr TOP, the number of most probable ids for which the decode state has memory.

    It is 0 if `record` is None.
    """
    return 0 if record is None else rows.top_ids.shape[2]


def constants_of(record: Record | None, rows: CommitRows, vocab: int) -> dict[str, Any]:
    """Returns the constexprs and launch options with which a kernel records log-probabilities.

    With these options, all kernels that record round in the same way. If `record` is None, the constexprs tell the
    kernel to record nothing.
    """
    if record is None:
        return {"GROUPS": 0, "TOP": width_of(record, rows)}
    groups = max(16, triton.next_power_of_2(triton.cdiv(vocab, GROUP)))
    return {"GROUPS": groups, "TOP": width_of(record, rows), "num_warps": NUM_WARPS, **OPTIONS}


def check_record(record: Record, rows: CommitRows, vocab: int, places: int) -> None:
    """Checks `record` and the tensors of the decode state to which log-probabilities are recorded.

    Args:
        record: log-probabilities to record.
        rows: decode state.
        vocab: number of logits of a position.
        places: k + 1.

    Raises:
        ValueError: a layout that the kernels would misread, or a buffer that is too small.
    """
    work, batch = record.work, rows.top_ids.shape[0]
    if not isinstance(work, RecordWork):
        raise ValueError(f"record.work is {work!r}; wanted one of record_work({batch}, {places - 1}, {vocab}, ...)")
    if vocab > MAX_IDS:
        raise ValueError(f"{vocab} ids are too many to record; wanted at most {MAX_IDS}: leave out log-probabilities")
    room = len(work.arrivals), work.groups.shape[2] * GROUP
    if room[0] < batch * places or room[1] < vocab:
        raise ValueError(
            f"record.work has room for (lines, ids) {room}; wanted {(batch * places, vocab)} or more: make it with "
            f"record_work({batch}, {places - 1}, {vocab}, ...)"
        )
    max_top = min(MAX_TOP, rows.top_ids.shape[2], vocab)
    if not 0 <= record.top <= max_top:
        raise ValueError(f"record.top is {record.top}; wanted 0 to {max_top}, for which the state has room")
    check_recorded(rows)
    if record.details is not None:
        check_details(record.details, rows)
