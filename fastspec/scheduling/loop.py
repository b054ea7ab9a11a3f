"""Runs the prefill and decode steps of all calls of a generator, in the caller's thread or in a thread of its own.

A call that runs alone runs its steps in its caller's thread. The generator's own thread runs all steps after the first
`submit`, or after the first call that comes while another call runs. From then on several calls are decoded together
in one batch. The thread sleeps while there is no work.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import TypeAlias

from fastspec.distributed.ranks import Ranks
from fastspec.engine.engine import Engine
from fastspec.engine.threads import Threads
from fastspec.scheduling.draft_length import DraftChoice
from fastspec.scheduling.handle import FORKED, Delivery
from fastspec.scheduling.requests import CallPlan, PreparedCall, Request, check_valid, lengths_of
from fastspec.scheduling.scheduler import Scheduler

Emitted: TypeAlias = dict[int, list[int]]  # index of a row in its call -> its new tokens
MakeReady: TypeAlias = Callable[[Engine, int, DraftChoice, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Joining:
    """Message to the generator's thread: add the requests of a call to the batch.

    Attributes:
        call: the checked call.
        delivery: receives the tokens of the call.
    """

    call: PreparedCall
    delivery: Delivery


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """Message to the generator's thread: cancel requests, because nobody waits for them any more.

    Attributes:
        requests: requests to cancel. None: all that have not ended.
    """

    requests: list[Request] | None


@dataclass(frozen=True, slots=True, eq=False)
class Settling:
    """Message to the generator's thread: set an event when there is no work left.

    Attributes:
        settled: event to set. Another thread waits for it.
    """

    settled: threading.Event


Message: TypeAlias = "Joining | Leaving | None"  # None ends the thread


class _Caught:
    """Context that catches any exception raised inside it and stores it in `error`. None: nothing was raised."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> _Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return error is not None


class Loop:
    """Runs all calls of a generator on its scheduler, and owns the generator's thread.

    The thread starts with the first call that is added by `join`. It ends with `close`, or when this object is
    garbage-collected: while the thread sleeps, it has no reference to this object. Any thread and any finaliser may
    send messages.

    Args:
        scheduler: scheduler of the generator. Other code may call its `step` only while it holds `turn`.
        make_ready: captures the steps that a call may need. Called only while no request is decoded. Arguments:
            engine, number of sequences, draft choice, token limit of the longest sequence, and number of tokens of the
            shortest prompt.
        longest: largest number of tokens of a sequence.
        ranks: tensor-parallel ranks, which run every call together. None: one rank. With several ranks, only one call
            runs at a time until the thread has started.
        before_turn: called with all messages before the thread handles them.
        on_end: called with each request that has ended.
        on_close: called after the last step.

    Attributes:
        turn: lock that is held while a step runs.
        deliveries: request that has not ended -> delivery of its tokens.
        paused: True if new calls are held until `resume`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        make_ready: MakeReady,
        longest: int,
        ranks: Ranks | None = None,
        *,
        before_turn: Callable[[list[Message]], None] = lambda messages: None,
        on_end: Callable[[Request], None] = lambda request: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._ranks = ranks or Ranks.alone()
        self._before_turn, self._on_end, self._on_close = before_turn, on_end, on_close
        self._scheduler, self._make_ready, self._longest = scheduler, make_ready, longest
        self.turn = threading.Lock()
        self.deliveries: dict[Request, Delivery] = {}
        self._closed = False
        self._call_ends = threading.Condition()  # held while a call leaves `_calls`
        self._joining = threading.Lock()  # held while a call joins, so that none joins during `close`
        self._calls: set[Delivery] = set()  # deliveries for which callers of `run` wait
        # deliveries of the thread's requests for which somebody waits. Any thread and finaliser changes the set. So
        # only `add` and `discard` change it, which need no lock, and only copies of it are iterated
        self._joined: set[Delivery] = set()
        self._lent = False  # True while `alone` lends the scheduler
        self._settling: list[Settling] = []
        self._messages: SimpleQueue[Message | Settling] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._plans: dict[Hashable, tuple[CallPlan, int]] = {}  # key -> plan, and number of requests that share it
        self._keys: dict[Request, Hashable] = {}
        self._leaving: list[Request] = []
        self._begun = False
        self.paused = False
        self._held: list[Joining] = []  # calls that joined while it was paused
        self._failures = 0  # number of failed steps since the last call joined

    @property
    def running(self) -> bool:
        """True if the generator's own thread runs the steps, not the callers' threads."""
        return self._thread is not None

    @property
    def leads(self) -> bool:
        """True if the other ranks repeat the steps of this rank, so that calls are made only on this rank."""
        return self._ranks.size > 1 and self.running

    @property
    def threads(self) -> Threads | None:
        """Engine's choice of the number of CPU threads. None on a GPU, and after `close`."""
        return None if self._closed else self._scheduler.engine.threads

    @property
    def idle(self) -> bool:
        """True if no request is decoded here and no message waits."""
        return not self.deliveries and self._messages.empty()

    @property
    def _awaited(self) -> bool:
        """True if a call or handle waits for a request that the generator's thread decodes."""
        return any(not each.done for each in self._joined.copy())

    @property
    def called(self) -> bool:
        """True if a call of `run` has not returned."""
        return bool(self._calls)

    @property
    def in_use(self) -> bool:
        """True if a call or a handle has not ended."""
        return self.called or (self._awaited if self.running else not self.idle)

    @property
    def scheduler(self) -> Scheduler:
        """Scheduler of the generator.

        Raises:
            RuntimeError: the generator is closed.
        """
        self.check_open()
        return self._scheduler

    @property
    def engine(self) -> Engine:
        """The engine of the scheduler."""
        return self.scheduler.engine

    def check_open(self) -> None:
        """Raises RuntimeError if the generator is closed, or its thread is in the process that forked this one."""
        if self._closed:
            raise RuntimeError("this generator is closed; make a new one")
        if self._thread is not None and not self._thread.is_alive():
            raise RuntimeError(FORKED)

    @contextmanager
    def alone(self) -> Iterator[Scheduler]:
        """Context in which only the caller uses the scheduler, which it yields. Other calls raise an error.

        Raises:
            RuntimeError: a call or a handle is running, the generator is closed, or other ranks repeat its steps.
        """
        scheduler = self.scheduler
        if self.leads:
            raise RuntimeError("all ranks must make this call, and since rank 0's first submit() they follow rank 0")
        if self._lent or self.in_use:
            raise RuntimeError("this generator is in use by other calls or handles; wait for them, or cancel them")
        self._wait_for_idle()
        if not self.turn.acquire(blocking=False):
            raise RuntimeError("this generator is in use by another call; wait for it")
        try:
            self._lent = True
            if self.in_use or not self.idle:
                raise RuntimeError("this generator is in use by other calls or handles; wait for them, or cancel them")
            yield scheduler
        finally:
            self._lent = False
            self.turn.release()

    def _wait_for_idle(self) -> None:
        """Waits until the generator's thread has no work left.

        After a call ends, its cancelled requests need one more step until they are removed.
        """
        if self.running:
            message = Settling(threading.Event())
            self._messages.put(message)
            message.settled.wait()

    def make_ready(self, requests: list[Request], choice: DraftChoice) -> None:
        """Captures the steps that these requests may need if no other requests are decoded with them."""
        engine = self._scheduler.engine
        self._make_ready(engine, min(len(requests), engine.state.batch), choice, *lengths_of(requests))

    def run(self, call: PreparedCall) -> Generator[Emitted, None, None]:
        """Decodes a call to its end. After one or a few steps, yields {index of a request in the call: its new tokens}.

        Raises:
            RuntimeError: the generator is closed, or a step failed.
            InvalidLogits: no token could be chosen for a request. The other requests are complete.
        """
        if not call.requests:  # no step would come that could end it
            self.check_open()
            return
        delivery = Delivery(call.requests)
        with self._joining:
            self.check_open()
            if self.paused:
                raise RuntimeError("this generator is paused; resume() it, or submit() a request, which waits for that")
            here = not self.in_use and not self.running
            if not here and self._ranks.size > 1 and not self.leads:
                raise RuntimeError("this generator is in use by another call; several ranks make one call at a time")
            self._calls.add(delivery)
        try:
            if here:
                with self._ranks.guarded("generating"):
                    yield from self._step_here(call, delivery)
            else:
                self.join(call, delivery)
                yield from delivery.follow(0)
        finally:
            with self._call_ends:
                self._calls.discard(delivery)
                self._call_ends.notify_all()
            self.leave(call.requests)
        check_valid(call.requests, call.options.copies)

    def _step_here(self, call: PreparedCall, delivery: Delivery) -> Iterator[Emitted]:
        """Runs a call's steps in the caller's thread until the generator's thread takes over. Yields as `run` does."""
        steps = None
        try:
            while True:
                with self.turn:
                    if self.running:
                        break
                    if steps is None:
                        self.make_ready(call.requests, call.choice)
                        steps = self._scheduler.run_call(call.requests, call.options.stop_ids, call.choice)
                        self.deliveries.update(dict.fromkeys(call.requests, delivery))
                    emitted = next(steps, None)
                if emitted is None:
                    return
                yield emitted
            if steps is None:
                self.join(call, delivery)
            yield from delivery.follow(0 if steps is None else delivery.wait(0))
        finally:
            if steps is not None:
                steps.close()

    def join(self, call: PreparedCall, delivery: Delivery) -> None:
        """Gives a call to the generator's thread, and starts that thread if necessary.

        Every thread may use this method.

        Raises:
            OutOfPages: a request needs more pages than the KV cache has.
            RuntimeError: the generator is closed.
        """
        with self._joining:
            for request in call.requests:
                self.scheduler.check(request)
            if self._thread is None:
                inbox, reference = self._messages, weakref.ref(self)
                thread = threading.Thread(target=_work, args=(inbox, reference), name="fastspec-steps", daemon=True)
                weakref.finalize(self, _end, inbox, thread)
                thread.start()
                # set after the start, so that other threads see either no thread or a running one
                self._thread = thread
            if self.paused:
                self._held.append(Joining(call, delivery))
                return
            self._joined.add(delivery)
            self._messages.put(Joining(call, delivery))

    def abort(self) -> None:
        """Cancels all requests that have not ended, and waits for their end. They keep their output tokens."""
        self.check_open()
        with self._joining:
            for each in self._held:
                _cancelled(each)
            self._held.clear()
        self._abort_running()

    def _abort_running(self) -> None:
        """Cancels all requests except those that are held until `resume`."""
        if self._thread is None:  # a caller makes the steps, and ends its requests with the next one
            for request in list(self.deliveries):
                self._scheduler.cancel(request)
            return
        self._messages.put(Leaving(None))
        self._wait_for_joined()

    def pause(self, *, abort: bool = False) -> None:
        """Holds new calls until `resume`, and waits until all earlier requests have ended.

        Args:
            abort: True to cancel the earlier requests now. They keep their output tokens.
        """
        with self._joining:
            self.check_open()
            self.paused = True
        if abort:
            self._abort_running()
        self._wait_for_joined()
        with self._call_ends:
            self._call_ends.wait_for(lambda: not self._calls)

    def resume(self) -> None:
        """Starts the calls that were held since `pause`, in the order of their arrival."""
        with self._joining:
            self.check_open()
            self.paused, held, self._held = False, self._held, []
            for each in held:
                self._joined.add(each.delivery)
                self._messages.put(each)

    def _wait_for_joined(self) -> None:
        """Waits for the end of all requests that the generator's thread has got so far."""
        for delivery in list(self._joined):
            version = 0
            while not delivery.done:
                version = delivery.wait(version)

    def leave(self, requests: list[Request]) -> None:
        """Cancels those of a call's requests that have not ended. Any thread and any finaliser may call it."""
        for each in [each for each in self._held if each.call.requests is requests]:
            with suppress(ValueError):  # it has joined meanwhile
                self._held.remove(each)
                _cancelled(each)
                return
        for delivery in self._joined.copy():
            if delivery.requests is requests:
                self._joined.discard(delivery)
        if self._thread is not None:
            self._messages.put(Leaving(requests))
            return
        for request in requests:
            self.deliveries.pop(request, None)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Context for a rank that repeats the steps of rank 0: it calls `make_turn`. Other methods raise an error.

        Raises:
            RuntimeError: a call is running on this rank, or the generator is closed.
        """
        with self._joining, self.alone():
            yield

    def close(self) -> None:
        """Cancels handles, ends the thread, waits for the device, and frees the scheduler with all its buffers.

        Further calls do nothing.

        Raises:
            RuntimeError: a call is still running.
        """
        with self._joining:
            if self._closed:
                return
            if self._calls or not (self.running or self.turn.acquire(blocking=False)):
                raise RuntimeError("this generator is in use by another call; close it after that call")
            self._closed = True
        engine = self._scheduler.engine
        try:
            self._stop()
            self._on_close()
            engine.close()
        finally:
            if not self.running:
                self.turn.release()
            self._ranks.close()

    def _stop(self) -> None:
        """Cancels all requests, waits for the end of the thread, and frees the scheduler."""
        if self._thread is not None:
            _end(self._messages, self._thread)
        while not self._messages.empty():
            message = self._messages.get_nowait()
            if isinstance(message, Joining):
                message.delivery.fail(RuntimeError("this generator was closed"))
        for each in self._held:
            each.delivery.fail(RuntimeError("this generator was closed"))
        self._held.clear()
        self._joined.clear()
        self._plans.clear()
        del self._scheduler, self._make_ready, self._before_turn

    def work(self, first: Message | Settling) -> bool:
        """Handles messages and runs steps until there is no work. Returns False if the thread must end.

        Args:
            first: the message that woke the thread.
        """
        messages: list[Message] = []
        self._sort(first, messages)
        with self.turn:
            self._take_over()
        while True:
            while not self._messages.empty():  # only this thread takes messages
                self._sort(self._messages.get_nowait(), messages)
            with _Caught() as caught:
                self._before_turn(messages)
            if caught.error is not None:
                self._refuse(messages, caught.error)
                self._tell_settled()
                return None not in messages
            self.make_turn(messages)
            if None in messages:
                self._tell_settled()
                return False
            # the step after a failed one frees what its requests used; if that fails, too, there is nothing left to try
            if self._messages.empty() and (self._scheduler.idle or self._failures > 1):
                self._tell_settled()
                return True
            messages = []

    def _sort(self, message: Message | Settling, messages: list[Message]) -> None:
        """Appends a message to `messages`, which `make_turn` handles next. Stores a `Settling` message for later."""
        if isinstance(message, Settling):
            self._settling.append(message)
        elif isinstance(message, Leaving) and message.requests is None:
            joining = [request for each in messages if isinstance(each, Joining) for request in each.call.requests]
            messages.append(Leaving([*self.deliveries, *joining]))
        else:
            messages.append(message)

    def _tell_settled(self) -> None:
        settling, self._settling = self._settling, []
        for message in settling:
            message.settled.set()

    def make_turn(self, messages: list[Message]) -> None:
        """Adds and cancels the requests that the messages name, then runs one step of the scheduler."""
        with self.turn:
            for message in messages:
                self._handle(message)
            self._step()

    def _stepping(self) -> AbstractContextManager[None]:
        return self._ranks.stepping() if self._ranks.size > 1 else nullcontext()

    def _refuse(self, messages: list[Message], error: BaseException) -> None:
        """Ends all requests with an error, including the requests that `messages` would have added."""
        joining = [each.delivery for each in messages if isinstance(each, Joining)]
        with self.turn:
            for delivery in dict.fromkeys([*self.deliveries.values(), *joining]):
                self._give_up(delivery, error)

    def _take_over(self) -> None:
        """Takes over requests whose steps ran in a caller's thread before the generator's thread started."""
        if not self._begun:
            self._begun = True
            for delivery in dict.fromkeys(self.deliveries.values()):
                delivery.begin()
            for request in [request for request in self.deliveries if request.finish_reason is not None]:
                self._forget(request)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Joining):
            self._admit(message)
            return
        requests = None if message is None else message.requests
        for request in list(self.deliveries) if requests is None else requests:
            if request in self.deliveries:
                self._scheduler.cancel(request)
                self._leaving.append(request)

    def _admit(self, joining: Joining) -> None:
        call, delivery = joining.call, joining.delivery
        with _Caught() as caught, self._stepping():
            if self._scheduler.idle or not self.deliveries:  # nobody waits for the requests that are left
                self._make_all_ready(call)
            self._scheduler.engine.runner.wait_for_caller()
            for request in call.requests:
                self._scheduler.add(request, self._plan_of(request, call))
                self.deliveries[request] = delivery
        self._failures = 0
        if caught.error is not None:
            self._give_up(delivery, caught.error)

    def _make_all_ready(self, call: PreparedCall) -> None:
        """Captures the steps that a call may need, for all batch sizes and lengths, so that later calls can join it."""
        engine = self._scheduler.engine
        for lengths in dict.fromkeys((lengths_of(call.requests), (self._longest, 0))):
            self._make_ready(engine, engine.state.batch, call.choice, *lengths)

    def _plan_of(self, request: Request, call: PreparedCall) -> CallPlan:
        """Returns the plan of a request. Requests of several calls that need the same kind of steps share one plan.

        Sharing saves work on the host. With "auto" it also lets one controller observe the steps of all these calls.
        """
        choice, stop_ids = call.choice, call.options.stop_ids
        key = (stop_ids, choice.sampler, choice.k, choice.top_logprobs, choice.processed, id(choice.controller))
        plan, count = self._plans.get(key, (None, 0))
        if plan is None:
            if choice.controller is not None:
                choice.controller.begin()
            k = choice.k
            settings = choice.sampler, lambda made: k, choice.top_logprobs, choice.controller
            plan = CallPlan(stop_ids, *settings, joined=True, processed=choice.processed)
        longest, shortest = plan.lengths if count else (0, len(request.prompt))
        plan.lengths = max(longest, request.limit), min(shortest, len(request.prompt))
        self._plans[key], self._keys[request] = (plan, count + 1), key
        return plan

    def _step(self) -> None:
        """Runs one step of the scheduler, and passes its tokens to the waiting threads."""
        with _Caught() as caught, self._stepping():
            emitted = self._scheduler.step()
        if caught.error is not None:
            self._failures += 1
            for delivery in dict.fromkeys(self.deliveries.values()):
                self._give_up(delivery, caught.error)
            return
        for request in emitted:
            self._tell(request)
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self._tell(request)

    def _tell(self, request: Request) -> None:
        delivery = self.deliveries.get(request)
        if delivery is None:
            return
        if request.finish_reason is not None:
            self._forget(request)
        delivery.take(request)
        if delivery.done:
            self._joined.discard(delivery)

    def _forget(self, request: Request) -> None:
        self.deliveries.pop(request, None)
        self._on_end(request)
        key = self._keys.pop(request, None)
        if key in self._plans:
            plan, count = self._plans.pop(key)
            if count > 1:
                self._plans[key] = plan, count - 1

    def _give_up(self, delivery: Delivery, error: BaseException) -> None:
        """Ends all requests of a call with an error."""
        for request in delivery.requests:
            self._scheduler.cancel(request)
            self._forget(request)
        delivery.fail(error)
        self._joined.discard(delivery)


def _cancelled(waiting: Joining) -> None:
    """Marks the requests of a held call as cancelled. The call has not been given to the scheduler."""
    for request in waiting.call.requests:
        request.finish_reason = "cancelled"
        waiting.delivery.take(request)


def _work(messages: SimpleQueue[Message | Settling], reference: weakref.ReferenceType[Loop]) -> None:
    """Handles messages until the loop ends. It is the body of the generator's thread.

    It holds a strong reference to the `Loop` only while there is work, so an idle `Loop` can be garbage-collected.
    """
    goes_on = True
    while goes_on:
        message = messages.get()
        loop = reference()
        goes_on = loop is not None and loop.work(message)
        del loop, message


def _end(messages: SimpleQueue[Message | Settling], thread: threading.Thread) -> None:
    messages.put(None)
    if thread is not threading.current_thread():
        thread.join()
