"""DecodeState: all static device buffers of decode steps, allocated once. A row is a batch slot.

Contents change, addresses do not. K/V of rejected draft tokens are never zeroed or copied. They are at positions that
attention masks, because a row's `lengths` entry says how many tokens it has.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from fastspec.grammar.row import words_of
from fastspec.sampling import verify
from fastspec.sampling.distribution import SamplerRows
from fastspec.sampling.processors import ProcessorRows

# values of DecodeState.finish: those that a commit writes, and those of rows that do not run
RUNNING, STOPPED, AT_LIMIT, IDLE = verify.RUNNING, verify.STOPPED, verify.AT_LIMIT, 3
PAUSED = 4  # a row with a grammar, until the host has sent the masks of its next step
PREFILLED = 5  # a row whose first token comes from its last prefill pass, until `first_token_step`
MAX_STOP_IDS = 64
OWN = "row"
MAX_TOP_LOGPROBS = 20
# names of fields, computed here because a traced step cannot ask a class for its fields
_SAMPLER = tuple(each.name for each in fields(SamplerRows))
_PROCESSORS = tuple(each.name for each in fields(ProcessorRows))


@dataclass(frozen=True, slots=True, eq=False)
class Outbox:
    """Buffers in which decode steps leave results for the host. See `kernels/sampling/publish.py` for layouts.

    Attributes:
        entries: int64 [slots, width], in host memory.
        details: int32 [slots, B, K+1, 1+2N], in host memory. Holds log-probabilities, if they are recorded.
        counter: int64 [1] on the device, number of completed steps.
    """

    entries: Tensor
    details: Tensor
    counter: Tensor


@dataclass(frozen=True, slots=True)
class Buffer:
    """Describes one field of `DecodeState`: shape, dtype and use.

    Attributes:
        shape: letters of `StateSizes.letters`, separated by spaces. "K+1" is one more than K.
        dtype: dtype of the elements.
        fill: initial value in every row. A letter stands for its size, OWN for the row's index.
        written_by: parts of the package that write to the field.
        meaning: description in one line.
        reset: True if `DecodeState.reset` sets the field to `fill` again. The other fields are written when a request
            is admitted, before they are read.
        prefill: True if prefill passes read the field. `PrefillSlot` copies such fields.
    """

    shape: str
    dtype: torch.dtype
    fill: float | str
    written_by: str
    meaning: str
    reset: bool = False
    prefill: bool = False

    def sizes(self, letters: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the tensor's shape as numbers. `letters` maps each letter to a size, see `StateSizes.letters`."""
        axes = (axis.partition("+") for axis in self.shape.split())
        return tuple(letters[letter] + int(more or 0) for letter, _, more in axes)

    def fill_value(self, letters: Mapping[str, int]) -> float:
        """Returns the initial value of all elements as a number. 0 for OWN. For `letters` see `sizes`."""
        return letters.get(self.fill, 0) if isinstance(self.fill, str) else self.fill

    def nbytes(self, letters: Mapping[str, int]) -> int:
        """Returns the number of bytes of the tensor. For `letters` see `sizes`."""
        return math.prod(self.sizes(letters)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes of a `DecodeState`.

    Attributes:
        batch: B, number of rows (batch slots).
        max_drafts: K, largest number of draft tokens of a step.
        max_length: T, largest number of tokens of a row.
        pages_per_row: P, number of pages of the KV cache that a row may have.
        vocab_size: V, number of the target's token ids.
        keep_draft_probs: True if `draft_probs` has memory for distributions: Q is then V, else 0.
        prediction_tokens: R, largest number of tokens of a predicted output, the text that a row is likely to repeat.
            0: rows have no predictions.
    """

    batch: int
    max_drafts: int
    max_length: int
    pages_per_row: int
    vocab_size: int
    keep_draft_probs: bool = True
    prediction_tokens: int = 0

    @property
    def letters(self) -> dict[str, int]:
        """Maps each letter of `Buffer.shape` to its size.

        S is the largest number of stop ids, N the largest number of top log-probabilities. W is the number of int32
        words for V bits. `StateSizes` explains the other letters.
        """
        return {
            "B": self.batch,
            "K": self.max_drafts,
            "T": self.max_length,
            "P": self.pages_per_row,
            "V": self.vocab_size,
            "Q": self.vocab_size if self.keep_draft_probs else 0,
            "R": self.prediction_tokens,
            "S": MAX_STOP_IDS,
            "W": words_of(self.vocab_size),
            "N": min(MAX_TOP_LOGPROBS, self.vocab_size),
        }

    @property
    def nbytes(self) -> int:
        """Number of bytes that `DecodeState.allocate` allocates."""
        return sum(each.nbytes(self.letters) for each in BUFFERS.values())


def _buffer(
    shape: str,
    dtype: torch.dtype,
    fill: float | str,
    written_by: str,
    meaning: str,
    *,
    reset: bool = False,
    prefill: bool = False,
) -> Any:
    """Returns a dataclass field with a `Buffer` as its metadata. For the arguments see `Buffer`."""
    return field(metadata={"buffer": Buffer(shape, dtype, fill, written_by, meaning, reset, prefill)})


INT64, INT32, FP32, BOOL = torch.int64, torch.int32, torch.float32, torch.bool


@dataclass(frozen=True, slots=True, eq=False)
class DecodeState:
    """All device buffers of B rows (batch slots). Allocation, reset and memory plans read this table of fields.

    `StateSizes` explains the letters of shapes. `accepted` is -1 in a row that the last step did not advance. If a row's
    logits are invalid (NaN or infinite) at place p of its k + 1 places, `accepted` is -1 - p. Such a row emits nothing.
    """

    # fmt: off
    #                                 shape      dtype  fill  written by                 meaning
    tokens: Tensor         = _buffer("B T+1",   INT64, 0,    "admit, commit",           "prompt and emitted tokens; the last column takes writes of unused positions", prefill=True)
    lengths: Tensor        = _buffer("B",       INT64, 1,    "admit, commit",           "number of committed tokens; the last one is in no KV cache yet", reset=True, prefill=True)
    limits: Tensor         = _buffer("B",       INT64, 1,    "admit",                   "upper limit of `lengths`", reset=True)
    draft_lengths: Tensor  = _buffer("B",       INT64, 0,    "admit, catch-up, commit", "number of first positions that are in the draft's cache", reset=True, prefill=True)
    finish: Tensor         = _buffer("B",       INT64, IDLE, "admit, commit",           "RUNNING, STOPPED, AT_LIMIT, IDLE, PAUSED or PREFILLED", reset=True, prefill=True)
    stop_ids: Tensor       = _buffer("B S",     INT64, -1,   "admit",                   "ids that end the row, padded with -1", reset=True)
    block_table: Tensor    = _buffer("B P",     INT64, 0,    "admit",                   "cache pages of the row", reset=True, prefill=True)
    state_rows: Tensor     = _buffer("B",       INT64, OWN,  "move",                    "row of the recurrent states that this row uses; all are different", prefill=True)
    temperature: Tensor    = _buffer("B",       FP32,  0,    "admit",                   "0 is greedy", reset=True)
    top_k: Tensor          = _buffer("B",       INT64, 0,    "admit",                   "0 keeps all")
    top_p: Tensor          = _buffer("B",       FP32,  1.0,  "admit",                   "1 keeps all")
    min_p: Tensor          = _buffer("B",       FP32,  0,    "admit",                   "0 keeps all")
    seeds: Tensor          = _buffer("B",       INT64, 0,    "admit",                   "seed of the row's random numbers")
    repetition: Tensor     = _buffer("B",       FP32,  1.0,  "admit",                   "penalty of ids in prompt or output; 1 is none")
    presence: Tensor       = _buffer("B",       FP32,  0,    "admit",                   "penalty of ids in the output; 0 is none")
    frequency: Tensor      = _buffer("B",       FP32,  0,    "admit",                   "penalty per occurrence in the output; 0 is none")
    bias: Tensor           = _buffer("B V",     FP32,  0,    "admit",                   "added to logits; -inf bans an id")
    unbiased: Tensor       = _buffer("B",       BOOL,  0,    "admit",                   "bias is known to be 0 for all ids, and need not be read")
    in_prompt: Tensor      = _buffer("B V",     BOOL,  0,    "admit",                   "ids of the prompt")
    output_counts: Tensor  = _buffer("B V",     INT32, 0,    "admit, commit",           "number of times that each id was emitted")
    min_lengths: Tensor    = _buffer("B",       INT64, 0,    "admit",                   "no stop id is allowed while `lengths` is below this")
    draft_limits: Tensor   = _buffer("B",       INT64, "K",  "admit",                   "largest number of drafts that the row may use in a step")
    constrained: Tensor    = _buffer("B",       BOOL,  0,    "admit",                   "the row follows a grammar", reset=True)
    masks: Tensor          = _buffer("B K+1 W", INT32, -1,   "admit, grammar",          "ids that the grammar allows at each place, one bit per id")
    grammar_drafts: Tensor = _buffer("B K",     INT64, 0,    "grammar",                 "drafts for the next step of a row with a grammar")
    grammar_counts: Tensor = _buffer("B",       INT64, 0,    "grammar",                 "number of valid entries of `grammar_drafts`")
    processed: Tensor      = _buffer("B",       BOOL,  0,    "admit",                   "log-probabilities are those of the distribution that the row samples from")
    prompt_lengths: Tensor = _buffer("B",       INT64, 0,    "admit",                   "tokens of the prompt")
    prediction: Tensor     = _buffer("B R",     INT64, 0,    "admit",                   "text that the row is likely to repeat; junk behind its end")
    prediction_lengths: Tensor = _buffer("B",   INT64, 0,    "admit",                   "number of its tokens; 0: there is none", reset=True)
    owners: Tensor         = _buffer("B",       INT64, -1,   "admit",                   "owner of the earlier answers that may draft for the row; -1: nobody", reset=True)
    lookup_drafts: Tensor  = _buffer("B K",     INT64, 0,    "propose",                 "drafts that lookup found for this step, used or not; only with lookup before a model")
    lookup_counts: Tensor  = _buffer("B",       INT64, 0,    "propose",                 "number of valid entries of `lookup_drafts`")
    lookup_mean: Tensor    = _buffer("B",       FP32,  2.0,  "admit, propose",          "moving average of the lookup's drafts that are right; begins high, so that lookup is tried", reset=True)
    model_mean: Tensor     = _buffer("B",       FP32,  1.0,  "admit, propose",          "moving average of the model's accepted drafts", reset=True)
    draft_source: Tensor   = _buffer("B",       BOOL,  0,    "propose",                 "this step's drafts are the model's, not the lookup's; only with lookup before a model")
    proposed_at: Tensor    = _buffer("B",       INT64, -1,   "admit, propose",          "`lengths` when lookup and model last proposed drafts; -1: never", reset=True)
    draft_tokens: Tensor   = _buffer("B K",     INT64, 0,    "propose",                 "this step's drafts")
    draft_probs: Tensor    = _buffer("B K Q",   FP32,  0,    "propose",                 "distribution of each draft (0 above the draft's ids)")
    draft_counts: Tensor   = _buffer("B",       INT64, 0,    "propose, step",           "number of valid drafts of this step; 0 if none were made")
    block: Tensor          = _buffer("B K+1",   INT64, 0,    "commit",                  "accepted drafts and one more token")
    emitted: Tensor        = _buffer("B",       INT64, 0,    "admit, commit",           "number of tokens of `block` that the last step emitted; before the first step 1 if features of the prompt are stored")
    accepted: Tensor       = _buffer("B",       INT64, -1,   "commit",                  "number of drafts that the last step accepted; negative: see above")
    logprobs: Tensor       = _buffer("B K+1",   FP32,  0,    "commit",                  "log-probability of each token of `block`")
    top_ids: Tensor        = _buffer("B K+1 N", INT64, 0,    "commit",                  "the N most probable ids at each place of `block`")
    top_logprobs: Tensor   = _buffer("B K+1 N", FP32,  0,    "commit",                  "log-probabilities of `top_ids`")
    # fmt: on

    @classmethod
    def allocate(
        cls,
        *,
        batch: int,
        max_drafts: int,
        max_length: int,
        pages_per_row: int,
        vocab_size: int,
        device: torch.device,
        prob_dtype: torch.dtype = FP32,
        keep_draft_probs: bool = True,
        prediction_tokens: int = 0,
    ) -> DecodeState:
        """Allocates the buffers of `batch` idle rows.

        For sizes see `StateSizes`. `prob_dtype` is the dtype of `draft_probs`.
        """
        sizes = batch, max_drafts, max_length, pages_per_row, vocab_size, keep_draft_probs, prediction_tokens
        letters = StateSizes(*sizes).letters

        def new(name: str, each: Buffer) -> Tensor:
            """Allocates the buffer of one field."""
            if each.fill == OWN:
                return torch.arange(batch, dtype=each.dtype, device=device)
            dtype = prob_dtype if name == "draft_probs" else each.dtype
            return torch.full(each.sizes(letters), each.fill_value(letters), dtype=dtype, device=device)

        return cls(**{name: new(name, each) for name, each in BUFFERS.items()})

    def one_row(self) -> DecodeState:
        """Allocates a state of one idle row. Its other sizes equal those of this state."""
        letters = {"K": self.draft_tokens.shape[1]}

        def new(name: str, each: Buffer) -> Tensor:
            return torch.full_like(getattr(self, name)[:1], each.fill_value(letters))

        return DecodeState(**{name: new(name, each) for name, each in BUFFERS.items()})

    def rows(self, start: int, stop: int) -> DecodeState:
        """Returns views of rows start..stop-1 of the same buffers."""
        return DecodeState(**{name: getattr(self, name)[start:stop] for name in BUFFERS})

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]

    @property
    def running(self) -> Tensor:
        """bool [B]: True for rows that the next decode step advances."""
        return self.finish == RUNNING

    @property
    def sampler(self) -> SamplerRows:
        """Sampling options of all rows."""
        return SamplerRows(*(getattr(self, name) for name in _SAMPLER))

    @property
    def processors(self) -> ProcessorRows:
        """Options of all rows that change logits before sampling, such as penalties and biases."""
        return ProcessorRows(*(getattr(self, name) for name in _PROCESSORS))

    def move(self, source: int, place: int) -> None:
        """Moves the contents of row `source` to row `place`, and makes row `source` idle.

        K/V and recurrent states are not copied: the moved contents name their KV cache pages and their row of recurrent
        states. Row `source` gets the row of recurrent states that `place` had.
        """
        given_up = self.state_rows[place].clone()
        for name in BUFFERS:
            values = getattr(self, name)
            values[place].copy_(values[source])
        self.state_rows[source].copy_(given_up)
        self.finish[source].fill_(IDLE)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all buffers."""
        return sum(getattr(self, name).nbytes for name in BUFFERS)

    @contextmanager
    def all_idle(self) -> Iterator[None]:
        """Context in which all rows are idle, so that a step advances none. Its end restores `finish` and `emitted`."""
        finish, emitted = self.finish.clone(), self.emitted.clone()
        self.finish.fill_(IDLE)
        try:
            yield
        finally:
            self.finish.copy_(finish)
            self.emitted.copy_(emitted)  # restored, because the next step's proposer may read it

    def reset(self) -> None:
        """Makes every row idle. Sets the fields with `Buffer.reset` to their initial values.

        Earlier contents of the other fields are never read again.
        """
        for name, each in BUFFERS.items():
            if each.reset:
                getattr(self, name).fill_(each.fill)


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies numbers to a new tensor on the device. On CUDA it uses pinned memory, so that the host does not wait."""
    if dtype == torch.int64 and values:  # torch reads an array in a third of the time
        return sent(torch.frombuffer(array("q", cast("Sequence[int]", values)), dtype=dtype), device)
    return sent(torch.tensor(values, dtype=dtype, device="cpu"), device)


def sent(here: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor in host memory to the device, see `send`."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


BUFFERS: Mapping[str, Buffer] = {each.name: each.metadata["buffer"] for each in fields(DecodeState)}
