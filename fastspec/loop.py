"""The host's side of decoding: admits prompts to rows, launches steps, reads what they emitted.

The loop knows requests, not batch positions: a request waits, gets the lowest free row when its pages fit,
and gives both back at the step boundary after it finishes, while the other rows go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from fastspec.graphs.runner import Runner
from fastspec.kernels.reference import KEY_BLOCK, Tiling
from fastspec.kv_cache.pages import PageTable
from fastspec.options import RowOptions
from fastspec.output import RowStats
from fastspec.proposers.base import StepShape
from fastspec.sampling import PhiloxDraws
from fastspec.state import RUNNING, STOPPED, DecodeState
from fastspec.step import Parts, prefill, step


@dataclass(slots=True)
class Request:
    """One prompt on its way through the loop.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: cap on new tokens.
        options: sampling options and seed.
        new_tokens: emitted so far.
        finish_reason: "stop" or "length" once finished.
        logprobs: of new_tokens, when recorded.
        top_logprobs: the most probable (id, log-probability) pairs at each new token, when recorded.
    """

    prompt: list[int]
    max_new_tokens: int
    options: RowOptions
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    steps: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    dropped: int = 0
    histogram: list[int] = field(default_factory=list)
    draft_length: int = 0  # the host's copy of DecodeState.draft_lengths

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.new_tokens)

    @property
    def limit(self) -> int:
        """Largest length."""
        return len(self.prompt) + self.max_new_tokens

    def stats(self) -> RowStats:
        """What happened to this row."""
        return RowStats(
            self.steps,
            self.plain_steps,
            self.drafted,
            self.accepted,
            len(self.new_tokens),
            self.dropped,
            tuple(self.histogram),
        )

    def record(self, drafted: int, accepted: int, tokens: list[int]) -> None:
        """Counts one step that drafted so many tokens and emitted `tokens`."""
        if drafted:
            self.draft_length = min(self.length + drafted - 1, self.length + len(tokens) - 1)
        self.new_tokens += tokens
        self.steps += 1
        self.plain_steps += not drafted
        self.drafted += drafted
        self.accepted += accepted
        self.dropped += accepted + 1 - len(tokens)
        self.histogram[accepted] += 1


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything a loop runs on; lives as long as the generator.

    Attributes:
        parts: models and proposer.
        state: the device buffers.
        pages: the host's page table over both caches.
        max_drafts: k at most.
        decode_tiling: shapes of a step's matrix products.
        chunk: prompt tokens per prefill pass.
        runner: launches steps, or captures and replays them.
    """

    parts: Parts
    state: DecodeState
    pages: PageTable
    max_drafts: int
    decode_tiling: Tiling
    chunk: int
    runner: Runner


class DecodeLoop:
    """Runs requests to their end; iterate over it for what each step emitted.

    Args:
        engine: what it runs on. Its state is reset here, so whatever an earlier loop left does not matter.
        requests: in the order of admission.
        stop_ids: end a row.
        sampler: the sampler kind of every step.
        choose_k: drafts for the next step, given the number of steps made; at most engine.max_drafts.
        top_logprobs: as in StepShape.
    """

    def __init__(
        self,
        engine: Engine,
        requests: list[Request],
        stop_ids: tuple[int, ...],
        sampler: str,
        choose_k: Callable[[int], int],
        top_logprobs: int | None = None,
    ) -> None:
        self._engine = engine
        self._top_logprobs = top_logprobs
        self._requests = requests
        self._stop_ids = stop_ids
        self._sampler = sampler
        self._choose_k = choose_k
        self._waiting = deque(range(len(requests)))
        self._rows: dict[int, int] = {}  # row of the state -> index of the request in it
        self._steps = 0
        engine.state.reset()
        engine.pages.release_all()
        for request in requests:
            request.histogram = [0] * (engine.max_drafts + 1)

    def __iter__(self) -> Iterator[dict[int, list[int]]]:
        """Yields, after every step, the new tokens of each request that stepped, by its index."""
        while self._waiting or self._rows:
            # left before yielding: a context held open across a yield would leak into the caller
            with torch.inference_mode(), _current(self._engine.state.lengths.device):
                emitted = self._advance()
            yield emitted

    def _advance(self) -> dict[int, list[int]]:
        self._admit()
        k = self._choose_k(self._steps)
        if k:
            self._catch_up()
        view = self._engine.state.rows(0, self._bucket())
        shape = self._shape(k)
        self._engine.runner.run(
            self._key(view.batch, shape),
            lambda: step(self._engine.parts, view, shape, PhiloxDraws(view.seeds)),
            view.all_idle,
        )
        self._steps += 1
        return self._collect(view, k)

    def _key(self, rows: int, shape: StepShape) -> str:
        """All that differs between steps of one engine whose launch does not depend on lengths."""
        recorded = "" if shape.top_logprobs is None else f", {shape.top_logprobs} top logprobs"
        return f"{rows} rows, k = {shape.num_drafts}, {shape.sampler}{recorded}"

    def _bucket(self) -> int:
        """Rows the next step runs over: a power of two that covers the highest one in use."""
        needed = max(self._rows) + 1
        return min(1 << (needed - 1).bit_length(), self._engine.state.batch)

    def _shape(self, k: int) -> StepShape:
        if self._engine.runner.static:
            longest = self._engine.state.tokens.shape[1]  # whatever the rows' lengths, the launch is the same
        else:
            longest = max(self._requests[index].length for index in self._rows.values())
        return StepShape(k, self._sampler, _blocks(longest + k), self._engine.decode_tiling, self._top_logprobs)

    def _admit(self) -> None:
        """Gives waiting requests free rows, in order, as long as their pages fit."""
        free = [row for row in range(self._engine.state.batch) if row not in self._rows]
        while self._waiting and free:
            request = self._requests[self._waiting[0]]
            positions = request.limit + self._engine.max_drafts + 1
            if not self._engine.pages.fits(positions):
                break
            row = free.pop(0)
            pages = self._engine.pages.reserve(row, positions)
            self._rows[row] = self._waiting.popleft()
            self._fill(row, request, pages)
            self._prefill(row, request)

    def _fill(self, row: int, request: Request, pages: tuple[int, ...]) -> None:
        state, options = self._engine.state, request.options
        device = state.lengths.device
        stop_ids = torch.tensor(self._stop_ids, dtype=torch.int64, device=device)
        state.tokens[row, : len(request.prompt)] = torch.tensor(request.prompt, device=device)
        state.stop_ids[row].fill_(-1)
        state.stop_ids[row, : len(self._stop_ids)] = stop_ids
        state.block_table[row].zero_()
        state.block_table[row, : len(pages)] = torch.tensor(pages, device=device)
        state.lengths[row] = len(request.prompt)
        state.limits[row] = request.limit
        state.draft_lengths[row] = 0
        state.temperature[row] = options.temperature
        state.top_k[row] = options.top_k
        state.top_p[row] = options.top_p
        state.min_p[row] = options.min_p
        state.seeds[row] = options.seed
        state.finish[row] = RUNNING

    def _prefill(self, row: int, request: Request) -> None:
        """Feeds the prompt, all but its last token, to the target, alone and in chunks at fixed positions."""
        view = self._engine.state.rows(row, row + 1)
        chunk = self._engine.chunk
        for start in range(0, len(request.prompt) - 1, chunk):
            prefill(self._engine.parts, view, self._chunk_shape(start + chunk), start, chunk)

    def _catch_up(self) -> None:
        """Lets the draft take in what it has not seen of each row, all but the last two tokens."""
        proposer = self._engine.parts.proposer
        assert proposer is not None, "k > 0 needs a proposer"
        chunk = self._engine.chunk
        for row, index in self._rows.items():
            request = self._requests[index]
            view = self._engine.state.rows(row, row + 1)
            known = min(request.length - 2, proposer.max_length)
            while request.draft_length < known:
                proposer.catch_up(view, self._chunk_shape(request.draft_length + chunk), chunk)
                request.draft_length = min(request.draft_length + chunk, known)

    def _chunk_shape(self, upto: int) -> StepShape:
        """The shape of a pass over one chunk of one row: padded to the chunk, so always the same products."""
        return StepShape(0, self._sampler, _blocks(upto), Tiling(self._engine.chunk, self._engine.chunk))

    def _collect(self, view: DecodeState, k: int) -> dict[int, list[int]]:
        """Reads the step's results in one copy; frees the rows that finished."""
        columns = torch.stack((view.emitted, view.accepted, view.draft_counts, view.finish), dim=1)
        results = torch.cat((columns, view.block), dim=1).tolist()
        emitted: dict[int, list[int]] = {}
        for row, index in sorted(self._rows.items()):
            count, accepted, drafted, finish, *block = results[row]
            request = self._requests[index]
            emitted[index] = block[:count]
            if self._top_logprobs is not None:
                self._collect_logprobs(view.rows(row, row + 1), request, count)
            request.record(drafted if k else 0, accepted, emitted[index])
            if finish != RUNNING:
                request.finish_reason = "stop" if finish == STOPPED else "length"
                del self._rows[row]
                self._engine.pages.release(row)
        return emitted

    def _collect_logprobs(self, row: DecodeState, request: Request, count: int) -> None:
        request.logprobs += row.logprobs[0, :count].tolist()
        ids = row.top_ids[0, :count, : self._top_logprobs].tolist()
        values = row.top_logprobs[0, :count, : self._top_logprobs].tolist()
        request.top_logprobs += [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one: kernels are launched there, whatever the caller's current device is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _blocks(positions: int) -> int:
    return -(-positions // KEY_BLOCK)
