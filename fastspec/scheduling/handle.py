"""`Handle` of one request, and `Delivery`, which passes tokens from the thread that runs steps to waiting threads."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from typing import ClassVar, NoReturn

from fastspec.errors import InvalidLogits, RankFailed
from fastspec.output import GenerateOutput, Stats
from fastspec.scheduling.requests import PreparedCall, Request, check_valid, output_of


class OfOneProcess:
    """Base class of objects with threads, locks or device memory. They cannot be copied or pickled.

    Attributes:
        instead: advice at the end of the error message, in words.
    """

    instead: ClassVar[str] = "make one in each process"

    def __reduce__(self) -> NoReturn:
        """Refuses to copy or pickle the object.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled; {self.instead}")


FORKED = (
    "the thread that makes this generator's steps is in another process, which this one was forked from; make a "
    "generator in each process"
)


class Delivery:
    """Passes the output tokens of one call from the thread that runs steps to the threads that wait for them.

    Only the thread that runs steps changes a request. There is no queue: the tokens stay in `Request.new_tokens`, and
    `counts` says how many of them other threads may read.

    Args:
        requests: requests of the call.

    Attributes:
        counts: for each request, the number of output tokens that may be read, with their log-probabilities.
        begun: for each request, the number of output tokens when the generator's own thread took over its steps.
        error: error that ended the requests. None: no error.
        started: `time.perf_counter` when the call began.
        ended: `time.perf_counter` when the last request ended. None: not all requests have ended.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.counts = [0] * len(requests)
        self.begun = [0] * len(requests)
        self.error: BaseException | None = None
        self.started = time.perf_counter()
        self.ended: float | None = None
        self._places = {request: index for index, request in enumerate(requests)}
        self._left = len(requests)
        self._version = 0
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """True if all requests have ended."""
        return self.ended is not None

    def take(self, request: Request) -> None:
        """Publishes the new tokens of a request, or its end, and wakes the threads that wait."""
        with self._changed:
            self.counts[self._places[request]] = len(request.new_tokens)
            self._left -= request.finish_reason is not None
            self._tell(self._left == 0)

    def begin(self) -> None:
        """Records how many tokens the requests have when the generator's own thread takes over their steps.

        Until then the caller's thread ran the steps itself, and read the tokens directly.
        """
        with self._changed:
            self.counts = [len(request.new_tokens) for request in self.requests]
            self.begun = list(self.counts)
            self._left = sum(request.finish_reason is None for request in self.requests)
            self._tell(self._left == 0)

    def fail(self, error: BaseException) -> None:
        """Marks all requests of the call as ended by an error, and wakes the threads that wait."""
        with self._changed:
            self.error = error
            self._tell(True)

    def _tell(self, ended: bool) -> None:
        if ended and self.ended is None:
            self.ended = time.perf_counter()
        self._version += 1
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def check(self) -> None:
        """Raises RuntimeError if an error has ended the requests. Raises RankFailed if a rank has failed."""
        if isinstance(self.error, RankFailed):
            raise RankFailed(str(self.error)) from self.error
        if self.error is not None:
            raise RuntimeError(
                f"a step failed, which ends all running requests: {self.error}. Submit them again"
            ) from self.error

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Waits until a request has new tokens, or all requests have ended. Returns the new version number.

        Args:
            version: result of the previous call of `wait`; 0 in the first call. `wait` returns at once if anything
                has changed since that version.
            timeout: seconds to wait at most. None: no limit.

        Raises:
            TimeoutError: nothing changed within `timeout` seconds.
            RuntimeError: this process was forked from the one that runs the steps, so no change can come.
        """
        # before taking any lock, which another thread may have held at the fork
        if not self.done and os.getpid() != self._process:
            raise RuntimeError(FORKED)
        with self._changed:
            if not self._changed.wait_for(lambda: self.done or self._version != version, timeout):
                raise TimeoutError(f"no token came for {timeout} s; the request continues; cancel() ends it")
            return self._version

    def follow(self, version: int) -> Iterator[dict[int, list[int]]]:
        """Yields {index of a request in the call: its new tokens} while the generator's own thread runs the steps.

        Tokens that were emitted before that thread took over are left out.

        Args:
            version: see `wait`.

        Raises:
            RuntimeError: see `check`.
        """
        shown = list(self.begun)
        while True:
            counts = list(self.counts)
            emitted = {
                index: request.new_tokens[shown[index] : counts[index]]
                for index, request in enumerate(self.requests)
                if counts[index] > shown[index]
            }
            if emitted:
                shown = counts
                yield emitted
            elif self.done:
                self.check()
                return
            else:
                version = self.wait(version)

    async def wait_in_loop(self, version: int) -> int:
        """Waits like `wait`, but without blocking the asyncio event loop, and without a timeout."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the event loop has been closed, so nobody waits in it
                loop.call_soon_threadsafe(woken.set)

        with self._changed:
            if self.done or self._version != version:
                return self._version
            self._wakers.append(wake)
        try:
            await woken.wait()
        finally:
            with self._changed, suppress(ValueError):
                self._wakers.remove(wake)
        return self._version


class Handle(OfOneProcess):
    """Handle of one running request. Made by `FastSpecGenerator.submit`.

    Iterate over it to get tokens (`for`, or `async for`), call `result()`, or `await` it. Each of these starts with the
    first output token, even if it begins late. Several may run at once, in any thread. The request ends early if an
    iteration is left, an `await` is cancelled, or the handle is deleted.

    Args:
        call: the checked call, which has one prompt.
        delivery: passes on the tokens of the request.
        cancel: called to end the request early.
        stats: returns the statistics of the call so far.

    Attributes:
        call, delivery: the arguments.
    """

    instead = "pass its result() instead"

    def __init__(
        self, call: PreparedCall, delivery: Delivery, cancel: Callable[[], None], stats: Callable[[], Stats]
    ) -> None:
        self.call, self.delivery = call, delivery
        self._cancel, self._stats = cancel, stats

    @property
    def done(self) -> bool:
        """True if no more tokens will come."""
        return self.delivery.done

    def cancel(self) -> None:
        """Ends the request early. Its batch slot and KV cache pages are freed after the running step.

        Tokens that were already emitted are kept: `result()` returns them, with the finish reason "cancelled". Does
        nothing if the request has ended.
        """
        if not self.delivery.done:
            self._cancel()

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """Waits for the end of the request. Returns what `generate` returns with `return_dict_in_generate=True`.

        Args:
            timeout: seconds to wait at most. None: no limit. The request continues after a timeout.

        Raises:
            TimeoutError: the request has not ended within `timeout` seconds.
            InvalidLogits: see `generate`.
            RuntimeError: a step failed, which ends all running requests.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        version = 0
        try:
            while not self.delivery.done:
                version = self.delivery.wait(version, None if limit is None else max(0.0, limit - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(
                f"the request has not ended within {timeout} s; it continues; cancel() ends it"
            ) from None
        return self._output()

    def __iter__(self) -> Iterator[int]:
        """Yields output token ids as they are emitted. Raises the errors of `result`."""
        for start, stop in self.pieces():
            yield from self.call.requests[0].new_tokens[start:stop]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yields index ranges (start, stop) of `Request.new_tokens`, each with the tokens of one or a few steps.

        The request is cancelled if the iteration is left early. Raises the errors of `result`.
        """
        shown, version = 0, 0
        try:
            while not self.delivery.done or shown < self.delivery.counts[0]:
                version = self.delivery.wait(version)
                start, shown = shown, self.delivery.counts[0]
                if shown > start:
                    yield start, shown
        finally:
            self.cancel()
        self._check()

    def __await__(self) -> Generator[object, None, GenerateOutput]:
        """Waits for the end of the request in an asyncio event loop. For the result and errors see `result`."""
        return self._result().__await__()

    async def _result(self) -> GenerateOutput:
        version = 0
        try:
            while not self.delivery.done:
                version = await self.delivery.wait_in_loop(version)
        finally:
            self.cancel()
        return self._output()

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yields output token ids in an asyncio event loop as they are emitted."""
        async for start, stop in self.pieces_in_loop():
            for token in self.call.requests[0].new_tokens[start:stop]:
                yield token

    async def pieces_in_loop(self) -> AsyncIterator[tuple[int, int]]:
        """Yields the index ranges that `pieces` yields, in an asyncio event loop."""
        shown, version = 0, 0
        try:
            while not self.delivery.done or shown < self.delivery.counts[0]:
                version = await self.delivery.wait_in_loop(version)
                start, shown = shown, self.delivery.counts[0]
                if shown > start:
                    yield start, shown
        finally:
            self.cancel()
        self._check()

    def _output(self) -> GenerateOutput:
        self._check()
        return output_of(self.call, self._stats())

    def _check(self) -> None:
        """Raises the error that ended the request, if there was one."""
        self.delivery.check()
        try:
            check_valid(self.call.requests, self.call.options.copies)
        except InvalidLogits as error:
            error.output = output_of(self.call, self._stats())
            raise

    def __del__(self) -> None:
        if hasattr(self, "delivery"):
            self.cancel()
