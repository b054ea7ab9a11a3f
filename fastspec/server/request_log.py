"""Records of HTTP requests: id, times and token counts. The access log and the traces are made from them."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from fastspec.server.service import Job

LEVELS: Final = ("debug", "info", "warning", "error")
ACCESS_LOGS: Final = ("text", "json", "off")
REQUEST_ID: Final = "x-request-id"  # header of requests and of answers
_ACCESS: Final = "fastspec.access"  # the logger of the access log
_RECORD: Final = "fastspec.record"  # key in the scope of a request
_PROBES: Final = ("/health", "/ping", "/metrics")  # paths that monitoring tools request every few seconds
_ID: Final = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class RequestRecord:
    """Record of one request. Its fields are set while the request is answered.

    Attributes:
        id: id from the header X-Request-Id, else a new one.
        method, path: HTTP method and path.
        headers: headers of the request.
        started: time of arrival, in nanoseconds since the epoch.
        status: HTTP status of the answer. 0: no answer was sent, because the client had disconnected.
        seconds: time from arrival to the end of the answer.
        model: name of the model in the request. None: the request names none.
        job: answers that are decoded for the request. None: none were begun.
    """

    id: str
    method: str
    path: str
    headers: Mapping[str, str]
    started: int = field(default_factory=time.time_ns)
    status: int = 0
    seconds: float = 0.0
    model: str | None = None
    job: Job | None = None

    @property
    def is_usual_probe(self) -> bool:
        """True for a successful request to a path that monitoring tools request every few seconds."""
        return 200 <= self.status < 300 and self.path.endswith(_PROBES)

    def facts(self) -> dict[str, str | int | float | None]:
        """Returns id, path, status, model, token counts and times (seconds) of an ended request, by name.

        A time is None if the request ended before it was known.
        """
        told: dict[str, str | int | float | None] = {
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
        }
        if self.model is not None:
            told["model"] = self.model
        if self.job is not None:
            counts, first = self.job.counts(), self.job.first_token
            queue = self.job.queue_seconds
            told |= {
                "prompt_tokens": counts.prompt,
                "completion_tokens": counts.completion,
                "cached_tokens": counts.cached,
                "drafted_tokens": counts.drafted,
                "accepted_tokens": counts.accepted,
                "queue_seconds": None if queue is None else round(queue, 6),
                "first_token_seconds": None if first is None else round(first, 6),
            }
        return told | {"total_seconds": round(self.seconds, 6)}


def record_of(scope: Scope) -> RequestRecord:
    """Returns the record of a request, which `Recorded` has stored in the request's ASGI scope."""
    record: RequestRecord = scope[_RECORD]
    return record


class Recorded:
    """ASGI middleware: keeps a record of each request, and adds its id to the headers of the answer.

    Args:
        app: application that answers the requests.
        observers: functions that are called with the record of each request after its end.
    """

    def __init__(self, app: ASGIApp, observers: Sequence[Callable[[RequestRecord], None]]) -> None:
        self._app, self._observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the wrapped application, then calls the observers with the request's record."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, start = Headers(scope=scope), time.perf_counter()
        given = headers.get(REQUEST_ID, "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(name, scope["method"], scope["path"], headers)
        scope[_RECORD] = record

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (REQUEST_ID.encode(), record.id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            record.seconds = time.perf_counter() - start
            for observer in self._observers:
                observer(record)


class AccessLog:
    """Writes a line for each request to the logger "fastspec.access".

    Args:
        as_json: True writes JSON objects; False writes `name=value` pairs.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json, self._logger = as_json, logging.getLogger(_ACCESS)

    def __call__(self, record: RequestRecord) -> None:
        """Writes the log line of an ended request."""
        level = logging.DEBUG if record.is_usual_probe else logging.INFO
        if not self._logger.isEnabledFor(level):
            return
        facts = record.facts()
        if self._as_json:
            self._logger.log(level, json.dumps(facts, ensure_ascii=True, separators=(",", ":")))
            return
        shown = (f"{name}={_word(value)}" for name, value in facts.items() if name not in ("method", "path", "status"))
        self._logger.log(level, f"{record.method} {_word(record.path)} {record.status} {' '.join(shown)}")


def _word(value: object) -> str:
    """Formats a value for a line of the access log. None becomes a dash.

    A text with spaces or control characters is written as a JSON string, so that a client cannot forge a line.
    """
    text = "-" if value is None else str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


def set_up_logging(level: str) -> None:
    """Sends the logs of the server and of uvicorn to stderr.

    Args:
        level: lowest level that is logged, one of LEVELS. uvicorn logs at least warnings, and more only with "debug".
    """
    chosen = logging.getLevelName(level.upper())
    for name, form in (("fastspec", "fastspec: %(message)s"), (_ACCESS, "%(message)s"), ("uvicorn", "%(message)s")):
        logger, handler = logging.getLogger(name), logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(form))
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(max(chosen, logging.WARNING) if name == "uvicorn" and chosen > logging.DEBUG else chosen)
