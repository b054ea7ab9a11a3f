"""`Handle` of one request, and `Delivery`, which passes tokens from the thread that makes steps to waiting threads."""

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
        instead: advice at the end of the error message.
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
    """Passes the tokens of one call's requests from the thread that makes steps to the threads that wait.

    Only the thread that makes steps changes a request. There is no queue: tokens are in their requests, and a count
    says how many of them may be read.

    Args:
        requests: requests of the call.

    Attributes:
        counts: number of tokens of each request that may be read, with their log-probabilities.
        begun: number of tokens of each request that were emitted before the generator's own thread took over its steps.
        error: error of the device or of a step that ended the requests. None: no error.
        started, ended: times of `time.perf_counter`. `ended` is None until all requests have ended.
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
        """Makes a request's new tokens, or its end, visible to the threads that wait."""
        with self._changed:
            self.counts[self._places[request]] = len(request.new_tokens)
            self._left -= request.finish_reason is not None
            self._tell(self._left == 0)

    def begin(self) -> None:
        """Counts the tokens that the requests have when the generator's own thread takes over their steps.

        Until then the caller's thread made the steps itself, and read their tokens directly.
        """
        with self._changed:
            self.counts = [len(request.new_tokens) for request in self.requests]
            self.begun = list(self.counts)
            self._left = sum(request.finish_reason is None for request in self.requests)
            self._tell(self._left == 0)

    def fail(self, error: BaseException) -> None:
        """Sets the error that ended the requests."""
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
        """Waits until a request has new tokens, or all have ended. Returns the new version.

        Args:
            version: result of the previous call, 0 in the first one. The call returns at once if anything has
                changed since that version.
            timeout: seconds. None: no limit.

        Raises:
            TimeoutError: nothing changed within `timeout` seconds.
            RuntimeError: this process was forked from the one that makes steps, so no change can come.
        """
        # before taking any lock, which another thread may have held at the fork
        if not self.done and os.getpid() != self._process:
            raise RuntimeError(FORKED)
        with self._changed:
            if not self._changed.wait_for(lambda: self.done or self._version != version, timeout):
                raise TimeoutError(f"no token came for {timeout} s; the request continues; cancel() ends it")
            return self._version

    def follow(self, version: int) -> Iterator[dict[int, list[int]]]:
        """Yields {index of a request: its new tokens} while the generator's own thread makes the steps.

        Tokens that were emitted before this thread took over are left out.

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
        """Waits in an asyncio event loop without blocking it; see `wait`."""
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
    """Handle of one prompt that is being continued. Made by `FastSpecGenerator.submit`.

    Iterate over it to get tokens (`for`, or `async for`), call `result()`, or `await` it. Each of these starts with the
    first token, also if it begins late. Several may run at once, in any thread. If an iteration is left, an `await` is
    cancelled, or the handle is dropped, the request ends early.

    Args:
        call: the checked call with one prompt.
        delivery: delivers the tokens of its request.
        cancel: called to end the request early.
        stats: returns the counts of the call so far.

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
        """Ends the request early. Its row and pages are free after the running step.

        Tokens that were already emitted are kept: `result()` returns them, with the finish reason "cancelled". Does
        nothing if the request has ended.
        """
        if not self.delivery.done:
            self._cancel()

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """Waits for the end. Returns the GenerateOutput that `generate` returns with `return_dict_in_generate`.

        Args:
            timeout: seconds to wait. The request continues after a timeout.

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
        """Yields tokens as they are emitted. Raises the errors of `result`."""
        for start, stop in self.pieces():
            yield from self.call.requests[0].new_tokens[start:stop]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yields index ranges (start, stop) of the new tokens. One or a few steps have added each range.

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
        """Waits for the end in an asyncio event loop; see `result`."""
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
        """Yields tokens in an asyncio event loop."""
        async for start, stop in self.pieces_in_loop():
            for token in self.call.requests[0].new_tokens[start:stop]:
                yield token

    async def pieces_in_loop(self) -> AsyncIterator[tuple[int, int]]:
        """Yields the ranges of `pieces` in an asyncio event loop."""
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
        """Raises the error that ended the request, if one did."""
        self.delivery.check()
        try:
            check_valid(self.call.requests, self.call.options.copies)
        except InvalidLogits as error:
            error.output = output_of(self.call, self._stats())
            raise

    def __del__(self) -> None:
        if hasattr(self, "delivery"):
            self.cancel()
