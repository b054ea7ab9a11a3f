"""The host's side of decoding: admits prompts to rows, launches steps ahead, reads what they emitted.

The loop knows requests, not batch positions: a request waits, gets the lowest free row when its pages fit,
may move to a lower one, and gives row and pages back when it ends, while the other rows go on. Everything it asks of
the device is queued in one stream; nothing waits but the reading of a step's results, and by then later steps are
queued already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fastspec.adaptive.controller import Observation, StepContext
from fastspec.graphs.results import RowResult
from fastspec.inputs.options import RowOptions
from fastspec.output import RowStats
from fastspec.runtime import admission
from fastspec.runtime.engine import Engine, chunks_of
from fastspec.runtime.step_timer import DraftLengthPolicy, StepTimer
from fastspec.state import IDLE, RUNNING, STOPPED

_PASS_ROWS = 128  # prompt tokens up to which a pass takes hardly longer than one over a few: it waits for the weights


@dataclass(slots=True)
class Request:
    """One prompt on its way through the loop.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: cap on new tokens.
        options: sampling options and seed.
        watch: told the new tokens of each step, says how many of them there are up to the end of the row, or None
            when it goes on; for ends that the device does not see.
        new_tokens: emitted so far.
        finish_reason: "stop" or "length" once finished, "error" when no token could be chosen.
        broken_at: the position that no token could be chosen for.
        logprobs: of new_tokens, when recorded.
        top_logprobs: the most probable (id, log-probability) pairs at each new token, when recorded.
        draft_length: the host's copy of DecodeState.draft_lengths.
        behind: a step without drafts was launched since the draft last caught up.
        held: none of its drafts counts for now: DecodeState.draft_limits of its row is 0.
    """

    prompt: list[int]
    max_new_tokens: int
    options: RowOptions
    watch: Callable[[list[int]], int | None] | None = None
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    invalid_at: int | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    steps: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    dropped: int = 0
    histogram: list[int] = field(default_factory=list)
    steps_at: list[int] = field(default_factory=list)
    draft_length: int = 0
    draft_lag: bool = False
    drafts_paused: bool = False

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
            tuple(self.steps_at),
        )

    def record(self, result: RowResult, k: int) -> list[int]:
        """Counts one step of k drafts; returns its tokens."""
        if result.finish == RUNNING and result.accepted < 0:
            self.invalid_at = self.length - 1 - result.accepted
            self.finish_reason = "error"
            return []
        tokens = result.block[: result.emitted]
        end = self.watch(tokens) if self.watch else None
        tokens = tokens[:end]
        if result.drafted:
            self.draft_length = min(self.length + result.drafted - 1, self.length + len(tokens) - 1)
        self.new_tokens += tokens
        self.steps += 1
        self.plain_steps += not result.drafted
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.dropped += result.accepted + 1 - len(tokens)
        self.histogram[result.accepted] += 1
        self.steps_at[k] += 1
        if result.finish != RUNNING:
            self.finish_reason = "stop" if result.finish == STOPPED else "length"
        if end is not None:
            self.finish_reason = "stop"
        return tokens


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step whose results were not read yet.

    Attributes:
        sequence: its number in the ring.
        requests: by the row each had when it was launched.
        k: drafts.
        bucket: rows it covers.
        resumed: passes of catching up that were queued before it, when the step before it was a plain one or there
            were any; else None.
        timed: only such passes, or nothing, came between it and the step before it.
        drafting: rows that could draft.
    """

    sequence: int
    requests: dict[int, int]
    k: int
    bucket: int
    resumed: float | None
    timed: bool
    drafting: frozenset[int]


class Scheduler:
    """Runs requests to their end; iterate over it for what each step emitted.

    Args:
        engine: what it runs on. Its state is reset here, so whatever an earlier loop left does not matter.
        requests: in the order of admission.
        stop_ids: end a row.
        sampler: the sampler kind of every step.
        choose_k: drafts for the next step, given the number of steps made; at most engine.max_drafts.
        top_logprobs: as in StepShape.
        pacer: chooses instead of choose_k, and is told what every step did.
    """

    def __init__(
        self,
        engine: Engine,
        requests: list[Request],
        stop_ids: tuple[int, ...],
        sampler: str,
        choose_k: Callable[[int], int],
        top_logprobs: int | None = None,
        policy: DraftLengthPolicy | None = None,
    ) -> None:
        self._engine = engine
        self._top_logprobs = top_logprobs
        self._requests = requests
        self._lengths = lengths_of(requests)
        self._stop_ids = stop_ids
        self._sampler = sampler
        self._choose_k = choose_k
        self._pacer = policy
        self._clock = StepTimer(ahead=engine.runner.depth > 1)
        self._disturbed = False  # other work was queued since the last step
        self._last_k = 0
        self._waiting = deque(range(len(requests)))
        self._rows: dict[int, int] = {}  # row of the state -> index of the request in it
        self._in_flight: deque[InFlightStep] = deque()
        self._steps = 0
        engine.runner.join()
        with engine.on_device():
            engine.ring.settle()
            engine.state.reset()
        engine.pages.release_all()
        for request in requests:
            request.histogram = [0] * (engine.max_drafts + 1)
            request.steps_at = [0] * (engine.max_drafts + 1)

    def __iter__(self) -> Iterator[dict[int, list[int]]]:
        """Yields, after every step, the new tokens of each request that stepped, by its index."""
        while self._waiting or self._rows:
            # left before yielding: a context held open across a yield would leak into the caller
            with self._engine.on_device():
                emitted = self._advance()
            self._clock.leave()
            yield emitted
            self._clock.back()

    def _advance(self) -> dict[int, list[int]]:
        """Launches what may be launched, then reads the oldest step."""
        self._admit()
        self._compact()
        while len(self._in_flight) < self._engine.runner.depth and self._launch():
            pass
        return self._collect(self._in_flight.popleft())

    def _launch(self) -> bool:
        """Queues the next step, unless it is sure to be for nothing or must wait for earlier ones."""
        # ahead of others only where a row needs it whatever those accept: a step for nothing holds up what comes next
        needed = self._goes_on if self._in_flight else self._may_go_on
        if not any(needed(index) for index in self._rows.values()):
            return False
        requests = {row: self._requests[index] for row, index in self._rows.items()}
        k, drafting = self._drafts(requests)
        passes = 0.0
        if k:
            if self._in_flight and any(requests[row].draft_lag for row in drafting):
                return False  # how far the draft is behind is known once those steps are read
            passes = self._catch_up(drafting)
            self._hold(requests, drafting)
        rows = self._engine.bucket(max(self._rows) + 1)
        lengths = self._lengths  # of captured steps one kind serves the whole call
        if not self._engine.runner.static:
            ahead = (len(self._in_flight) + 1) * (self._engine.max_drafts + 1)
            now = [request.length for request in requests.values()]
            lengths = max(now) + ahead, min(now)
        shape = self._engine.shape(k, self._sampler, self._top_logprobs, *lengths)
        resumed = passes if passes or (k and not self._last_k) else None
        # a step launched into an empty queue began when the host came to it, not when the one before it ended
        timed = not self._disturbed and (resumed is not None or bool(self._in_flight) or self._engine.runner.depth == 1)
        sequence = self._engine.launch(rows, shape)
        self._in_flight.append(InFlightStep(sequence, dict(self._rows), k, rows, resumed, timed, drafting))
        self._steps += 1
        self._last_k, self._disturbed = k, False
        for row, request in requests.items():
            request.draft_lag |= not k or row not in drafting
        return True

    def _drafts(self, requests: dict[int, Request]) -> tuple[int, frozenset[int]]:
        """Drafts for the next step, and the rows that they are for."""
        willing = [row for row, request in requests.items() if request.options.draft_limit != 0]
        if not willing:
            return 0, frozenset()  # where every row has opted out the step is a plain one
        if self._pacer is None:
            return self._choose_k(self._steps), frozenset(willing)
        passes = {row: _passes(self._draft_lag_chunks(requests[row])) for row in willing}
        nearest = sorted(willing, key=lambda row: (passes[row], row))
        remaining = max(request.limit - request.length for request in requests.values())
        draft_lag = tuple(passes[row] for row in nearest)
        k = self._pacer.choose(StepContext(self._engine.bucket(max(self._rows) + 1), remaining, draft_lag))
        return k, frozenset(nearest[: self._pacer.few])

    def _hold(self, requests: dict[int, Request], drafting: frozenset[int]) -> None:
        """Lets drafts count in these rows alone."""
        for row, request in requests.items():
            drafts_paused = row not in drafting
            if drafts_paused != request.drafts_paused and request.options.draft_limit != 0:
                limit = 0 if drafts_paused else admission.draft_limit(request.options, self._engine.max_drafts)
                self._engine.state.draft_limits[row].fill_(limit)
                request.drafts_paused = drafts_paused

    def _draft_lag_chunks(self, request: Request) -> list[int]:
        """The chunks in which the draft would take in what it has not seen of a row, all but the last two tokens."""
        proposer = self._engine.parts.proposer
        if proposer is None:
            return []
        missing = min(request.length - 2, proposer.max_length) - request.draft_length
        return chunks_of(self._engine.chunks, missing)

    def _may_go_on(self, index: int) -> bool:
        """Whether a request can outlast the steps launched for it, each of which emits a token at least."""
        launched = sum(index in step.requests.values() for step in self._in_flight)
        return self._requests[index].length + launched < self._requests[index].limit

    def _goes_on(self, index: int) -> bool:
        """Whether a request is sure to outlast the steps launched for it, but for stop ids."""
        emitted = sum(step.k + 1 for step in self._in_flight if index in step.requests.values())
        return self._requests[index].length + emitted < self._requests[index].limit

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
            admission.fill(
                self._engine.state,
                row,
                request.prompt,
                request.limit,
                pages,
                self._stop_ids,
                request.options,
                self._sampler,
            )
            self._prefill(row, request)
            self._disturbed = True

    def _compact(self) -> None:
        """Moves the highest rows down when the next step can then run over half as many."""
        while self._rows and self._engine.bucket(max(self._rows) + 1) > self._engine.bucket(len(self._rows)):
            source = max(self._rows)
            place = next(row for row in range(source) if row not in self._rows)
            self._rows[place] = self._rows.pop(source)
            self._engine.move(source, place)
            self._disturbed = True

    def _prefill(self, row: int, request: Request) -> None:
        """Feeds the prompt, all but its last token, to the target: alone, in chunks that its length decides."""
        with self._engine.parts.mark("prefill"):
            self._engine.prefill_row(row, 0, chunks_of(self._engine.chunks, len(request.prompt) - 1), draft=False)

    def _catch_up(self, drafting: frozenset[int]) -> float:
        """Lets the draft take in what it has not seen of these rows; returns the passes that takes."""
        proposer = self._engine.parts.proposer
        assert proposer is not None, "k > 0 needs a proposer"
        passes = 0.0
        for row in sorted(drafting):
            request = self._requests[self._rows[row]]
            chunks = self._draft_lag_chunks(request)
            if chunks:
                self._engine.prefill_row(row, request.draft_length, chunks, draft=True)
                fed = request.draft_length + sum(chunks)
                request.draft_length = min(fed, request.length - 2, proposer.max_length)
            passes += _passes(chunks)
            request.draft_lag = False
        return passes

    def _collect(self, step: InFlightStep) -> dict[int, list[int]]:
        """Reads a step's results; frees the rows that finished."""
        waited = self._engine.runner.depth == 1 or not self._engine.ring.ready(step.sequence)
        results = self._engine.ring.read(step.sequence, max(step.requests) + 1)
        self._report(step, results, self._clock.arrived(waited))
        emitted: dict[int, list[int]] = {}
        for row, index in sorted(step.requests.items()):
            request = self._requests[index]
            if request.finish_reason is not None:
                continue  # it ended in a step that was read after this one was launched
            emitted[index] = tokens = request.record(results[row], step.k)
            if self._top_logprobs is not None:
                logprobs, pairs = self._engine.ring.logprobs(step.sequence, row, len(tokens), self._top_logprobs)
                request.logprobs += logprobs
                request.top_logprobs += pairs
            if request.finish_reason is not None:
                place = next(row for row, held in self._rows.items() if held == index)  # it may have moved since
                del self._rows[place]
                self._engine.pages.release(place)
                if results[row].finish == RUNNING:  # the device does not know: before anybody gets the row's pages
                    self._engine.state.finish[place].fill_(IDLE)
        return emitted

    def _report(self, step: InFlightStep, results: list[RowResult], seconds: float | None) -> None:
        """Tells the pacer what a step did to the rows that it found running."""
        if self._pacer is None:
            return
        going = {row for row, index in step.requests.items() if self._requests[index].finish_reason is None}
        accepted = {row: results[row].accepted for row in sorted(going) if results[row].accepted >= 0}
        drafting = tuple(count for row, count in accepted.items() if row in step.drafting)
        quiet = seconds if step.timed else None
        self._pacer.observe(Observation(step.k, step.bucket, drafting, quiet, step.resumed, len(accepted)))


def lengths_of(requests: list[Request]) -> tuple[int, int]:
    """Tokens that the longest of their rows may get, and those of the shortest prompt."""
    longest = max((request.limit for request in requests), default=0)
    return longest, min((len(request.prompt) for request in requests), default=0)


def _passes(chunks: list[int]) -> float:
    """What feeding these chunks costs, in passes over a few rows."""
    return sum(max(1.0, chunk / _PASS_ROWS) for chunk in chunks)
