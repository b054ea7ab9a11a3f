"""Responses that are made beside their requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from fastspec.server.errors import Refusal
from fastspec.server.responses.answer import ResponseBuilder, Sent

if TYPE_CHECKING:
    from fastspec.server.service import Job


class BackgroundRun:
    """Makes one response and keeps its events for any number of readers. Belongs to an event loop.

    Args:
        events: all events of the response; raises Refusal where it fails.
        built: builds them.
        job: its answers are cancelled by `cancel`.
        ended: called at the end.
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
        """True until the last event."""
        return not self._task.done()

    def cancel(self) -> None:
        """Cancels the response; one that has ended stays as it is."""
        if self.open:
            self._cancelled = True
            self._job.stop(Refusal("the response was cancelled", status=499))

    async def end(self) -> None:
        """Waits for the last event."""
        await asyncio.shield(self._task)

    async def after(self, number: int) -> AsyncIterator[Sent]:
        """Events with a larger `sequence_number`, while they are made."""
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
            if not self._built.ended:  # by an error of this server, or because its loop ends
                for event in self._built.failed(Refusal("the server made an error; ask again", status=500)):
                    self._add(event)
            self._job.close()
            self._ended()
            asyncio.get_running_loop().call_soon(self._wake)  # when the task has ended

    def _add(self, event: Sent) -> None:
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
