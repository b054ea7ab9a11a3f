"""Device code and sizes shared by all kernels of a sampled step: scaled logits, their integer order, random numbers.

A *place* is one of the k + 1 positions that a step scores in a row. A *line* is one place of one row. Line r of a
launch belongs to row r // places, and its place is first + r % places. A *group* is GROUP neighbouring ids of a line.
The *mass* of ids is the sum of exp(x - largest) over their scaled logits x.

A value that several kernels need is computed by one function here, so it has the same bits everywhere. Its roundings
are those of torch: no fused multiply-add (`OPTIONS`), and divisions round to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.common.checks import check_logits, told
from fastspec.sampling import verify

GROUP = 32  # neighbouring ids whose largest logit and mass are stored
CHUNK = 4096  # ids per CTA
PROGRAMS = 768  # number of CTAs of a launch that fill the device; with as many, places of a row are not split further
MAX_IDS = 2**19 - 1  # largest vocabulary: fixed-point masses stay below 2^63
CANDIDATES = 8192  # ids near the threshold that can be stored for a line
LISTED = 1024  # number of groups with candidates up to which one CTA processes them alone
OPTIONS = {"enable_fp_fusion": False}

RUNNING = tl.constexpr(verify.RUNNING)
# int32 keys that compare as the fp32 values do
KEY_LOWEST = tl.constexpr(-2139095041)  # -inf
KEY_OPEN = tl.constexpr(2139095041)  # larger than the key of every value
# fixed-point unit: the mass of an id is at most 1
UNIT = tl.constexpr(2.0**44)
NO_UNIT = tl.constexpr(2.0**-44)

# fields of a line's record: int32
RECORD = 16
MAX, NORMALISER, KEY, CUT, UPPER, KIND, P_DRAFT, Q_DRAFT, BEST, GUESSED, NUM_LISTED = map(tl.constexpr, range(11))
SEARCHED, KNOWN, GREEDY, INVALID = map(tl.constexpr, range(4))  # kinds of a line; SEARCHED becomes KNOWN later
# fields of a line's counters: int64, zero between launches
COUNTERS = 8
ARRIVED, FOUND, COUNT_ABOVE, MASS_ABOVE, KEPT_ABOVE, WINNER, RESIDUAL_WINNER, RESIDUAL = map(tl.constexpr, range(8))

# for do_not_specialize: one compiled kernel serves all values of these. Integers inside a tuple cannot be listed there,
# so sizes that vary between launches are separate parameters. Those in `Source` are constant for one model and one
# state
INTS = ["places", "first"]


@dataclass(frozen=True, slots=True)
class SampledWork:
    """Work area of the kernels of a sampled step.

    Attributes:
        counters: int64 [lines, COUNTERS], zero between steps.
        arrivals: int64 [B], number of a row's finished CTAs; zero between steps.
        records: int32 [lines, RECORD], the distribution of each line.
        groups: fp32 [lines, 2, V / GROUP]: largest scaled logit of a group, and its mass relative to that.
        found: int32 [lines, 2, CANDIDATES]: keys and ids near the threshold.
        listed: int32 [lines, LISTED]: groups that hold such ids.
    """

    counters: Tensor
    arrivals: Tensor
    records: Tensor
    groups: Tensor
    found: Tensor
    listed: Tensor


def sampled_work(batch: int, max_drafts: int, vocab: int, device: torch.device) -> SampledWork:
    """Allocates the work area for up to `batch` rows, `max_drafts` drafts and `vocab` ids."""
    lines = batch * (max_drafts + 1)
    return SampledWork(
        torch.zeros(lines, COUNTERS, dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
        torch.zeros(lines, RECORD, dtype=torch.int32, device=device),
        torch.zeros(lines, 2, triton.cdiv(vocab, GROUP), dtype=torch.float32, device=device),
        torch.zeros(lines, 2, CANDIDATES, dtype=torch.int32, device=device),
        torch.zeros(lines, LISTED, dtype=torch.int32, device=device),
    )


def sampled_work_bytes(batch: int, max_drafts: int, vocab: int) -> int:
    """Returns the bytes of `sampled_work`."""
    line = 8 * COUNTERS + 4 * RECORD + 8 * triton.cdiv(vocab, GROUP) + 8 * CANDIDATES + 4 * LISTED
    return int(batch * (max_drafts + 1) * line + 8 * batch)


def parts_of(batch: int, places: int, programs: int) -> int:
    """Returns the number of parts into which the places of a row are split. Each part has `programs` CTAs of its own.

    More parts than fill the device would not help: a CTA that processes several places of a row finds their common data
    in L1.
    """
    return min(places, int(triton.cdiv(PROGRAMS, batch * programs)))


class Source(NamedTuple):
    """Inputs of the kernels of a sampled step: logits of B rows, and everything that `processors.process` reads.

    Tables are [B, ...] with a stride between rows; the other tensors are [B]. The sizes are constant for one model and
    one state, so Triton may compile for their alignment.

    Attributes:
        logits: fp32 [B, R, V], places at `logits_stride`.
        counts: int64 [B], number of valid drafts; None: every place of a row is needed.
        groups: number of groups of GROUP ids.
        bias to finish: fields of `fastspec.state.DecodeState`.
    """

    logits: Any
    bias: Any
    in_prompt: Any
    output_counts: Any
    draft_tokens: Any
    stop_ids: Any
    repetition: Any
    presence: Any
    frequency: Any
    min_lengths: Any
    lengths: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    finish: Any
    seeds: Any
    unbiased: Any
    counts: Any
    vocab: int
    groups: int
    logits_stride: int
    bias_stride: int
    prompt_stride: int
    output_stride: int
    drafts_stride: int
    stop_stride: int


SOURCE = Source._fields[1 : Source._fields.index("unbiased")]  # fields that must have B rows


class View(NamedTuple):
    """Inputs of `scaled` for one line: pointers to its tables, and the values of its row."""

    logits: Any
    bias: Any
    in_prompt: Any
    output_counts: Any
    draft_tokens: Any
    stop_ids: Any
    repetition: Any
    presence: Any
    frequency: Any
    penalised: Any
    early: Any
    temperature: Any
    place: Any
    vocab: Any


_View = tl.constexpr(View)


def source_of(logits: Tensor, rows: Any, *, ragged: bool = True) -> Source:
    """Makes a `Source` for logits [B, R, V]. If not `ragged`, places after the valid drafts are processed, too."""
    does, sampler = rows.processors, rows.sampler
    vocab = logits.shape[2]
    return Source(
        *(logits, does.bias, does.in_prompt, does.output_counts, rows.draft_tokens, does.stop_ids),
        *(does.repetition, does.presence, does.frequency, does.min_lengths, rows.lengths),
        *(sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p),
        *(rows.finish, rows.seeds, rows.unbiased, rows.draft_counts if ragged else None),
        *(vocab, triton.cdiv(vocab, GROUP), logits.stride(0 if logits.shape[1] == 1 else 1)),
        *(does.bias.stride(0), does.in_prompt.stride(0), does.output_counts.stride(0)),
        *(rows.draft_tokens.stride(0), does.stop_ids.stride(0)),
    )


def check_source(logits: Tensor, rows: Any, work: SampledWork) -> None:
    """Checks the arguments of the kernels.

    Raises:
        ValueError: a layout that the kernels would misread, or a buffer that is too small.
    """
    check_logits(logits)
    batch, places, vocab = logits.shape
    if min(batch, places) > 1 and logits.stride(0) != places * logits.stride(1):
        raise ValueError(f"logits is {told(logits)}; wanted its places at one stride: pass logits.contiguous()")
    if vocab > MAX_IDS:
        raise ValueError(f"logits is {told(logits)}; wanted at most {MAX_IDS} ids: `reference` has this op for more")
    room = len(work.arrivals), len(work.records), work.groups.shape[2] * GROUP
    if room[0] < batch or room[1] < batch * places or room[2] < vocab:
        raise ValueError(
            f"the work area is too small: it has (rows, lines, ids) {room}; wanted {(batch, batch * places, vocab)} or "
            f"more: make it with sampled_work({batch}, {places - 1}, {vocab}, ...)"
        )
    source = source_of(logits, rows)._asdict()
    for name, field in {**{name: source[name] for name in SOURCE}, "draft_counts": rows.draft_counts}.items():
        if field.numel() and (field.stride(-1) != 1 or len(field) != batch):
            raise ValueError(
                f"{name} is {told(field)}; wanted {batch} rows, contiguous over the last axis: pass a state's own"
            )
    if rows.processors.bias.shape[1] < vocab:
        raise ValueError(
            f"the state has room for {rows.processors.bias.shape[1]} ids, the logits have {vocab}: allocate it "
            "for as many"
        )


def check_draft_probs(probs: Tensor | None, vocab: int) -> None:
    """Checks probabilities of drafts, [B, K, V] or [B, V].

    Raises:
        ValueError: they have fewer ids than the logits, or are not contiguous over ids.
    """
    if probs is not None and (probs.stride(-1) != 1 or probs.shape[-1] < vocab):
        raise ValueError(
            f"draft_probs is {told(probs)}; wanted {vocab} ids or more, contiguous over them: allocate the state so"
        )


@triton.jit
def key_of(x):
    """Converts fp32 x to an int32 that compares as x does; x has no NaN and no -0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Inverts `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def level_of(largest):
    """Returns `largest`, or 0 if it is not finite. Masses are relative to it, so an infinity never gives NaN."""
    return tl.where((largest > -float("inf")) & (largest < float("inf")), largest, 0.0)


@triton.jit
def view_of(source, line, row, place):
    """Loads the `View` of a line."""
    row = row.to(tl.int64)
    repetition = tl.load(source.repetition + row)
    presence = tl.load(source.presence + row)
    frequency = tl.load(source.frequency + row)
    penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    early = tl.load(source.lengths + row) + place < tl.load(source.min_lengths + row)
    temperature = tl.load(source.temperature + row)
    return _View(
        source.logits + line.to(tl.int64) * source.logits_stride,
        source.bias + row * source.bias_stride,
        source.in_prompt + row * source.prompt_stride,
        source.output_counts + row * source.output_stride,
        source.draft_tokens + row * source.drafts_stride,
        source.stop_ids + row * source.stop_stride,
        repetition,
        presence,
        frequency,
        penalised,
        early,
        tl.where(temperature > 0, temperature, 1.0),
        place,
        source.vocab,
    )


@triton.jit
def penalised_at(view, offset, early, place):
    """Returns the view of another place of the same row, for a row with penalties."""
    return _View(
        view.logits + offset,
        view.bias,
        view.in_prompt,
        view.output_counts,
        view.draft_tokens,
        view.stop_ids,
        view.repetition,
        view.presence,
        view.frequency,
        True,
        early,
        view.temperature,
        place,
        view.vocab,
    )


@triton.jit
def scaled(view, index, NUM_STOPS: tl.constexpr):
    """Computes `processors.process`, divided by the temperature, at ids `index` int32.

    A NaN becomes +inf; ids from V on get -inf.
    """
    known = (index >= 0) & (index < view.vocab)
    x = tl.load(view.logits + index, mask=known, other=-float("inf"))
    return processed(view, x + tl.load(view.bias + index, mask=known, other=0.0), index, known, NUM_STOPS)


@triton.jit
def processed(view, x, index, known, NUM_STOPS: tl.constexpr):
    """Computes `scaled` from logits x that have their biases."""
    prompt_ptr, output_ptr, drafts_ptr, place = view.in_prompt, view.output_counts, view.draft_tokens, view.place
    if view.penalised:
        repetition, presence, frequency = view.repetition, view.presence, view.frequency
        count = tl.load(output_ptr + index, mask=known, other=0)
        for j in range(0, place):
            count += (index == tl.load(drafts_ptr + j).to(tl.int32)).to(tl.int32)
        seen = (tl.load(prompt_ptr + index, mask=known, other=0) != 0) | (count > 0)
        punished = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition + tl.zeros_like(x)))
        x = tl.where(seen, punished, x)
        x = x - frequency * count.to(tl.float32)
        x = x - tl.where(count > 0, presence, 0.0)
    return tempered(view.stop_ids, view.early, view.temperature, x, index, known, NUM_STOPS)


@triton.jit
def tempered(stop_ptr, early, temperature, x, index, known, NUM_STOPS: tl.constexpr):
    """Completes `scaled` for logits x with biases and penalties: stop ids, temperature, NaN."""
    if early:
        for stop in range(0, NUM_STOPS):
            x = tl.where(index == tl.load(stop_ptr + stop).to(tl.int32), -float("inf"), x)
    if temperature != 1.0:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
    # adding zero turns -0 into +0, so that equal values have equal keys
    return tl.where(known, tl.where(x == x, x, float("inf")) + 0.0, -float("inf"))


@triton.jit
def _unit(high, low):
    """Converts uint32 words as `distribution._unit` does."""
    value = high.to(tl.float32) * 2.3283064365386963e-10 + (low.to(tl.float32) + 0.5) * 5.421010862427522e-20
    return tl.minimum(value, 0.999999940395355224609375)


@triton.jit
def _exponential(u):
    """Computes -log1p(-u) for u in (0, 1) to a few ulp. The compiler's fast logarithm is less exact near 1."""
    rest = 1.0 - u
    bits = rest.to(tl.int32, bitcast=True)
    # rest = 2^power * fraction with fraction in [sqrt(1/2), sqrt(2))
    power = (bits - 0x3F3504F3) >> 23
    fraction = (bits - (power << 23)).to(tl.float32, bitcast=True)
    over = tl.where(power == 0, -u, fraction - 1.0)  # for a small u, 1 - u has lost bits that u still has
    s = tl.div_rn(over, 2.0 + over)
    z = s * s
    series = 0.15384615384615385 * z + 0.18181818181818182
    series = series * z + 0.2222222222222222
    series = series * z + 0.2857142857142857
    series = series * z + 0.4
    series = series * z + 0.6666666666666666
    series = series * z * s + 2.0 * s
    return -(power.to(tl.float32) * 0.6931471805599453 + series)


@triton.jit
def times(seed, position, PURPOSE: tl.constexpr, start, SIZE: tl.constexpr):
    """Computes `distribution.exponentials` fp32 [SIZE] of the ids start..start+SIZE-1; start and SIZE are even."""
    pair = start // 2 + tl.arange(0, SIZE // 2)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros_like(pair).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, pair.to(tl.uint32), zeros + low, zeros + PURPOSE, zeros + high)
    return tl.reshape(tl.join(_exponential(_unit(w0, w1)), _exponential(_unit(w2, w3))), [SIZE])


@triton.jit
def times_of(seed, position, PURPOSE: tl.constexpr, index):
    """Computes `times` of the ids at index int32."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros_like(index).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, (index // 2).to(tl.uint32), zeros + low, zeros + PURPOSE, zeros + high)
    odd = index % 2 == 1
    return _exponential(_unit(tl.where(odd, w2, w0), tl.where(odd, w3, w1)))


@triton.jit
def uniform(seed, position, PURPOSE: tl.constexpr):
    """Computes `distribution.uniforms` at position int64 [N]."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros_like(low)
    w0, w1, _w2, _w3 = tl.philox(seed, zeros, low, zeros + PURPOSE, high)
    return _unit(w0, w1)


@triton.jit
def winner(weights, time, index):
    """Packs the sampled id into an int64 that compares as (weight / time, -index). 0 if no weight is positive."""
    speed = tl.where(weights > 0, weights / time, -1.0)
    best = tl.max(speed, axis=0)
    first = tl.min(tl.where(speed == best, index, 0x7FFFFFFF), axis=0)
    bits = best.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(best >= 0, ((bits << 31) | (0x7FFFFFFF - first)) + 1, 0)


@triton.jit
def winning_id(packed):
    """Unpacks the id from an integer of `winner`."""
    return 0x7FFFFFFF - ((packed - 1) & 0x7FFFFFFF)


@triton.jit
def kept(key, index, e, threshold, cut, min_p):
    """Marks the ids that top-k, top-p and min-p keep.

    An id is kept if its key is above the threshold, or if it is equal and the id is at most `cut`. Its mass must also
    be at least min_p of the largest mass.
    """
    return ((key > threshold) | ((key == threshold) & (index <= cut))) & (key > KEY_LOWEST) & (e >= min_p)
