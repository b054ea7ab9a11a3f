"""Routes of the HTTP server. An answer is sent as one JSON body, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

import fastspec
from fastspec.server.access import Access
from fastspec.server.bodies import EventStream, event, note_taken, read_body, unless_gone
from fastspec.server.completions.envelope import Envelope
from fastspec.server.errors import Refusal, failed, no_such
from fastspec.server.field_table import TAKEN
from fastspec.server.fields import Body, Chat, Completion
from fastspec.server.openapi import description
from fastspec.server.request_log import REQUEST_ID, Recorded, record_of
from fastspec.server.responses.routes import response_routes
from fastspec.server.service import Job, Service
from fastspec.server.texts import Answer
from fastspec.server.tokens import Detokenize, Tokenize, detokenized, tokenized
from fastspec.server.weights import UpdateWeights, WeightControl

Route = Callable[[Request], Awaitable[Response]]


def app_of(service: Service, access: Access | None = None) -> ASGIApp:
    """Creates the ASGI application of the server.

    Args:
        service: answers the requests.
        access: rules of access. None: no key is needed, and browser pages of other sites may not read answers.
    """
    access = access or Access()
    app = FastAPI(title="fastspec", version=fastspec.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    meters = service.meters
    noted: set[str] = set()  # names of fields without effect that were logged

    def route(path: str, method: str, answer: Route, *, open_to_all: bool = False) -> None:
        async def answered(request: Request) -> Response:
            try:
                if not open_to_all:
                    request.state.api_key = access.check(request)
                response = await answer(request)
            except Refusal as error:
                response = _refusing(error)
            meters.requests.labels(str(response.status_code)).inc()
            return response

        methods = ["GET", "HEAD"] if method == "GET" else [method]  # uvicorn sends no body to HEAD
        app.add_api_route(path, answered, methods=methods, response_model=None)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": fastspec.__version__})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(meters.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(request: Request) -> Response:
        return JSONResponse(description(access.root_path, weight_updates=access.weight_updates))

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_described(service, name) for name in service.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.check_model(name)
        return JSONResponse(_described(service, name))

    async def complete(request: Request) -> Response:
        return await _answer(service, request, Completion, noted)

    async def chat(request: Request) -> Response:
        return await _answer(service, request, Chat, noted)

    async def tokenize(request: Request) -> Response:
        body = await read_body(service, request, Tokenize)
        return await asyncio.to_thread(lambda: JSONResponse(tokenized(service, body).model_dump()))

    async def detokenize(request: Request) -> Response:
        body = await read_body(service, request, Detokenize)
        return await asyncio.to_thread(lambda: JSONResponse(detokenized(service, body).model_dump()))

    control = WeightControl(service.generator)

    async def update_weights(request: Request) -> Response:
        body = await read_body(service, request, UpdateWeights)
        return JSONResponse((await control.update(body)).model_dump())

    async def weight_version(request: Request) -> Response:
        return JSONResponse(control.version.model_dump())

    async def pause(request: Request) -> Response:
        return JSONResponse((await control.pause(request.query_params.get("mode", "wait"))).model_dump())

    async def resume(request: Request) -> Response:
        return JSONResponse((await control.resume()).model_dump())

    async def is_paused(request: Request) -> Response:
        return JSONResponse(control.paused.model_dump())

    async def sleep(request: Request) -> Response:
        asked = request.query_params
        return JSONResponse((await control.sleep(asked.get("level", "1"), asked.get("mode", "wait"))).model_dump())

    async def wake_up(request: Request) -> Response:
        asked = request.query_params
        if "tags" in asked:
            raise Refusal("tags are not supported: all memory comes back at once; leave tags out", "tags")
        return JSONResponse((await control.wake_up(asked.get("path"), asked.get("version"))).model_dump())

    async def is_sleeping(request: Request) -> Response:
        return JSONResponse(control.sleeping.model_dump())

    async def elsewhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "the handler is registered for this type only"
        refusal = no_such(error.status_code, request.method, request.url.path)
        meters.requests.labels(str(refusal.status)).inc()
        return JSONResponse(refusal.body, refusal.status, headers=error.headers)

    async def unforeseen(request: Request, error: Exception) -> Response:
        """Returns the HTTP response for an unexpected error. uvicorn logs the traceback."""
        refusal = failed(error)
        meters.requests.labels(str(refusal.status)).inc()
        return JSONResponse(refusal.body, refusal.status)

    app.add_exception_handler(HTTPException, elsewhere)
    app.add_exception_handler(Exception, unforeseen)
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    route("/health", "GET", health, open_to_all=True)
    route("/ping", "GET", health, open_to_all=True)
    route("/version", "GET", version)
    route("/metrics", "GET", metrics)
    route("/openapi.json", "GET", openapi)
    route("/tokenize", "POST", tokenize)
    route("/detokenize", "POST", detokenize)
    route("/v1/models", "GET", models)
    route("/v1/models/{name:path}", "GET", model)
    route("/v1/completions", "POST", complete)
    route("/v1/chat/completions", "POST", chat)
    for path, method, answer in response_routes(service, noted):
        route(path, method, answer)
    if access.weight_updates:
        route("/update_weights", "POST", update_weights)
        route("/weight_version", "GET", weight_version)
        route("/pause", "POST", pause)
        route("/resume", "POST", resume)
        route("/is_paused", "GET", is_paused)
        route("/sleep", "POST", sleep)
        route("/wake_up", "POST", wake_up)
        route("/is_sleeping", "GET", is_sleeping)

    async def below_root(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": access.root_path}, receive, send)

    return Recorded(below_root if access.root_path else app, access.observers)


def _refusing(error: Refusal) -> Response:
    retry = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body, error.status, headers=retry)


def _described(service: Service, name: str) -> dict[str, Any]:
    """Returns the entry of /v1/models for one name of the model, with vLLM's fields."""
    permission = {
        "id": f"modelperm-{uuid.uuid5(uuid.NAMESPACE_URL, name).hex}",
        "object": "model_permission",
        "created": service.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    shared = {"id": name, "object": "model", "created": service.created, "owned_by": "fastspec"}
    more = {"root": service.name, "parent": None, "max_model_len": service.generator.max_length}
    return shared | more | {"permission": [permission]}


async def _answer(service: Service, request: Request, kind: type[Body], noted: set[str]) -> Response:
    body = await read_body(service, request, kind)
    note_taken(body.taken, TAKEN, noted)
    if body.stream_options is not None and not body.stream:
        raise Refusal("stream_options needs stream=true", "stream_options")
    job = await service.start(body, request.state.api_key)
    record_of(request.scope).job = job
    envelope = Envelope(body, service)
    if body.stream:
        return EventStream(_events(job, envelope), job.close)
    try:
        return await _whole(job, envelope, request)
    finally:
        job.close()


async def _whole(job: Job, envelope: Envelope, request: Request) -> Response:
    """Returns the response with all answers, when they are complete. Raises Refusal if the client disconnects."""
    texts = await unless_gone(_texts(job), request)
    chosen, usage = best_of(texts, envelope.drawn, envelope.num_answers), job.usage()
    # log-probabilities of a long prompt take seconds: in a thread they delay no other request
    return await asyncio.to_thread(lambda: JSONResponse(envelope.whole(chosen, usage)))


def best_of(texts: list[tuple[Answer, str, str]], drawn: int, num_answers: int) -> list[tuple[Answer, str, str]]:
    """Keeps the best answers of each prompt, and renumbers them.

    The best ones have the largest mean log-probability per token.

    Args:
        texts: (answer, its text, its finish reason) for each answer. The answers of one prompt are adjacent.
        drawn: number of answers that were decoded for each prompt.
        num_answers: number of answers to keep for each prompt.
    """
    if drawn == num_answers:
        return texts
    chosen: list[tuple[Answer, str, str]] = []
    for start in range(0, len(texts), drawn):
        ordered = sorted(texts[start : start + drawn], key=lambda one: one[0].mean_logprob, reverse=True)
        chosen += ordered[:num_answers]
    for index, (answer, _, _) in enumerate(chosen):
        answer.index = index
    return chosen


async def _texts(job: Job) -> list[tuple[Answer, str, str]]:
    return await asyncio.gather(*(_text(job, answer) for answer in job.answers))


async def _text(job: Job, answer: Answer) -> tuple[Answer, str, str]:
    pieces = [piece async for piece in job.pieces(answer)]
    return answer, "".join(piece.text for piece in pieces), str(pieces[-1].reason)


async def _events(job: Job, envelope: Envelope) -> AsyncIterator[bytes]:
    try:
        async for answer, piece in job.merged():
            # in a thread for the same reason as in `_whole`
            scored = envelope.scores_prompt(answer)
            found = await asyncio.to_thread(envelope.piece, answer, piece) if scored else envelope.piece(answer, piece)
            for one in found:
                yield event(one | {"usage": job.usage()} if envelope.always_usage else one)
        if envelope.with_usage:
            yield event(envelope.last(job.usage()))
        yield b"data: [DONE]\n\n"
    except Refusal as error:  # the HTTP status is already sent, so the error becomes an event
        yield event(error.body)
