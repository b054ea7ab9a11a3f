"""DecodeState: every static device buffer of the decoding loop, allocated once.

Contents change, bindings do not. A row's `lengths` entry is the only truth about it: stale or rejected cache
slots are never zeroed or copied, they lie above the length and are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fastspec.sampling import verify
from fastspec.sampling.distribution import SamplerRows
from fastspec.sampling.processors import ProcessorRows

# values of DecodeState.finish: what a commit leaves there, and one more
RUNNING, STOPPED, AT_LIMIT, IDLE = verify.RUNNING, verify.STOPPED, verify.AT_LIMIT, 3
MAX_STOP_IDS = 64
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, eq=False)
class Outbox:
    """Where steps leave their results for the host; layouts as in `kernels/publish.py`.

    Attributes:
        entries: int64 [slots, width], in host memory.
        details: int32 [slots, B, K+1, 1+2N], in host memory: log-probabilities, when recorded.
        counter: int64 [1] on the device, steps carried out.
    """

    entries: Tensor
    details: Tensor
    counter: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecodeState:
    """Buffers of B rows (slots), at most K drafts a step, V target ids, T tokens and P pages a row.

    | field         | shape, dtype      | meaning                                                       | written by              |
    |---------------|-------------------|---------------------------------------------------------------|-------------------------|
    | tokens        | [B, T] int64      | prompt and emitted tokens; the last column takes junk writes  | admit, commit           |
    | lengths       | [B] int64         | tokens that count; the last of them is not in any cache yet   | admit, commit           |
    | limits        | [B] int64         | lengths may not pass this                                     | admit                   |
    | draft_lengths | [B] int64         | positions 0.. that the draft's cache holds                    | admit, catch-up, commit |
    | finish        | [B] int64         | RUNNING, STOPPED, AT_LIMIT or IDLE                            | admit, commit           |
    | stop_ids      | [B, 64] int64     | ids that end the row, padded with -1                          | admit                   |
    | block_table   | [B, P] int64      | cache pages of the row                                        | admit                   |
    | temperature   | [B] fp32          | 0 is greedy                                                   | admit                   |
    | top_k         | [B] int64         | 0 keeps all                                                   | admit                   |
    | top_p         | [B] fp32          | 1 keeps all                                                   | admit                   |
    | min_p         | [B] fp32          | 0 keeps all                                                   | admit                   |
    | seeds         | [B] int64         | the row's randomness                                          | admit                   |
    | repetition    | [B] fp32          | penalty of ids in prompt or output; 1 is none                 | admit                   |
    | presence      | [B] fp32          | penalty of ids in the output; 0 is none                       | admit                   |
    | frequency     | [B] fp32          | penalty for each time an id is in the output; 0 is none       | admit                   |
    | bias          | [B, V] fp32       | added to logits; -inf bans an id                              | admit                   |
    | unbiased      | [B] bool          | bias is known to be 0 for all ids, and need not be read       | admit                   |
    | in_prompt     | [B, V] bool       | ids of the prompt                                             | admit                   |
    | output_counts | [B, V] int32      | how often each id was emitted                                 | admit, commit           |
    | min_lengths   | [B] int64         | no stop id comes while lengths is below this                  | admit                   |
    | draft_limits  | [B] int64         | drafts of the row that may count in a step                    | admit                   |
    | draft_tokens  | [B, K] int64      | this step's drafts                                            | propose                 |
    | draft_probs   | [B, K, V] fp32    | the law each draft was drawn from (0 above the draft's ids)   | propose                 |
    | draft_counts  | [B] int64         | how many of this step's drafts count; 0 where none were made  | propose, step           |
    | block         | [B, K+1] int64    | accepted drafts and one more token                            | commit                  |
    | emitted       | [B] int64         | how many tokens of `block` were emitted by the last step      | commit                  |
    | accepted      | [B] int64         | drafts accepted by the last step; -1: the row did not step.   | commit                  |
    |               |                   | A row that still runs: -1 - p, nothing could be chosen at p   |                         |
    | logprobs      | [B, K+1] fp32     | log-probability of each token of `block` under the raw target | commit                  |
    | top_ids       | [B, K+1, N] int64 | the N most probable ids at each place of `block`              | commit                  |
    | top_logprobs  | [B, K+1, N] fp32  | their log-probabilities                                       | commit                  |
    """

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    draft_lengths: Tensor
    finish: Tensor
    stop_ids: Tensor
    block_table: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    bias: Tensor
    unbiased: Tensor
    in_prompt: Tensor
    output_counts: Tensor
    min_lengths: Tensor
    draft_limits: Tensor
    draft_tokens: Tensor
    draft_probs: Tensor
    draft_counts: Tensor
    block: Tensor
    emitted: Tensor
    accepted: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

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
        prob_dtype: torch.dtype = torch.float32,
        keep_draft_probs: bool = True,
    ) -> DecodeState:
        """Allocates the buffers of `batch` idle rows; draft_probs of no width where no law is to be kept."""

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        def floats(*shape: int, fill: float = 0.0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.float32, device=device)

        return cls(
            tokens=ints(batch, max_length + 1),
            lengths=ints(batch, fill=1),
            limits=ints(batch, fill=1),
            draft_lengths=ints(batch),
            finish=ints(batch, fill=IDLE),
            stop_ids=ints(batch, MAX_STOP_IDS, fill=-1),
            block_table=ints(batch, pages_per_row),
            temperature=floats(batch),
            top_k=ints(batch),
            top_p=floats(batch, fill=1.0),
            min_p=floats(batch),
            seeds=ints(batch),
            repetition=floats(batch, fill=1.0),
            presence=floats(batch),
            frequency=floats(batch),
            bias=floats(batch, vocab_size),
            unbiased=torch.zeros(batch, dtype=torch.bool, device=device),
            in_prompt=torch.zeros(batch, vocab_size, dtype=torch.bool, device=device),
            output_counts=torch.zeros(batch, vocab_size, dtype=torch.int32, device=device),
            min_lengths=ints(batch),
            draft_limits=ints(batch, fill=max_drafts),
            draft_tokens=ints(batch, max_drafts),
            draft_probs=torch.zeros(batch, max_drafts, vocab_size * keep_draft_probs, dtype=prob_dtype, device=device),
            draft_counts=ints(batch),
            block=ints(batch, max_drafts + 1),
            emitted=ints(batch),
            accepted=ints(batch, fill=-1),
            logprobs=floats(batch, max_drafts + 1),
            top_ids=ints(batch, max_drafts + 1, top := min(MAX_TOP_LOGPROBS, vocab_size)),
            top_logprobs=floats(batch, max_drafts + 1, top),
        )

    def rows(self, start: int, stop: int) -> DecodeState:
        """The same buffers, seen through views of rows start..stop-1."""
        return DecodeState(**{field.name: getattr(self, field.name)[start:stop] for field in fields(self)})

    @property
    def batch(self) -> int:
        """Rows."""
        return self.lengths.shape[0]

    @property
    def running(self) -> Tensor:
        """bool [B]: rows that step."""
        return self.finish == RUNNING

    @property
    def sampler(self) -> SamplerRows:
        """The sampling options of the rows."""
        return SamplerRows(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def processors(self) -> ProcessorRows:
        """What the rows do to logits before they are sampled from."""
        return ProcessorRows(
            self.bias,
            self.in_prompt,
            self.output_counts,
            self.repetition,
            self.presence,
            self.frequency,
            self.stop_ids,
            self.min_lengths,
        )

    def move(self, source: int, place: int) -> None:
        """Row `source` goes on as row `place`; its K/V stays where it is, for the pages go along."""
        for field in fields(self):
            values = getattr(self, field.name)
            values[place].copy_(values[source])
        self.finish[source].fill_(IDLE)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    @contextmanager
    def all_idle(self) -> Iterator[None]:
        """For a while no row runs: a step then changes nothing that counts."""
        finish = self.finish.clone()
        self.finish.fill_(IDLE)
        try:
            yield
        finally:
            self.finish.copy_(finish)

    def reset(self) -> None:
        """Makes every row idle; what it held before no longer matters."""
        self.finish.fill_(IDLE)
        self.lengths.fill_(1)
        self.limits.fill_(1)
        self.draft_lengths.zero_()
        self.block_table.zero_()
        self.stop_ids.fill_(-1)
        self.temperature.zero_()
