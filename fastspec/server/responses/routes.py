"""Routes of /v1/responses and /v1/conversations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from fastspec.server.bodies import EventStream, note_taken, read_body, typed_event, unless_gone
from fastspec.server.errors import Refusal
from fastspec.server.field_table import RESPONSE_TAKEN
from fastspec.server.request_log import record_of
from fastspec.server.responses.answer import ResponseBuilder, Sent
from fastspec.server.responses.background import BackgroundRun
from fastspec.server.responses.body import AskedChat, Metadata, ResponseBody
from fastspec.server.responses.items import Item
from fastspec.server.responses.store import StoredConversation, StoredResponse, checked, listed, page_of, with_ids
from fastspec.server.responses.truncate import dropped
from fastspec.server.service import Job, Service

Route: TypeAlias = tuple[str, str, Callable[[Request], Awaitable[Response]]]
_PAGE: Final = ("limit", "20"), ("order", "desc"), ("after", None)
_LOGGER = logging.getLogger("fastspec.server")


class NewConversation(BaseModel):
    """Body of POST /v1/conversations."""

    model_config = ConfigDict(extra="forbid", strict=True)

    items: list[dict[str, Any]] | None = None
    metadata: Metadata | None = None


class NewItems(BaseModel):
    """Body of POST /v1/conversations/{id}/items."""

    model_config = ConfigDict(extra="forbid", strict=True)

    items: Annotated[list[dict[str, Any]], Field(min_length=1)]


class NewMetadata(BaseModel):
    """Body of POST /v1/conversations/{id}."""

    model_config = ConfigDict(extra="forbid", strict=True)

    metadata: Metadata | None


@dataclass(slots=True)
class ResponseTurn:
    """One request of /v1/responses, with the conversation that it continues.

    Attributes:
        body: body of the request.
        owner: API key of the request. None: it had none.
        before: items of the conversation so far.
        given: items of the request.
        conversation: stored conversation to which the items of the request and of the answer are added. None: there is
            none.
        without: indices in `[*before, *given]` of the items that are dropped, because the context has no room for them.
    """

    body: ResponseBody
    owner: str | None
    before: tuple[Item, ...]
    given: list[Item]
    conversation: StoredConversation | None
    without: frozenset[int] = frozenset()

    @property
    def asked(self) -> AskedChat:
        """The chat to which the request is converted."""
        return self.body.asked(self.before, self.given, self.without)

    @property
    def inputs(self) -> tuple[Item, ...]:
        """Items that the model reads, without the dropped ones."""
        return tuple(item for at, item in enumerate((*self.before, *self.given)) if at not in self.without)

    async def fit(self, service: Service) -> None:
        """Drops the oldest items until prompt and `max_output_tokens` fit, if the request has `truncation="auto"`."""
        if self.body.truncation != "auto":
            return
        room = service.generator.max_length - (self.body.max_output_tokens or 1)

        def fits(without: frozenset[int]) -> bool:
            return _tokens(service, self.body.asked(self.before, self.given, without)) <= room

        self.without = await asyncio.to_thread(dropped, [*self.before, *self.given], fits)


def response_routes(service: Service, noted: set[str]) -> Iterator[Route]:
    """Yields (path, HTTP method, handler) of each route of /v1/responses and /v1/conversations.

    Args:
        service: decodes the answers.
        noted: names of fields without effect that were logged, see `note_taken`.
    """
    store = service.responses

    async def respond(request: Request) -> Response:
        return await _respond(service, request, noted)

    async def count(request: Request) -> Response:
        turn = _turn(service, await read_body(service, request, ResponseBody), request.state.api_key)
        await turn.fit(service)
        number = await asyncio.to_thread(lambda: _tokens(service, turn.asked))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": number})

    async def response(request: Request) -> Response:
        found, query = _stored(service, request), request.query_params
        if query.get("stream", "false") == "false":
            return JSONResponse(found.body)
        if found.run is None:
            raise Refusal("stream: only responses of background=true are streamed again; leave it out", "stream")
        after = query.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal():
            raise Refusal(f"starting_after must be a sequence_number, got {after[:80]!r}", "starting_after")
        return EventStream(_bytes(found.run, int(after)))

    async def cancel(request: Request) -> Response:
        found = _stored(service, request)
        if found.run is None:
            raise Refusal(
                "only responses of background=true can be cancelled; to stop another one, close its connection", "id"
            )
        found.run.cancel()
        await found.run.end()
        return JSONResponse(found.body)

    async def inputs(request: Request) -> Response:
        return JSONResponse(page_of(_stored(service, request).inputs, **_page(request)))

    async def forget(request: Request) -> Response:
        id = request.path_params["id"]
        store.delete(id, request.state.api_key)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    yield "/v1/responses", "POST", respond
    yield "/v1/responses/input_tokens", "POST", count
    yield "/v1/responses/{id}", "GET", response
    yield "/v1/responses/{id}", "DELETE", forget
    yield "/v1/responses/{id}/cancel", "POST", cancel
    yield "/v1/responses/{id}/input_items", "GET", inputs
    yield from _conversation_routes(service)


def _conversation_routes(service: Service) -> Iterator[Route]:
    store = service.responses

    def found(request: Request) -> StoredConversation:
        return store.conversation(request.path_params["id"], request.state.api_key)

    async def begin(request: Request) -> Response:
        body = await read_body(service, request, NewConversation)
        made = StoredConversation(body.metadata or {}, request.state.api_key)
        made.add(checked(body.items or []))
        return JSONResponse(store.begin(made).body)

    async def tell(request: Request) -> Response:
        return JSONResponse(found(request).body)

    async def rename(request: Request) -> Response:
        body = await read_body(service, request, NewMetadata)
        conversation = found(request)
        conversation.metadata = body.metadata or {}
        return JSONResponse(conversation.body)

    async def end(request: Request) -> Response:
        id = request.path_params["id"]
        store.end(id, request.state.api_key)
        return JSONResponse({"id": id, "object": "conversation.deleted", "deleted": True})

    async def items(request: Request) -> Response:
        return JSONResponse(page_of(found(request).items, **_page(request)))

    async def add(request: Request) -> Response:
        body = await read_body(service, request, NewItems)
        conversation = found(request)
        new = checked(body.items)
        _with_room(service, conversation, "items")
        conversation.add(new)
        return JSONResponse(page_of(new, limit=str(min(100, len(new))), order="asc", after=None))

    async def item(request: Request) -> Response:
        return JSONResponse(listed(found(request).find(request.path_params["item"])))

    async def remove(request: Request) -> Response:
        conversation = found(request)
        conversation.remove(request.path_params["item"])
        return JSONResponse(conversation.body)

    yield "/v1/conversations", "POST", begin
    yield "/v1/conversations/{id}", "GET", tell
    yield "/v1/conversations/{id}", "POST", rename
    yield "/v1/conversations/{id}", "DELETE", end
    yield "/v1/conversations/{id}/items", "GET", items
    yield "/v1/conversations/{id}/items", "POST", add
    yield "/v1/conversations/{id}/items/{item}", "GET", item
    yield "/v1/conversations/{id}/items/{item}", "DELETE", remove


def _stored(service: Service, request: Request) -> StoredResponse:
    return service.responses.get(request.path_params["id"], request.state.api_key)


def _page(request: Request) -> dict[str, Any]:
    """Returns the keyword arguments of `page_of` that the query of a request sets, or their defaults."""
    return {name: request.query_params.get(name, usual) for name, usual in _PAGE}


def _with_room(service: Service, conversation: StoredConversation, field: str) -> None:
    """Raises Refusal if a conversation has more bytes than a request's body may have. `field`: named by the error."""
    if conversation.size > service.limits.body:
        raise Refusal(
            f"the conversation has {conversation.size} bytes, and at most {service.limits.body} are allowed; delete "
            "items, begin another one, or serve with --limit body=BYTES",
            field,
        )


def _turn(service: Service, body: ResponseBody, owner: str | None) -> ResponseTurn:
    """Combines a request with the items of the stored response or conversation that it continues.

    Args:
        service: has the store of responses and conversations.
        body: body of the request.
        owner: API key of the request. None: it had none.

    Raises:
        Refusal: the response or conversation to continue is not stored here, or is still being generated.
    """
    store, conversation = service.responses, None
    before: tuple[Item, ...] = ()
    if body.background and not store.size:
        raise Refusal(
            "background keeps the response until it is asked for, and this server keeps none; serve with "
            "--response-store N, or send stream=true",
            "background",
        )
    if body.previous_response_id is not None:
        stored = store.get(body.previous_response_id, owner, "previous_response_id")
        if stored.open:
            raise Refusal(
                "the response is still being generated; wait for its end, or cancel it", "previous_response_id"
            )
        before = stored.items
    if body.conversation_id is not None:
        conversation = store.conversation(body.conversation_id, owner, "conversation")
        _with_room(service, conversation, "conversation")
        before = tuple(conversation.items)
    return ResponseTurn(body, owner, before, with_ids(store.resolved(body.items, owner)), conversation)


def _tokens(service: Service, asked: AskedChat) -> int:
    """Returns the number of tokens of a chat's prompt."""
    with asked.naming_items():
        return service.prompt_tokens(asked.chat)


async def _respond(service: Service, request: Request, noted: set[str]) -> Response:
    """Answers a POST to /v1/responses with one body, with a stream of events, or in the background.

    `noted`: see `note_taken`.
    """
    body, owner = await read_body(service, request, ResponseBody), request.state.api_key
    note_taken(body.taken, RESPONSE_TAKEN, noted)
    turn = _turn(service, body, owner)
    held = _Held(turn.conversation)
    try:
        job = await _started(service, turn)
    except BaseException:
        held.let_go()
        raise
    built = ResponseBuilder(body, service.name, stored=service.responses.size > 0 and body.store is not False)
    events = _events(service, turn, job, built)
    if body.background:
        return _in_background(service, turn, job, built, events, held)
    record_of(request.scope).job = job

    async def sent() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield typed_event(event)
        except Refusal as error:  # the HTTP status is already sent, so the error becomes events
            for event in built.failed(error):
                yield typed_event(event)

    async def ended() -> Response:
        async for _ in events:
            pass
        return JSONResponse(built.response)

    def close() -> None:
        job.close()
        held.let_go()

    if body.stream:
        return EventStream(sent(), close)
    try:
        return await unless_gone(ended(), request)
    finally:
        close()


async def _started(service: Service, turn: ResponseTurn) -> Job:
    await turn.fit(service)
    asked = await asyncio.to_thread(lambda: turn.asked)  # converts thousands of items
    with asked.naming_items():
        return await service.start(asked.chat, turn.owner)


class _Held:
    """Locks a conversation for one response, from the constructor to `let_go`.

    Does nothing if the conversation is None.

    Raises:
        Refusal: another response of the conversation is still being generated.
    """

    def __init__(self, conversation: StoredConversation | None) -> None:
        if conversation is not None and conversation.busy:
            raise Refusal(
                "another response of this conversation is still being generated; wait for its end",
                "conversation",
                status=409,
                code="conversation_locked",
            )
        self._conversation = conversation
        if conversation is not None:
            conversation.busy = True

    def let_go(self) -> None:
        """Releases the lock, so that the next response can continue the conversation."""
        if self._conversation is not None:
            self._conversation.busy = False


async def _events(service: Service, turn: ResponseTurn, job: Job, built: ResponseBuilder) -> AsyncIterator[Sent]:
    """Yields the events of a response.

    Before it yields the last events, it stores the response, and adds its items to its conversation.
    """
    for event in built.begin():
        yield event
    reason = ""
    async for answer, piece in job.merged():
        reason = piece.reason or reason
        for event in built.piece(answer, piece):
            yield event
    last = built.end(reason, job.usage())
    if built.response["store"] and not turn.body.background:  # background responses are kept from their start
        service.responses.keep(StoredResponse(built.response, turn.inputs, turn.owner))
    if turn.conversation is not None:
        turn.conversation.add([*turn.given, *built.output])
    for event in last:
        yield event


def _in_background(
    service: Service,
    turn: ResponseTurn,
    job: Job,
    built: ResponseBuilder,
    events: AsyncIterator[Sent],
    held: _Held,
) -> Response:
    """Starts a response in the background. It is completed even if the client disconnects. Returns the HTTP response.

    Args:
        service: has the store for the response.
        turn: the request, with the conversation that it continues.
        job: answers that are decoded for the response.
        built: builder of the response.
        events: yields the events of the response.
        held: lock of the conversation. It is released when the response has ended.
    """

    def ended() -> None:
        held.let_go()
        counts, told = job.counts(), built.response
        _LOGGER.info(
            f"background response {told['id']}: {told['status']}, {counts.prompt} tokens of prompt, "
            f"{counts.completion} of answer"
        )

    run = BackgroundRun(events, built, job, ended)
    service.responses.keep(StoredResponse(built.response, turn.inputs, turn.owner, run))
    if turn.body.stream:
        return EventStream(_bytes(run, -1))
    return JSONResponse(built.response)


async def _bytes(run: BackgroundRun, after: int) -> AsyncIterator[bytes]:
    async for event in run.after(after):
        yield typed_event(event)
