"""Responses that are generated in the background, while no request waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from fastspec.server.errors import Refusal
from fastspec.server.responses.answer import ResponseBuilder, Sent

if TYPE_CHECKING:
    from fastspec.server.service import Job


class BackgroundRun:
    """Generates one response, and keeps its events for any number of readers. Only one event loop may use it.

    Args:
        events: yields all events of the response. Raises Refusal if the response fails.
        built: builder of these events.
        job: answers of the response, which `cancel` cancels.
        ended: function that is called after the last event.
    """

    def __init__(
        self,
        events: AsyncIterator[Sent],
        built: ResponseBuilder,
        job: Job,
        ended: Callable[[], None],
    ) -> None:
        self._made, self._built, self._job, self._ended = events, built, job, ended
        self._events: list[Sent] = []
        self._more, self._cancelled = asyncio.Event(), False
        self._task = asyncio.ensure_future(self._run())

    @property
    def open(self) -> bool:
        """True while the response is generated, so further events may follow."""
        return not self._task.done()

    def cancel(self) -> None:
        """Cancels the response. Does nothing if it has ended."""
        if self.open:
            self._cancelled = True
            self._job.stop(Refusal("the response was cancelled", status=499))

    async def end(self) -> None:
        """Waits until the response has ended, and all its events are kept."""
        await asyncio.shield(self._task)

    async def after(self, number: int) -> AsyncIterator[Sent]:
        """Yields the events whose `sequence_number` is larger than `number`. Waits for further ones until the end."""
        at = number + 1
        while True:
            more, open = self._more, self.open
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if not open:
                return
            await more.wait()

    async def _run(self) -> None:
        try:
            async for event in self._made:
                self._add(event)
        except Refusal as error:
            for event in self._built.cancelled() if self._cancelled else self._built.failed(error):
                self._add(event)
        finally:
            if not self._built.ended:  # an error of this server, or the end of the event loop, has stopped it
                for event in self._built.failed(Refusal("the server failed; ask again", status=500)):
                    self._add(event)
            self._job.close()
            self._ended()
            asyncio.get_running_loop().call_soon(self._wake)  # after the end of this task, so `open` is then False

    def _add(self, event: Sent) -> None:
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
