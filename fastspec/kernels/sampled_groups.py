"""First launch of a sampled step: one read of the logits, every group's largest logit and mass.

Relative to its own largest logit a group of 32 ids needs nothing of the others, so programs share nothing: each takes
CHUNK ids of one row, at one place after the other. The next launch (sampled_laws.py) makes laws of what they leave.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.sampled_parts import GROUP, INTS, RUNNING, scaled, view_of

LAUNCH = {"num_warps": 8, "maxnreg": 80}  # three programs a multiprocessor: enough loads in flight
_GROUP = tl.constexpr(GROUP)


def piece_of(chunk: int) -> int:
    """Ids that a penalised row's programs take at a time."""
    return max(GROUP, chunk // 4)


@triton.jit
def _sum_up(view, tops_ptr, chunk, groups, weighs, CHUNK: tl.constexpr, STOPS: tl.constexpr):
    """Stores the largest logit of every group of a chunk, and its mass if that is asked for."""
    x = tl.reshape(scaled(view, chunk * CHUNK + tl.arange(0, CHUNK), STOPS), [CHUNK // _GROUP, _GROUP])
    tops = tl.max(x, axis=1)
    group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
    tl.store(tops_ptr + group, tops, mask=group < groups)
    if weighs:
        # a group of -inf alone weighs exp(-inf) = 0; one with +inf makes the line broken, whatever it weighs
        level = tl.where((tops > -float("inf")) & (tops < float("inf")), tops, 0.0)
        masses = tl.sum(tl.exp(x - level[:, None]), axis=1)
        tl.store(tops_ptr + groups + group, masses, mask=group < groups)


@triton.jit
def _at(view, offset, penalised, early, place):
    """The view of another place of the same row."""
    return (
        view[0] + offset,
        view[1],
        view[2],
        view[3],
        view[4],
        view[5],
        view[6],
        view[7],
        view[8],
        penalised,
        early,
        view[11],
        place,
        view[13],
    )


@triton.jit(do_not_specialize=[*INTS, "parts"])
def _groups_kernel(
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
    counts_ptr,  # None: every place of a row is judged
    finish_ptr,
    groups_ptr,
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
    parts,  # programs that share out the places of a chunk
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    end = places
    if counts_ptr is not None:
        end = tl.minimum(places, tl.load(counts_ptr + row).to(tl.int32) + 1 - first)
    if tl.load(finish_ptr + row) == RUNNING:
        weighs = tl.load(temperature_ptr + row) > 0
        length, least = tl.load(lengths_ptr + row), tl.load(min_lengths_ptr + row)
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
            row * places,
            row,
            first,
            vocab,
        )
        for at in range(part, end, parts):
            offset, early = at * tl.cast(logits_stride, tl.int64), length + first + at < least
            tops_ptr = groups_ptr + (row * places + at).to(tl.int64) * groups * 2
            if view[9]:
                # in pieces, for penalties take registers
                there = _at(view, offset, True, early, first + at)
                for piece in range(0, CHUNK // PIECE):
                    which = tl.program_id(0) * (CHUNK // PIECE) + piece
                    _sum_up(there, tops_ptr, which, groups, weighs, PIECE, STOPS)
            else:
                there = _at(view, offset, False, early, first + at)
                _sum_up(there, tops_ptr, tl.program_id(0), groups, weighs, CHUNK, STOPS)
