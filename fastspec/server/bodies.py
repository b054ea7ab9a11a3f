"""HTTP bodies: reads request bodies within limits of size and time, and sends answers as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fastspec.server.errors import Refusal
from fastspec.server.field_table import RequestField
from fastspec.server.fields import read
from fastspec.server.request_log import record_of
from fastspec.server.service import Service

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=BaseModel)
_LONG: Final = 2**15  # a body of so many bytes is parsed in another thread than the event loop's
_LOGGER = logging.getLogger("fastspec.server")


async def _data(request: Request, limit: int) -> bytes:
    """Returns the body of a request.

    Raises:
        Refusal: the body has more than `limit` bytes, is compressed, or its type is not JSON.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip()
    # browsers send JSON to another site only after a preflight request, so foreign pages cannot use this server
    if kind.lower() != "application/json":
        raise Refusal(f"content-type must be application/json, got {kind!r}", status=415)
    coding = request.headers.get("content-encoding", "identity").strip()
    if coding.lower() != "identity":
        raise Refusal(f"bodies are read uncompressed, got content-encoding {coding!r}; leave it out", status=415)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refusal(
                f"the body has more than {limit} bytes; shorten it, or serve with --limit body=BYTES", status=413
            )
        parts.append(part)
    return b"".join(parts)


async def read_body(service: Service, request: Request, kind: type[BodyT]) -> BodyT:
    """Reads and checks the JSON body of a request.

    Args:
        service: has the limits of bodies, and the names of the model.
        request: the HTTP request.
        kind: pydantic class of the body.

    Raises:
        Refusal: the body does not arrive in time, is too long, or has an invalid field or an unknown model.
    """
    try:
        data = await asyncio.wait_for(_data(request, service.limits.body), service.limits.seconds)
    except asyncio.TimeoutError:
        raise Refusal("the body did not come in time; send it again", status=408) from None
    except ClientDisconnect:
        raise _client_gone() from None
    # a long body is parsed in a thread, so that other requests do not wait
    body: BodyT = read(kind, data) if len(data) < _LONG else await asyncio.to_thread(read, kind, data)
    name: str | None = getattr(body, "model", None)
    record_of(request.scope).model = name
    if name is not None:
        service.check_model(name)
    return body


def note_taken(given: list[str], rows: Mapping[str, RequestField], noted: set[str]) -> None:
    """Logs the names of request fields that are accepted but change no answer. Each name is logged once.

    Args:
        given: names of such fields in a request.
        rows: rows of `field_table` by field name. They have the reason why a field changes no answer.
        noted: names that were logged before. The new ones are added to it.
    """
    for name in given:
        if name not in noted:
            noted.add(name)
            _LOGGER.info(f"requests have the field {name}, which changes no answer: {rows[name].note}")


async def unless_gone(result: Coroutine[Any, Any, T], request: Request) -> T:
    """Returns the result of a coroutine. If the client disconnects first, cancels it and raises Refusal."""
    task, gone = asyncio.ensure_future(result), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _client_gone()
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _gone(request: Request) -> None:
    """Waits until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _client_gone() -> Refusal:
    return Refusal("the client is gone", status=499)


class EventStream(StreamingResponse):
    """Response that sends server-sent events.

    Args:
        events: yields the bytes of each event.
        ended: function that is called after all events are sent, or after the client has disconnected.
    """

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[], None] = lambda: None) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter turns buffering off in nginx
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events as the HTTP response, then calls the constructor's argument `ended`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


def event(content: Mapping[str, Any]) -> bytes:
    """Formats a JSON object as the bytes of one server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def typed_event(content: Mapping[str, Any]) -> bytes:
    """Formats an event of /v1/responses as bytes: a line with its type, then a line with the JSON object."""
    return f"event: {content['type']}\n".encode() + event(content)
