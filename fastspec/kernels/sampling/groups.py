"""First launch of a sampled step: one read of the logits, every group's largest logit and mass.

A group of 32 ids is described relative to its own largest logit, so programs share nothing. Each takes CHUNK ids of one
row, one place after the other, while the logits of STAGES - 1 places are being read: its speed depends on how many
reads are in flight. The next launch (distribution.py) goes on from what they leave. Where log-probabilities are
recorded (logprobs.py), the raw logits are read once more, from L2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fastspec.kernels.sampling.logits import GROUP, INTS, RUNNING, level_of, penalised_at, scaled, tempered, view_of
from fastspec.kernels.sampling.logprobs import record_line

CHUNK = 2048  # ids per program
STAGES = 3  # places that are summed up or in flight, where a program has several
LAUNCH = {"num_warps": 4, "maxnreg": 80}  # six programs a multiprocessor: 96 KiB in flight
_GROUP = tl.constexpr(GROUP)


def piece_of(chunk: int) -> int:
    """Ids that a penalised row's programs take at a time."""
    return max(GROUP, chunk // 4)


@triton.jit
def _sum_up(x, tops_ptr, chunk, groups, weighs, CHUNK: tl.constexpr):
    """Stores the largest of every group of a chunk's scaled logits, and its mass if that is asked for."""
    x = tl.reshape(x, [CHUNK // _GROUP, _GROUP])
    tops = tl.max(x, axis=1)
    group = chunk * (CHUNK // _GROUP) + tl.arange(0, CHUNK // _GROUP)
    tl.store(tops_ptr + group, tops, mask=group < groups)
    if weighs:
        # a group of -inf alone weighs exp(-inf) = 0; one with +inf makes the line invalid, whatever it weighs
        masses = tl.sum(tl.exp(x - level_of(tops)[:, None]), axis=1)
        tl.store(tops_ptr + groups + group, masses, mask=group < groups)


@triton.jit
def _in_pieces(view, tops_ptr, groups, weighs, CHUNK: tl.constexpr, PIECE: tl.constexpr, STOPS: tl.constexpr):
    """A chunk of a penalised row in pieces, because penalties take registers."""
    for piece in range(0, CHUNK // PIECE):
        which = tl.program_id(0) * (CHUNK // PIECE) + piece
        x = scaled(view, which * PIECE + tl.arange(0, PIECE), STOPS)
        _sum_up(x, tops_ptr, which, groups, weighs, PIECE)


@triton.jit(do_not_specialize=[*INTS, "parts", "top", "state_places"])
def _groups_kernel(
    source,
    groups_ptr,
    recorded,  # RecordRows of logprobs.py
    places,
    first,
    parts,  # programs that share out the places of a chunk
    top,
    state_places,  # K + 1
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    # loaded together, also for rows that do not run: no load waits for another
    running = tl.load(source.finish + row) == RUNNING
    end = places
    if source.counts is not None:
        end = tl.minimum(places, tl.load(source.counts + row).to(tl.int32) + 1 - first)
    # what top-k keeps is weighed by the next launch, whatever the others weigh
    top_k = tl.load(source.top_k + row)
    weighs = (tl.load(source.temperature + row) > 0) & ((top_k <= 0) | (top_k >= source.vocab))
    biased = tl.load(source.unbiased + row) == 0
    length, least = tl.load(source.lengths + row), tl.load(source.min_lengths + row)
    view = view_of(source, row * places, row, first)
    vocab, groups = source.vocab, source.groups
    stride, width = tl.cast(source.logits_stride, tl.int64), tl.cast(groups, tl.int64) * 2
    row_ptr = groups_ptr + row * places * width
    if running & view.penalised:
        for at in range(part, end, parts):
            there = penalised_at(view, at * stride, length + first + at < least, first + at)
            _in_pieces(there, row_ptr + at * width, groups, weighs, CHUNK, PIECE, STOPS)
    elif running:
        index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        known = index < vocab
        bias = tl.load(view.bias + index, mask=known & biased, other=0.0)
        for at in tl.range(part, end, parts, num_stages=STAGES):
            x = tl.load(view.logits + at * stride + index, mask=known, other=-float("inf")) + bias
            x = tempered(view.stop_ids, length + first + at < least, view.temperature, x, index, known, STOPS)
            _sum_up(x, row_ptr + at * width, tl.program_id(0), groups, weighs, CHUNK)
    if recorded.levels is not None:  # noqa: SIM102  (what is known when it is compiled comes alone)
        if running:
            index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
            for at in range(part, end, parts):
                line_ptr = source.logits + (row * places + at) * stride
                x = tl.load(line_ptr + index, mask=index < vocab, other=-float("inf"))
                record_line(
                    *(x, recorded, line_ptr, row * places + at, row * state_places + at),
                    *(tl.program_id(0), tl.num_programs(0), vocab, top, CHUNK, GROUPS, TOP),
                )
