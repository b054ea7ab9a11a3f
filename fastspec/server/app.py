"""Routes of the server. An answer is one body, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import fastspec
from fastspec.server.errors import Refusal, failed, no_such
from fastspec.server.fields import Body, Chat, Completion, read
from fastspec.server.service import Job, Service
from fastspec.server.texts import Answer, Piece

Route = Callable[[Request], Awaitable[Response]]


class Envelope:
    """Builds the bodies around the answers of one request.

    Args:
        body: of the request.
        service: its name and time are in each body.
    """

    def __init__(self, body: Body, service: Service) -> None:
        self.chat = isinstance(body, Chat)
        self.with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._name, self._created = service.name, int(time.time())
        self._begun: set[int] = set()  # answers of which something was sent

    def _whole(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        shared: dict[str, Any] = {"id": self._id, "object": kind, "created": self._created, "model": self._name}
        shared |= {"system_fingerprint": f"fastspec-{fastspec.__version__}", "choices": choices}
        return shared if usage is None else shared | {"usage": usage}

    def whole(self, texts: list[tuple[Answer, str, str]], usage: dict[str, Any]) -> dict[str, Any]:
        """Body with all answers: each has its text and its finish reason."""
        choices = []
        for answer, text, reason in texts:
            count = len(answer.request.new_tokens)
            shared = {"index": answer.index, "finish_reason": reason}
            if self.chat:
                message = {"role": "assistant", "content": text, "refusal": None}
                choices.append({**shared, "message": message, "logprobs": answer.chat_logprobs(0, count)})
            else:
                choices.append({**shared, "text": text, "logprobs": answer.text_logprobs(0, count)})
        return self._whole("chat.completion" if self.chat else "text_completion", choices, usage)

    def piece(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        """Events of a piece: its text, then the finish reason."""
        choices: list[dict[str, Any]] = []
        first = answer.index not in self._begun
        self._begun.add(answer.index)
        shared: dict[str, Any] = {"index": answer.index, "finish_reason": None}
        if self.chat:
            delta = {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
            logprobs = answer.chat_logprobs(piece.start, piece.stop)
            choices.append({**shared, "delta": delta, "logprobs": logprobs})
            end: dict[str, Any] = {"delta": {}, "logprobs": None}
        else:
            logprobs = answer.text_logprobs(piece.start, piece.stop)
            choices.append({**shared, "text": piece.text, "logprobs": logprobs})
            end = {"text": "", "logprobs": None}
        if not piece.text and piece.start == piece.stop and not first:
            choices = []
        if piece.reason is not None:
            choices.append({**shared, **end, "finish_reason": piece.reason})
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        told = {"usage": None} if self.with_usage else {}  # what is to come at the end
        return [self._whole(kind, [one], None) | told for one in choices]

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Last event of a stream, with usage if it was requested."""
        return self._whole("chat.completion.chunk" if self.chat else "text_completion", [], usage)


def app_of(service: Service, api_key: str | None = None) -> FastAPI:
    """Creates the application.

    Args:
        service: answers the requests.
        api_key: that clients must send; None: none. /health is open to all.

    Raises:
        ValueError: the key is empty.
    """
    check_api_key(api_key)
    service.share_answers(api_key)
    app = FastAPI(title="fastspec", version=fastspec.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    meters = service.meters

    def route(path: str, method: str, answer: Route, *, open_to_all: bool = False) -> None:
        async def answered(request: Request) -> Response:
            try:
                if not open_to_all:
                    _check_key(request, api_key)
                response = await answer(request)
            except Refusal as error:
                retry = {"Retry-After": "1"} if error.status == 429 else None
                response = JSONResponse(error.body, error.status, headers=retry)
            meters.requests.labels(str(response.status_code)).inc()
            return response

        app.add_api_route(path, answered, methods=[method], response_model=None)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(meters.registry), media_type=CONTENT_TYPE_LATEST)

    def described() -> dict[str, Any]:
        shared = {"id": service.name, "object": "model", "created": service.created, "owned_by": "fastspec"}
        return shared | {"max_model_len": service.generator.max_length}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [described()]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(described())

    async def complete(request: Request) -> Response:
        return await _answer(service, request, Completion)

    async def chat(request: Request) -> Response:
        return await _answer(service, request, Chat)

    async def elsewhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "it is called for nothing else"
        refusal = no_such(error.status_code, request.method, request.url.path)
        meters.requests.labels(str(refusal.status)).inc()
        return JSONResponse(refusal.body, refusal.status, headers=error.headers)

    async def unforeseen(request: Request, error: Exception) -> Response:
        """Response to an internal error; uvicorn logs the traceback."""
        refusal = failed(error)
        meters.requests.labels(str(refusal.status)).inc()
        return JSONResponse(refusal.body, refusal.status)

    app.add_exception_handler(HTTPException, elsewhere)
    app.add_exception_handler(Exception, unforeseen)
    route("/health", "GET", health, open_to_all=True)
    route("/metrics", "GET", metrics)
    route("/v1/models", "GET", models)
    route("/v1/models/{name:path}", "GET", model)
    route("/v1/completions", "POST", complete)
    route("/v1/chat/completions", "POST", chat)
    return app


def check_api_key(key: str | None) -> None:
    """Raises ValueError for a key that no client could send."""
    if key is not None and not key.strip():
        raise ValueError("api_key is empty, which lets nobody in; give one, or None")


def _check_key(request: Request, key: str | None) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # the scheme has no case (RFC 9110, 11.1); headers are bytes, read as latin-1 on the way
    sent = given.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else b""
    if key is not None and not secrets.compare_digest(sent, key.encode()):
        raise Refusal(
            "this server wants its API key: send the header Authorization: Bearer KEY",
            status=401,
            code="invalid_api_key",
        )


async def _data(request: Request, limit: int) -> bytes:
    """Reads the body, up to a number of bytes."""
    kind = request.headers.get("content-type", "").split(";")[0].strip()
    if kind.lower() != "application/json":  # a page in a browser cannot send this to another site without being asked
        raise Refusal(f"content-type must be application/json, got {kind!r}", status=415)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refusal(
                f"the body has more than {limit} bytes; shorten it, or serve with --limit body=BYTES", status=413
            )
        parts.append(part)
    return b"".join(parts)


async def _answer(service: Service, request: Request, kind: type[Body]) -> Response:
    try:
        data = await asyncio.wait_for(_data(request, service.limits.body), service.limits.seconds)
    except asyncio.TimeoutError:
        raise Refusal("the body did not come in time; send it again", status=408) from None
    except ClientDisconnect:
        raise _client_gone() from None
    body: Body = read(kind, data)
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise Refusal("stream_options needs stream=true", "stream_options")
    job = await service.start(body)
    envelope = Envelope(body, service)
    if body.stream:
        return _Events(job, _events(job, envelope))
    try:
        return await _whole(job, envelope, request)
    finally:
        job.close()


async def _whole(job: Job, envelope: Envelope, request: Request) -> Response:
    """Waits for all answers; cancels them if the client disconnects."""
    texts = asyncio.ensure_future(_texts(job))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([texts, gone], return_when=asyncio.FIRST_COMPLETED)
        if not texts.done():
            raise _client_gone()
        return JSONResponse(envelope.whole(texts.result(), job.usage()))
    finally:
        gone.cancel()
        texts.cancel()


def _client_gone() -> Refusal:
    return Refusal("the client is gone", status=499)


async def _texts(job: Job) -> list[tuple[Answer, str, str]]:
    return await asyncio.gather(*(_text(job, answer) for answer in job.answers))


async def _text(job: Job, answer: Answer) -> tuple[Answer, str, str]:
    pieces = [piece async for piece in job.pieces(answer)]
    return answer, "".join(piece.text for piece in pieces), str(pieces[-1].reason)


async def _gone(request: Request) -> None:
    """Waits until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Events(StreamingResponse):
    """Sends answers as server-sent events. Cancels unfinished answers when the response ends."""

    def __init__(self, job: Job, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter: nginx holds nothing back
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.close()


async def _events(job: Job, envelope: Envelope) -> AsyncIterator[bytes]:
    try:
        async for answer, piece in job.merged():
            for one in envelope.piece(answer, piece):
                yield _event(one)
        if envelope.with_usage:
            yield _event(envelope.last(job.usage()))
        yield b"data: [DONE]\n\n"
    except Refusal as error:  # the status has been sent
        yield _event(error.body)


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
