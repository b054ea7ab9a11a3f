"""Scheduler: gives batch slots (rows) to requests, launches decode steps, and reads their emitted tokens.

A request waits until a row and enough KV cache pages are free, and gets the lowest free row. It may later move to a
lower row. When it ends, its row and pages become free, and the other requests continue. `PrefillQueue` prefills the
prompts.

All work of the device is queued in one stream. Steps are launched before the results of earlier steps are read. So the
device has work while the host waits for a step's results.

`step` may be called by only one thread at a time. Any thread may call `add` and `cancel`: they put the request in a
queue, which the next `step` reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from queue import SimpleQueue
from threading import get_ident

from fastspec.adaptive.controller import Observation, StepContext
from fastspec.engine.engine import Engine
from fastspec.errors import OutOfPages
from fastspec.graphs.results import RowResult
from fastspec.proposers.interface import feeds_drafts
from fastspec.scheduling import admission
from fastspec.scheduling.draft_length import DraftChoice
from fastspec.scheduling.prefill import PrefillQueue, lag_of, passes_of
from fastspec.scheduling.requests import (
    CallPlan,
    InFlightStep,
    Request,
    constrained,
    due,
    grammar_steps,
    lengths_of,
    may_draft,
)
from fastspec.shapes import FULL, GRAMMAR_ONLY, GREEDY, MIXED_DRAFTS, StepShape
from fastspec.state import IDLE, PREFILLED, RUNNING

# share of an interval: if the reader paused longer than this, its pause may have lengthened the interval
_NOTICED = 0.25


class Scheduler:
    """Decodes requests, one step of the whole batch at a time. Exists as long as the generator.

    Args:
        engine: engine that runs the steps. The first `step` resets its state.

    Attributes:
        weight_version: version of the target's weights, which new requests record.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.weight_version: int | str = 0
        # (request, its plan); None instead of a plan: cancel the request
        self._arrivals: SimpleQueue[tuple[Request, CallPlan | None]] = SimpleQueue()
        self._calls: dict[Request, CallPlan] = {}  # plan of every request that has not ended
        self._queue = PrefillQueue(engine)
        self._rows: dict[int, Request] = {}  # row -> its request, for rows that step
        self._in_flight: deque[InFlightStep] = deque()
        self._clock = StepTimer(ahead=engine.runner.depth > 1, clock=engine.clock)
        self._disturbed = False  # True if other work was queued since the last step
        self._last_k = 0
        self._interrupted = True  # True if a step was interrupted: the next step begins with a reset

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return not self._calls and self._arrivals.empty()

    def add(self, request: Request, call: CallPlan) -> None:
        """Queues a request. Any thread may call it.

        Raises:
            OutOfPages: the request needs more pages than the KV cache has.
        """
        self.check(request)
        request.begin(self.engine.shapes.max_drafts)
        request.weight_version = self.weight_version
        self._arrivals.put((request, call))

    def check(self, request: Request) -> None:
        """Raises OutOfPages if a request needs more pages than the KV cache has."""
        pages = self.engine.pages
        if pages.pages_for(self._positions(request)) >= pages.num_pages:
            raise OutOfPages(
                f"a row of {request.limit} tokens needs {pages.pages_for(self._positions(request))} pages, and the "
                f"cache has {pages.num_pages - 1}; ask for fewer new tokens, or raise max_length"
            )

    def cancel(self, request: Request) -> None:
        """Cancels a request. Any thread may call it. Does nothing if the request has ended."""
        self._arrivals.put((request, None))

    def step(self) -> dict[Request, list[int]]:
        """Launches prefill passes and decode steps, then reads the results of the oldest launched step.

        Returns:
            {request: its new tokens in the step whose results were read}. {} if there is no work.
        """
        with self.engine.on_device():
            if self._interrupted:
                self._reset()
            self._interrupted = True
            emitted = self._advance()
            self._interrupted = False
        return emitted

    def forget_prompts(self) -> None:
        """Clears the prefix cache and all stored recurrent states. It is called when weights or memory change.

        No request may wait or run.
        """
        with self.engine.on_device():
            self._reset()

    def run(self, requests: list[Request], call: CallPlan) -> Iterator[dict[int, list[int]]]:
        """Decodes requests to their end. After every step, yields {index in `requests`: its new tokens}.

        Other requests of the scheduler continue meanwhile. If the iteration is left early, `requests` are cancelled.
        """
        self.engine.runner.wait_for_caller()
        places = {request: index for index, request in enumerate(requests)}
        try:
            for request in requests:
                self.add(request, call)
            while any(request.finish_reason is None for request in requests):
                # the device context is left before yielding, because the caller's code would run in it
                emitted = self.step()
                self._clock.leave()
                yield {places[request]: tokens for request, tokens in emitted.items() if request in places}
                self._clock.back()
        finally:
            for request in requests:
                if request.finish_reason is None:
                    self.cancel(request)

    def run_call(
        self, requests: list[Request], stop_ids: tuple[int, ...], choice: DraftChoice
    ) -> Generator[dict[int, list[int]], None, None]:
        """Decodes the requests of a new call, with the numbers of draft tokens of `choice`. Yields as `run` does.

        The steps must already be captured.
        """
        if choice.controller is not None:
            choice.controller.begin()
        settings = choice.sampler, lambda made: choice.k, choice.top_logprobs, choice.controller, lengths_of(requests)
        yield from self.run(requests, CallPlan(stop_ids, *settings, processed=choice.processed))

    def _reset(self) -> None:
        """Resets the batch slots, the KV cache pages and the prefix cache.

        Requests that have a batch slot end with the finish reason "error". Waiting requests stay.
        """
        engine = self.engine
        engine.ring.correct_count()
        engine.state.reset()
        engine.pages.release_all()
        self._queue.reset()
        self._in_flight.clear()
        for request in [request for request in self._calls if request not in self._queue.waiting]:
            self._end(request, "error")
        self._rows.clear()
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._clock = StepTimer(ahead=self.engine.runner.depth > 1, clock=self.engine.clock)
        self._disturbed, self._last_k = False, 0

    def _advance(self) -> dict[Request, list[int]]:
        self._take_arrivals()
        if not self._rows:
            self._in_flight.clear()  # the results of those steps are not read
            self._restart_clock()
        self._admit()
        self._compact()
        while len(self._in_flight) < self.engine.runner.depth and self._launch():
            pass
        return self._collect(self._in_flight.popleft()) if self._in_flight else {}

    def _take_arrivals(self) -> None:
        while not self._arrivals.empty():  # only steps take from it
            request, call = self._arrivals.get_nowait()
            if call is not None:
                self._calls[request] = call
                self._queue.add(request)
            elif request in self._calls:
                self._drop(request)

    def _drop(self, request: Request) -> None:
        """Cancels a request that waits or runs."""
        self._end(request, "cancelled")
        if request in self._rows.values():
            self._free_row(request, running=True)
        else:
            self._queue.drop(request)

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = request.finish_reason or reason
        del self._calls[request]
        if self.engine.texts is not None and request.finish_reason in ("stop", "length"):
            self.engine.texts.remember_answer(request.prompt, request.new_tokens, request.options.session)

    def _free_row(self, request: Request, *, running: bool) -> None:
        """Frees the batch slot and KV cache pages of a request that has ended.

        Args:
            request: the request.
            running: True if the slot still runs on the device and must be made idle.
        """
        # searched, because it may have moved since its step
        row = next(row for row, owner in self._rows.items() if owner is request)
        del self._rows[row]
        self._queue.keep(request, row)
        self.engine.pages.release(row)
        if running:  # stopped before another row gets these pages
            self.engine.state.finish[row].fill_(IDLE)

    def _launch(self) -> bool:
        """Launches the next step. Returns False if it launched nothing.

        Nothing is launched if no request surely needs another step, or if the host must first read earlier steps.
        """
        requests = due(self._rows, self._in_flight)
        # launch ahead only if some row needs this step even if every draft in flight is accepted
        needed = self._surely_needs_step if self._in_flight else self._may_need_step
        if not any(map(needed, requests.values())):
            return False
        first = {row: request for row, request in requests.items() if request.prefilled}
        if first:
            return self._launch_first_tokens(first)
        calls = {self._calls[request] for request in requests.values()}
        k, drafting = self._choose_drafts(
            {row: request for row, request in requests.items() if request.grammar is None}
        )
        passes = 0.0
        if k:
            ahead = {row: self._tokens_ahead(requests[row]) for row in drafting}
            if any(requests[row].draft_lag and ahead[row] is None for row in drafting):
                return False  # how far the draft is behind is known only after those steps are read
            passes = self._queue.catch_up({row: self._rows[row] for row in drafting}, ahead)
        drafted, (k, masked) = k, grammar_steps(requests, self._calls, k)
        rows = self.engine.shapes.bucket(max(self._rows) + 1)
        shape = self._shape(k, calls, requests)
        if masked:
            shape = replace(shape, grammars=MIXED_DRAFTS if drafted else GRAMMAR_ONLY)
        shape = self.engine.captured_shape(rows, shape)
        if not self._ready(rows, shape, calls):
            return False
        if masked:
            admission.allow(self.engine.state, masked, k)
        resumed = passes if passes or (drafted and not self._last_k) else None
        # a step that is launched into an empty queue begins at its launch, not at the end of the previous step
        timed = not self._disturbed and (resumed is not None or bool(self._in_flight) or self.engine.runner.depth == 1)
        sequence = self.engine.launch(rows, shape)
        self._in_flight.append(InFlightStep(sequence, requests, k, rows, resumed, timed, drafting))
        for call in calls:
            call.steps += 1
        self._last_k, self._disturbed = drafted, False
        for row, request in requests.items():
            request.draft_lag |= not drafted or row not in drafting
        return True

    def _launch_first_tokens(self, requests: dict[int, Request]) -> bool:
        """Launches a step that only emits the first tokens of requests whose long prompts are prefilled.

        Args:
            requests: index of a batch slot -> its request.

        Returns:
            False if nothing was launched, because the host must first read earlier steps.
        """
        calls = {self._calls[request] for request in requests.values()}
        rows, masked = self.engine.shapes.bucket(max(self._rows) + 1), grammar_steps(requests, self._calls, 0)[1]
        shape = self.engine.captured_shape(
            rows, self._shape(0, calls, requests).for_first_tokens(grammars=bool(masked))
        )
        if not self._ready(rows, shape, calls):
            return False
        if masked:
            admission.allow(self.engine.state, masked, 0, PREFILLED)
        sequence = self.engine.launch(rows, shape)
        self._in_flight.append(InFlightStep(sequence, requests, 0, rows, None, False, frozenset(), first_token=True))
        self._disturbed = True
        for request in requests.values():
            request.prefilled, request.draft_lag = False, True
        return True

    def _ready(self, rows: int, shape: StepShape, calls: set[CallPlan]) -> bool:
        """True if a step of this shape can be launched now. Captures it first if needed and if no step is in flight.

        Args:
            rows: number of batch slots that the step covers.
            shape: shape of the step.
            calls: plans of the requests that run in it.
        """
        foreseen = len(calls) == 1 and not any(call.joined for call in calls) and not constrained(self._rows)
        if not foreseen and not self.engine.ready(rows, shape):
            if self._in_flight:
                return False  # a capture runs steps of its own, so results in flight are read first
            self.engine.capture(rows, shape)
            self._disturbed = True
        return True

    def _shape(self, k: int, calls: set[CallPlan], requests: dict[int, Request]) -> StepShape:
        """Returns a step shape that suits all running calls.

        Args:
            k: number of draft tokens of the step.
            calls: plans of the requests.
            requests: index of a batch slot -> its request.
        """
        if self.engine.runner.static:  # one captured step serves a whole call
            longest, shortest = max(call.lengths[0] for call in calls), min(call.lengths[1] for call in calls)
        else:
            now = [request.length for request in requests.values()]
            longest, shortest = max(now) + (len(self._in_flight) + 1) * (self.engine.shapes.max_drafts + 1), min(now)
        recorded = [call.top_logprobs for call in calls if call.top_logprobs is not None]
        sampler = FULL if any(call.full for call in calls) else GREEDY
        processed = any(call.processed for call in calls)
        return self.engine.shapes.step(k, sampler, max(recorded, default=None), longest, shortest, processed=processed)

    def _choose_drafts(self, requests: dict[int, Request]) -> tuple[int, frozenset[int]]:
        """Chooses the number of draft tokens of the next step (k), and the batch slots that draft.

        With several calls, requests of some calls may get fewer draft tokens than k, or none.

        Args:
            requests: index of a batch slot -> its request. None of them has a grammar.

        Returns:
            (k, indices of the batch slots that draft).
        """
        if not requests:
            return 0, frozenset()
        calls, wanted = {self._calls[request] for request in requests.values()}, []
        for call in calls:
            own = {row: request for row, request in requests.items() if self._calls[request] is call}
            wanted.append(self._drafts_of_call(call, own))
        largest = max(k for k, _ in wanted)
        alone = len(calls) == 1
        limits = {
            row: self.engine.shapes.max_drafts if alone else k for k, rows in wanted if k or not largest for row in rows
        }
        if largest:
            for row, request in requests.items():
                self._limit_drafts(row, request, limits.get(row, 0))
        return largest, frozenset(limits)

    def _drafts_of_call(self, call: CallPlan, requests: dict[int, Request]) -> tuple[int, frozenset[int]]:
        """Returns the number of draft tokens that one call wants, and the batch slots of the call that should draft."""
        willing = may_draft(requests)
        if not willing:
            return 0, frozenset()  # a step without drafts
        if call.policy is None:
            return call.choose_k(call.steps), frozenset(willing)
        passes = {row: passes_of(lag_of(self.engine, requests[row])) for row in willing}
        nearest = sorted(willing, key=lambda row: (passes[row], row))
        remaining = max(request.limit - request.length for request in requests.values())
        behind = tuple(passes[row] for row in nearest)
        k = call.policy.choose(StepContext(self.engine.shapes.bucket(max(self._rows) + 1), remaining, behind))
        return k, frozenset(nearest[: call.policy.few])

    def _limit_drafts(self, row: int, request: Request, drafts: int) -> None:
        """Limits the draft tokens of a batch slot to `drafts`, or to the request's own limit if that is lower."""
        limit = min(drafts, admission.draft_limit(request.options, self.engine.shapes.max_drafts))
        if limit != request.draft_limit:
            self.engine.state.draft_limits[row].fill_(limit)
            request.draft_limit = limit

    def _may_need_step(self, request: Request) -> bool:
        """True if a request may need another step. Each step that was launched for it emits at least one token."""
        launched = sum(request in step.requests.values() for step in self._in_flight)
        return request.length + launched < request.limit

    def _surely_needs_step(self, request: Request) -> bool:
        """True if a request needs another step even if all draft tokens of its launched steps are accepted.

        Stop ids are not considered.
        """
        emitted = sum(step.k + 1 for step in self._in_flight if request in step.requests.values())
        return request.length + emitted < request.limit

    def _tokens_ahead(self, request: Request) -> int | None:
        """Returns the number of tokens that a request gets from launched steps whose results were not read yet.

        The number is known only if all these steps are first-token steps, which emit one token each. Else returns None.
        """
        steps = [step for step in self._in_flight if request in step.requests.values()]
        return len(steps) if all(step.first_token for step in steps) else None

    def _positions(self, request: Request) -> int:
        """Returns the number of KV cache positions that a request may write, also for rejected draft tokens."""
        return request.limit + self.engine.shapes.max_drafts + 1

    def _admit(self) -> None:
        """Prefills waiting prompts in the order of arrival. Stops at a budget of tokens if other calls are decoding."""
        fed, queue, began = 0, self._queue, None
        admitted: dict[int, Request] = {}
        budgets = queue.budgets(len(self._rows))
        while (request := queue.request or (began := self._begin())) is not None:
            budget = self._budget(self._calls[request])
            fed += queue.feed(None if budget is None else budget * budgets - fed, at_least_one=not fed)
            if request is began:
                admitted[queue.row] = request
            self._disturbed = True
            if queue.request is not None:
                break
            self._rows[queue.row] = request
        queue.flush()
        if admitted:  # after the passes, so that the device works meanwhile
            self._fill_options(admitted)

    def _budget(self, call: CallPlan) -> int | None:
        """Returns how many prompt tokens of a call are prefilled between two decode steps.

        Returns None for all of them, if no request of another call is decoding.
        """
        alone = not self._rows or (not call.joined and all(self._calls[other] is call for other in self._rows.values()))
        return None if alone else self.engine.sizes.budget

    def _begin(self) -> Request | None:
        """Gives a batch slot to the first waiting request, and returns the request. None: no request got a slot."""
        waiting = self._queue.waiting
        begun = self._queue.begin(self._rows, self._positions(waiting[0])) if waiting else None
        if begun is None:
            return None
        request, pages = begun
        request.admitted = time.perf_counter()
        call, state, row = self._calls[request], self.engine.state, self._queue.row
        admission.fill_prompt(state, row, request.prompt, pages, call.stop_ids, request.draft_length)
        request.draft_limit = admission.draft_limit(request.options, self.engine.shapes.max_drafts)
        budget = self._budget(call)
        # without a budget only rows of its own call wait for the draft's passes
        wants = request.options.draft_limit != 0 and request.grammar is None
        drafting = budget is not None and wants and self._draft_follows(call)
        self._queue.plan(drafting=drafting, max_tokens=budget)
        return request

    def _draft_follows(self, call: CallPlan) -> bool:
        """True if the next steps of a call will draft with a model that must read the prompt."""
        if not self.engine.prompts.reads_prompts:
            return False
        return self._last_k > 0 if call.policy else call.choose_k(call.steps) > 0

    def _fill_options(self, admitted: dict[int, Request]) -> None:
        """Writes the options of newly admitted requests to the device, where decode steps read them.

        Args:
            admitted: index of a batch slot -> its request.
        """
        full = any(each.full for each in self._calls.values())
        state, sampler = self.engine.state, FULL if full else GREEDY
        rows = [
            admission.NewRow(row, len(request.prompt), request.limit, request.options)
            for row, request in admitted.items()
        ]
        admission.fill_options(state, rows, sampler)
        for row, request in admitted.items():
            request.has_tables = full
            if self.engine.texts is not None:
                owner = self.engine.texts.owner_of(request.prompt, request.options.session)
                admission.fill_texts(state, row, request.options.prediction, owner)
        for other, running in self._rows.items() if full else ():
            if not running.has_tables:  # it was admitted when no step read its tables
                admission.fill_tables(state, other, len(running.prompt), running.options)
                running.has_tables = True

    def _compact(self) -> None:
        """Moves requests from the highest batch slots to free lower ones, if the next step then covers fewer slots."""
        while self._rows and self.engine.shapes.bucket(max(self._rows) + 1) > self.engine.shapes.bucket(
            len(self._rows)
        ):
            source = max(self._rows)
            taken = {*self._rows, self._queue.row} if self._queue.request else self._rows
            place = next((row for row in range(source) if row not in taken), None)
            if place is None:
                return  # the only lower row belongs to the prompt that is being prefilled
            self._rows[place] = self._rows.pop(source)
            self.engine.move(source, place)
            self._disturbed = True

    def _collect(self, step: InFlightStep) -> dict[Request, list[int]]:
        """Reads the results of a step, and frees the batch slots of requests that ended. Returns the new tokens."""
        waited = self.engine.runner.depth == 1 or not self.engine.ring.ready(step.sequence)
        results = self.engine.ring.read(step.sequence, max(step.requests) + 1)
        self._report(step, results, self._clock.arrived(waited))
        emitted: dict[Request, list[int]] = {}
        fed = feeds_drafts(self.engine.modules.proposer)
        for row, request in sorted(step.requests.items()):
            if request.finish_reason is not None:
                continue  # it ended in a step that was read after this one was launched
            emitted[request] = tokens = request.record(results[row], step.k, feeds_drafts=fed)
            top = self._calls[request].top_logprobs
            if top is not None:
                logprobs, pairs = self.engine.ring.logprobs(step.sequence, row, len(tokens), top)
                request.logprobs += logprobs
                request.top_logprobs += pairs
            if request.finish_reason is not None:
                self._free_row(request, running=results[row].finish == RUNNING)
                self._end(request, request.finish_reason)
        return emitted

    def _report(self, step: InFlightStep, results: list[RowResult], seconds: float | None) -> None:
        """Reports a step to the draft length policy of its call. Steps that several calls share are not reported.

        Args:
            step: the step.
            results: result of each batch slot.
            seconds: result of `StepTimer.arrived`.
        """
        going = {row for row, request in step.requests.items() if request.finish_reason is None}
        calls = {self._calls[step.requests[row]] for row in going}
        policy = calls.pop().policy if len(calls) == 1 else None
        if policy is None or step.first_token or constrained(step.requests):
            return  # the grammar determined the drafts of this step, or it was for first tokens only
        accepted = {row: results[row].accepted for row in sorted(going) if results[row].accepted >= 0}
        drafting = tuple(count for row, count in accepted.items() if row in step.drafting)
        quiet = self.engine.share_seconds(seconds if step.timed else None)
        policy.observe(Observation(step.k, step.bucket, drafting, quiet, step.resumed, len(accepted)))


class StepTimer:
    """Measures the time of steps with a clock of the host, as the time between the arrivals of two results.

    Args:
        ahead: True if steps are launched before earlier results are read, so that the device works while the caller
            processes results.
        clock: function that returns the current time in seconds. `time.thread_time` counts the time of one thread only:
            then a result that another thread got has no time.
    """

    def __init__(self, ahead: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._ahead = ahead
        self._clock = clock
        self._of_thread = clock is time.thread_time
        self._thread = 0  # thread that got the last result
        self._last: float | None = None
        self._left = 0.0
        self._away = 0.0

    def leave(self) -> None:
        """Records the time at which the scheduler yields control to the caller, which processes the tokens."""
        self._left = self._clock()

    def back(self) -> None:
        """Records that the scheduler has control again."""
        self._away += self._clock() - self._left

    def arrived(self, waited: bool) -> float | None:
        """Returns the seconds between this result and the previous one, without time in which the device was idle.

        Returns None for the first result, and if the clock is another thread's. Also returns None if the result may
        have arrived long ago, while the caller had control.

        Args:
            waited: True if the scheduler had to wait for this result.
        """
        now = self._clock()
        thread = get_ident()
        interval = None if self._last is None or (self._of_thread and thread != self._thread) else now - self._last
        self._thread = thread
        away, self._last, self._away = self._away, now, 0.0
        if interval is None or not self._ahead:
            # without steps launched ahead, the device was idle meanwhile
            return None if interval is None else interval - away
        return interval if waited or away < _NOTICED * interval else None
