"""The handle of one request: its tokens while they come, and its result."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator

from fastspec.errors import InvalidLogits
from fastspec.output import GenerateOutput, Stats
from fastspec.scheduling.calls import PreparedCall, check_valid, output_of
from fastspec.scheduling.delivery import Delivery
from fastspec.scheduling.one_process import OfOneProcess


class Handle(OfOneProcess):
    """One prompt that is being continued; made by `FastSpecGenerator.submit`.

    Iterate over it for the tokens (`for`, or `async for`), ask for the `result()`, or `await` it. All of these start
    with the first token, whenever they begin, and several may go on at once, in any thread. A request whose consumer is
    gone ends: where an iteration is left early, an `await` is cancelled, or the handle itself is dropped.

    Args:
        call: the checked call, of one prompt.
        delivery: what its steps have emitted.
        cancel: ends the request.
        stats: counts of the call up to now.

    Attributes:
        call: as above, to be read.
        delivery: likewise.
    """

    instead = "hand on what its result() gives"

    def __init__(
        self, call: PreparedCall, delivery: Delivery, cancel: Callable[[], None], stats: Callable[[], Stats]
    ) -> None:
        self.call, self.delivery = call, delivery
        self._cancel, self._stats = cancel, stats

    @property
    def done(self) -> bool:
        """Whether no more tokens will come."""
        return self.delivery.done

    def cancel(self) -> None:
        """Ends the request before its time; its row and its pages are free after the running step.

        What came before stays there: `result()` gives it, with the finish reason "cancelled". A request that has ended
        stays as it is.
        """
        if not self.delivery.done:
            self._cancel()

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """Waits for the end, and returns what `generate` does with `return_dict_in_generate`.

        Args:
            timeout: seconds to wait. When they are over the request goes on.

        Raises:
            TimeoutError: it has not ended by then.
            InvalidLogits: as in `generate`.
            RuntimeError: a step failed, and with it all requests that were there.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        version = 0
        try:
            while not self.delivery.done:
                version = self.delivery.wait(version, None if limit is None else max(0.0, limit - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(f"the request has not ended within {timeout} s; it goes on, cancel() ends it") from None
        return self._output()

    def __iter__(self) -> Iterator[int]:
        """Tokens, as they come; raises as `result`."""
        for start, stop in self.pieces():
            yield from self.call.requests[0].new_tokens[start:stop]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of the tokens that each step, or a few steps, added to the request; raises as `result`."""
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
        """As `result`."""
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
        """As `__iter__`."""
        async for start, stop in self.pieces_in_loop():
            for token in self.call.requests[0].new_tokens[start:stop]:
                yield token

    async def pieces_in_loop(self) -> AsyncIterator[tuple[int, int]]:
        """As `pieces`, in an event loop."""
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
        """Raises what ended the request, where that was an error."""
        self.delivery.check()
        try:
            check_valid(self.call.requests, self.call.options.copies)
        except InvalidLogits as error:
            error.output = output_of(self.call, self._stats())
            raise

    def __del__(self) -> None:
        if hasattr(self, "delivery"):
            self.cancel()
