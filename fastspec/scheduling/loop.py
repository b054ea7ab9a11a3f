"""The thread that makes steps for requests of any thread, and sleeps while there is nothing to do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from fastspec.scheduling.delivery import FORKED, Delivery
from fastspec.scheduling.messages import Joining, Leaving, Message
from fastspec.scheduling.requests import Call, Request
from fastspec.scheduling.scheduler import Scheduler


class _Caught:
    """A context that keeps the error that ends it, for the threads that wait for the work."""

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
    """A thread that steps a scheduler as long as there is work.

    The thread starts with the first message and ends with `stop`, or when this object is collected: while it sleeps
    it keeps no reference to it. Messages may come from any thread, and from finalisers.

    Args:
        scheduler: others may step it only while they hold `turn`.
        make_ready: captures and times the steps that a call may need; called while no request is there.
        guarded: gives a context in which work on the device is done.
        before_turn: called with all messages before they are handled.
        on_end: called with each request that has ended.

    Attributes:
        turn: lock, held while a step is made.
        deliveries: of all requests that have not ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        make_ready: Callable[[Joining], None],
        *,
        guarded: Callable[[], AbstractContextManager[Any]] = nullcontext,
        before_turn: Callable[[list[Message]], None] = lambda messages: None,
        on_end: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._guarded, self._before_turn, self._on_end = guarded, before_turn, on_end
        self.turn = threading.Lock()
        self.deliveries: dict[Request, Delivery] = {}
        self._scheduler, self._make_ready = scheduler, make_ready
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._calls: dict[Hashable, tuple[Call, int]] = {}  # shared by requests of one kind, and how many those are
        self._keys: dict[Request, Hashable] = {}
        self._leaving: list[Request] = []
        self._begun = False
        self._failures = 0  # steps that failed since the last call came

    @property
    def running(self) -> bool:
        """Whether the thread makes the steps."""
        return self._thread is not None

    def check_here(self) -> None:
        """Raises RuntimeError in a forked child: it has its parent's objects, but not its threads."""
        if self._thread is not None and not self._thread.is_alive():
            raise RuntimeError(FORKED)

    @property
    def idle(self) -> bool:
        """Whether no request is there."""
        return not self.deliveries and self._messages.empty()

    def join(self, joining: Joining) -> None:
        """Adds a call; the first one starts the thread. One caller at a time."""
        if self._thread is None:
            inbox, reference = self._messages, weakref.ref(self)
            thread = threading.Thread(target=_work, args=(inbox, reference), name="fastspec-steps", daemon=True)
            weakref.finalize(self, _end, inbox, thread)
            thread.start()
            self._thread = thread  # last: whoever submits meanwhile sees none, or one that is alive
        self._messages.put(joining)

    def leave(self, requests: list[Request]) -> None:
        """Ends requests, those of them that have not ended; from anywhere, also while an object is being collected."""
        if self._thread is not None:
            self._messages.put(Leaving(requests))
            return
        for request in requests:
            self.deliveries.pop(request, None)

    def stop(self) -> None:
        """Cancels all requests, waits for the end of the thread, and lets the scheduler go; nothing comes after it."""
        if self._thread is not None:
            _end(self._messages, self._thread)
        while not self._messages.empty():
            message = self._messages.get_nowait()
            if isinstance(message, Joining):
                message.delivery.fail(RuntimeError("this generator was closed"))
        self._calls.clear()
        del self._scheduler, self._make_ready, self._before_turn

    def work(self, first: Message) -> bool:
        """Handles messages and makes steps until there is nothing to do; returns whether the thread is to go on.

        Args:
            first: the message that woke the thread.
        """
        messages = [first]
        with self.turn:
            self._take_over()
        while True:
            while not self._messages.empty():  # only this thread takes from it
                messages.append(self._messages.get_nowait())
            with _Caught() as caught:
                self._before_turn(messages)
            if caught.error is not None:
                self._refuse(messages, caught.error)
                return None not in messages
            self.make_turn(messages)
            if None in messages:
                return False
            # after a step that failed, the next one frees what its requests held; if that fails too, nothing else will
            if self._messages.empty() and (self._scheduler.idle or self._failures > 1):
                return True
            messages = []

    def make_turn(self, messages: list[Message]) -> None:
        """Handles messages and makes a step."""
        with self.turn:
            for message in messages:
                self._handle(message)
            self._step()

    def _refuse(self, messages: list[Message], error: BaseException) -> None:
        """Ends all requests, also those that would have joined, with an error."""
        joining = [each.delivery for each in messages if isinstance(each, Joining)]
        with self.turn:
            for delivery in dict.fromkeys([*self.deliveries.values(), *joining]):
                self._give_up(delivery, error)

    def _take_over(self) -> None:
        """Takes over the requests that a caller stepped in its own thread, when this one has just started."""
        if not self._begun:
            self._begun = True
            for delivery in dict.fromkeys(self.deliveries.values()):
                delivery.begin()
            for request in [request for request in self.deliveries if request.finish_reason is not None]:
                self._forget(request)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Joining):
            self._join(message)
            return
        for request in list(self.deliveries) if message is None else message.requests:
            if request in self.deliveries:
                self._scheduler.cancel(request)
                self._leaving.append(request)

    def _join(self, joining: Joining) -> None:
        requests, delivery = joining.call.requests, joining.delivery
        with _Caught() as caught, self._guarded():
            if self._scheduler.idle or not self.deliveries:  # any request that is left then has no consumer
                self._make_ready(joining)
            self._scheduler.engine.runner.wait_for_caller()
            for request in requests:
                self._scheduler.add(request, self._call_of(request, joining))
                self.deliveries[request] = delivery
        self._failures = 0
        if caught.error is not None:
            self._give_up(delivery, caught.error)

    def _call_of(self, request: Request, joining: Joining) -> Call:
        """What the scheduler knows a request's call as: requests that ask for the same kind of steps share one.

        So their steps cost the host no more than those of one call, and "auto" learns from them as from one.
        """
        choice, stop_ids = joining.choice, joining.call.options.stop_ids
        key = (stop_ids, choice.sampler, choice.k, choice.top_logprobs, id(choice.controller))
        call, count = self._calls.get(key, (None, 0))
        if call is None:
            if choice.controller is not None:
                choice.controller.begin()
            k = choice.k
            call = Call(stop_ids, choice.sampler, lambda made: k, choice.top_logprobs, choice.controller, joined=True)
        longest, shortest = call.lengths if count else (0, len(request.prompt))
        call.lengths = max(longest, request.limit), min(shortest, len(request.prompt))
        self._calls[key], self._keys[request] = (call, count + 1), key
        return call

    def _step(self) -> None:
        """One step; tells the deliveries of its requests."""
        with _Caught() as caught, self._guarded():
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

    def _forget(self, request: Request) -> None:
        self.deliveries.pop(request, None)
        self._on_end(request)
        key = self._keys.pop(request, None)
        if key in self._calls:
            call, count = self._calls.pop(key)
            if count > 1:
                self._calls[key] = call, count - 1

    def _give_up(self, delivery: Delivery, error: BaseException) -> None:
        """Ends all requests of a call by an error."""
        for request in delivery.requests:
            self._scheduler.cancel(request)
            self._forget(request)
        delivery.fail(error)


def _work(messages: SimpleQueue[Message], reference: weakref.ReferenceType[Loop]) -> None:
    """What the thread does. It holds the loop only while there is work."""
    goes_on = True
    while goes_on:
        message = messages.get()
        loop = reference()
        goes_on = loop is not None and loop.work(message)
        del loop, message


def _end(messages: SimpleQueue[Message], thread: threading.Thread) -> None:
    messages.put(None)
    if thread is not threading.current_thread():
        thread.join()
