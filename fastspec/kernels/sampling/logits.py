"""Device code and sizes shared by all sampling kernels: scaled logits, their order as integers, random numbers.

Words in the sampling kernels:

- *place*: index 0 .. k of a position that a decode step scores in a batch row. Place j comes after j draft tokens
- *line*: one logits row, the logits of one place of one batch row. Line r of a launch belongs to batch row
  r // places, and its place is first + r % places
- *group*: GROUP neighbouring ids of the vocabulary, in one line
- *scaled logit*: the logit after logit processors and temperature
- *mass* of some ids: the sum of exp(x - largest) over their scaled logits x. largest is the largest x of the line
- *key*: an int32 made from an fp32 logit. Keys compare as the logits do (`key_of`)

A value that several kernels need is computed by one function here, so it has the same bits everywhere. Its roundings
are those of torch: no fused multiply-add (`OPTIONS`), and divisions round to nearest.

Functions with `noinline` stay functions in the machine code, because a kernel compiles faster in parts: Triton follows
each load through all operations of a function. Their arguments and results are scalars. They begin and end with a
barrier, because Triton's search for missing barriers does not know which shared memory a called function uses first.
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

GROUP = 32  # number of neighbouring ids whose largest logit and mass are stored
CHUNK = 4096  # number of ids per CTA
PROGRAMS = 768  # number of CTAs that fill the device; a launch with that many does not split a row's places further
MAX_IDS = 2**19 - 1  # largest vocabulary: fixed-point masses stay below 2^63
CANDIDATES = 8192  # largest number of ids near the threshold that are stored for a line
LISTED = 1024  # one CTA processes up to this number of groups with candidates alone
OPTIONS = {"enable_fp_fusion": False}
# for kernels without software pipelines: the machine code is the same, and Triton does not look for loops to pipeline
UNPIPELINED = {"num_stages": 1}

RUNNING = tl.constexpr(verify.RUNNING)
# keys, see `key_of`
KEY_LOWEST = tl.constexpr(-2139095041)  # key of -inf
KEY_OPEN = tl.constexpr(2139095041)  # larger than every key
# masses as int64 fixed-point numbers are multiples of NO_UNIT; the mass of an id is at most 1
UNIT = tl.constexpr(2.0**44)
NO_UNIT = tl.constexpr(2.0**-44)

# fields of a line's record: int32
RECORD = 16
MAX, NORMALISER, KEY, CUT, UPPER, KIND, P_DRAFT, Q_DRAFT, BEST, GUESSED, NUM_LISTED = map(tl.constexpr, range(11))
CARRIED = tl.constexpr(11)  # c of block verification (sampled_commit.py), stored by the third launch
SEARCHED, KNOWN, GREEDY, INVALID = map(tl.constexpr, range(4))  # kinds of a line; SEARCHED becomes KNOWN later
# fields of a line's counters: int64, zero between launches
COUNTERS = 8
ARRIVED, FOUND, COUNT_ABOVE, MASS_ABOVE, KEPT_ABOVE, WINNER, RESIDUAL_WINNER, RESIDUAL = map(tl.constexpr, range(8))

# for do_not_specialize: one compiled kernel serves all values of these. Integers inside a tuple cannot be listed there,
# so sizes that vary between launches are separate parameters. Those in `Source` are constant for one model and one
# state
INTS = ["places", "first", "ragged"]


@dataclass(frozen=True, slots=True)
class SampledWork:
    """Scratch memory of the sampling kernels, for up to `lines` logits rows of B batch rows.

    Attributes:
        counters: int64 [lines, COUNTERS], zero between steps.
        arrivals: int64 [B], number of CTAs of each batch row that have finished; zero between steps.
        records: int32 [lines, RECORD], the sampling distribution of each logits row (distribution.py).
        groups: fp32 [lines, 2, V / GROUP]. For each group of ids, its largest scaled logit x0, and the sum of
            exp(x - x0).
        found: int32 [lines, 2, CANDIDATES]: keys (`key_of`) of logits near the threshold, and their ids.
        listed: int32 [lines, LISTED]: indices of the groups that hold such ids.
    """

    counters: Tensor
    arrivals: Tensor
    records: Tensor
    groups: Tensor
    found: Tensor
    listed: Tensor


def sampled_work(batch: int, max_drafts: int, vocab: int, device: torch.device) -> SampledWork:
    """Allocates scratch memory of the sampling kernels.

    Args:
        batch: largest number of batch rows.
        max_drafts: largest number of draft tokens of a row.
        vocab: size of the vocabulary.
        device: device of the model.
    """
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
    """Returns the bytes of device memory that `sampled_work` allocates for the same arguments."""
    line = 8 * COUNTERS + 4 * RECORD + 8 * triton.cdiv(vocab, GROUP) + 8 * CANDIDATES + 4 * LISTED
    return int(batch * (max_drafts + 1) * line + 8 * batch)


def parts_of(batch: int, places: int, programs: int) -> int:
    """Returns the number of parts into which a launch splits the `places` scored positions of each batch row.

    Each part has `programs` CTAs of its own, which process its positions one after the other. There are only as many
    parts as fill the device, because a CTA with several positions of a row finds their common data in L1.
    """
    return min(places, int(triton.cdiv(PROGRAMS, batch * programs)))


class Source(NamedTuple):
    """Kernel argument: logits of B batch rows, and all tensors that logit processors and sampling options read.

    Tables are [B, ...] with a stride between rows; the other tensors are [B]. The sizes are constant for one model and
    one decode state, so Triton may compile for their alignment.

    Attributes:
        logits: fp32 [B, R, V], logits of R scored positions, which are `logits_stride` elements apart.
        counts: int64 [B], number of valid draft tokens.
        groups: number of groups of GROUP ids in the vocabulary.
        bias to unbiased: fields of `fastspec.state.DecodeState` with these names.
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


SOURCE = Source._fields[1 : Source._fields.index("unbiased")]  # fields of which `check_source` checks the layout


class View(NamedTuple):
    """Values in a kernel that `scaled` needs for one logits row.

    These are pointers to the logits and to the batch row's tables, and the values of the row's sampling options.
    `penalised` is True if the row has penalties. `early` is True if stop ids are not allowed at this position yet.
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
    penalised: Any
    early: Any
    temperature: Any
    place: Any
    vocab: Any


_View = tl.constexpr(View)


def source_of(logits: Tensor, rows: Any) -> Source:
    """Makes the kernel argument `Source` from logits fp32 [B, R, V] and the decode state of the B batch rows."""
    does, sampler = rows.processors, rows.sampler
    vocab = logits.shape[2]
    return Source(
        *(logits, does.bias, does.in_prompt, does.output_counts, rows.draft_tokens, does.stop_ids),
        *(does.repetition, does.presence, does.frequency, does.min_lengths, rows.lengths),
        *(sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p),
        *(rows.finish, rows.seeds, rows.unbiased, rows.draft_counts),
        *(vocab, triton.cdiv(vocab, GROUP), logits.stride(0 if logits.shape[1] == 1 else 1)),
        *(does.bias.stride(0), does.in_prompt.stride(0), does.output_counts.stride(0)),
        *(rows.draft_tokens.stride(0), does.stop_ids.stride(0)),
    )


def check_source(logits: Tensor, rows: Any, work: SampledWork) -> None:
    """Checks the logits, the decode state and the scratch memory, before the sampling kernels read them.

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


def draft_probs_of(rows: Any) -> Tensor | None:
    """Returns the buffer for distributions from which draft tokens are drawn, [B, K, V]. None: the state has none.

    All launches of a generator get it, also those that do not read it, so that they run the same compiled kernel.
    """
    probs: Tensor = rows.draft_probs
    return probs if probs.numel() else None


def strides_of(probs: Tensor | None) -> tuple[int, int]:
    """Returns the strides of `draft_probs_of` between batch rows and between places, 0 if it is None."""
    return (0, 0) if probs is None else (probs.stride(0), probs.stride(1))


def check_draft_probs(probs: Tensor | None, vocab: int) -> None:
    """Checks the distributions from which draft tokens were drawn, [B, K, V] or [B, V].

    Raises:
        ValueError: they have fewer than `vocab` ids, or are not contiguous over ids.
    """
    if probs is not None and (probs.stride(-1) != 1 or probs.shape[-1] < vocab):
        raise ValueError(
            f"draft_probs is {told(probs)}; wanted {vocab} ids or more, contiguous over them: allocate the state so"
        )


@triton.jit
def key_of(x):
    """Converts fp32 x to its key, an int32. Keys compare as the values x do. x has no NaN and no -0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Inverts `key_of`: converts a key to its fp32 value."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def level_of(largest):
    """Returns the number to subtract from logits before exp: the largest logit, or 0 if the largest is not finite.

    So an infinite logit never gives NaN.
    """
    return tl.where((largest > -float("inf")) & (largest < float("inf")), largest, 0.0)


@triton.jit
def view_of(source, line, row, place):
    """Loads the `View` of one logits row.

    Args:
        source: `Source`.
        line: index of the logits row in the launch.
        row: index of its batch row.
        place: number of draft tokens before its position.
    """
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
    """Returns the `View` of another scored position of the same batch row. The row has penalties.

    Args:
        view: `View` of a position of the row.
        offset: distance between the logits of both positions, in elements.
        early, place: fields of the new `View`.
    """
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
    """Returns the scaled logits of ids `index` int32, in fp32. They are scaled by logit processors and temperature.

    `view` is the `View` of the logits row. A NaN becomes +inf. Ids outside 0..V-1 get -inf.
    """
    known = (index >= 0) & (index < view.vocab)
    x = tl.load(view.logits + index, mask=known, other=-float("inf"))
    return processed(view, x + tl.load(view.bias + index, mask=known, other=0.0), index, known, NUM_STOPS)


@triton.jit
def processed(view, x, index, known, NUM_STOPS: tl.constexpr):
    """Computes the scaled logits of ids `index` from logits x, to which logit biases are already added.

    `known` is False for ids outside the vocabulary.
    """
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
    """Applies the last steps of `scaled` to logits x of ids `index`: stop ids, temperature, NaN.

    x already contains biases and penalties. If `early` is True, the NUM_STOPS ids at `stop_ptr` get -inf. `known` is
    False for ids outside the vocabulary.
    """
    if early:
        for stop in range(0, NUM_STOPS):
            x = tl.where(index == tl.load(stop_ptr + stop).to(tl.int32), -float("inf"), x)
    if temperature != 1.0:
        x = tl.div_rn(x, temperature + tl.zeros_like(x))
    # adding zero turns -0 into +0, so that equal values have equal keys
    return tl.where(known, tl.where(x == x, x, float("inf")) + 0.0, -float("inf"))


@triton.jit
def _unit(high, low):
    """Converts 64 random bits, given as two uint32 words, to fp32 in (0, 1), as `distribution._unit`."""
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
    """Returns a random time, fp32 with distribution Exponential(1), for each of the ids start..start+SIZE-1.

    The times [SIZE] are those of `distribution.exponentials`. They depend on seed, position, PURPOSE and id. `start`
    and SIZE are even.
    """
    pair = start // 2 + tl.arange(0, SIZE // 2)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros_like(pair).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, pair.to(tl.uint32), zeros + low, zeros + PURPOSE, zeros + high)
    return tl.reshape(tl.join(_exponential(_unit(w0, w1)), _exponential(_unit(w2, w3))), [SIZE])


@triton.jit
def times_of(seed, position, PURPOSE: tl.constexpr, index):
    """Returns the random Exponential(1) times of ids `index` int32, the same as `times` for these ids."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros_like(index).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, (index // 2).to(tl.uint32), zeros + low, zeros + PURPOSE, zeros + high)
    odd = index % 2 == 1
    return _exponential(_unit(tl.where(odd, w2, w0), tl.where(odd, w3, w1)))


@triton.jit
def uniform(seed, position, PURPOSE: tl.constexpr):
    """Returns uniform random numbers in (0, 1), fp32 [N], as `distribution.uniforms`.

    They depend on seed, position int64 [N] and PURPOSE.
    """
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros_like(low)
    w0, w1, _w2, _w3 = tl.philox(seed, zeros, low, zeros + PURPOSE, high)
    return _unit(w0, w1)


@triton.jit
def winner(weights, time, index):
    """Samples one of the ids `index` with probabilities proportional to `weights`.

    It selects the id with the largest weight / time.
    `time` has the ids' random Exponential(1) times. Returns an int64 that contains the id. These results compare as
    (weight / time, -id), so that an atomic maximum merges the results of CTAs. The result is 0 if no weight is
    positive.
    """
    speed = tl.where(weights > 0, weights / time, -1.0)
    best = tl.max(speed, axis=0)
    first = tl.min(tl.where(speed == best, index, 0x7FFFFFFF), axis=0)
    bits = best.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(best >= 0, ((bits << 31) | (0x7FFFFFFF - first)) + 1, 0)


@triton.jit
def winning_id(packed):
    """Returns the id that `packed`, a result of `winner`, contains."""
    return 0x7FFFFFFF - ((packed - 1) & 0x7FFFFFFF)


@triton.jit
def kept(key, index, e, threshold, cut, min_p):
    """Returns True for the ids that top-k, top-p and min-p keep.

    An id is kept if its key is above the threshold, or if its key equals the threshold and the id is at most `cut`. Its
    probability must also be at least min_p times the largest probability.

    Args:
        key: keys (`key_of`) of the scaled logits.
        index: ids.
        e: exp(x - largest) of each id, x its scaled logit.
        threshold: key of the lowest logit that top-k and top-p keep.
        cut: last id that is kept among the ids with this key.
        min_p: smallest probability that is kept, relative to the largest.
    """
    return ((key > threshold) | ((key == threshold) & (index <= cut))) & (key > KEY_LOWEST) & (e >= min_p)
