"""Errors in OpenAI's shape."""

from __future__ import annotations

import re
from typing import Any

from fastspec.inputs.table import OPTIONS

# keyword that a message may begin with -> field of the request that set it
_FIELDS = {row.keyword: row.field for row in OPTIONS if not row.field.startswith("-")}


class Refusal(Exception):
    """Refusal of a request.

    Args:
        message: what was got, what was wanted, and the next step.
        field: of the body.
        status: of HTTP.
        kind: OpenAI's type of the error.
        code: OpenAI's code.
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": field, "code": code}}


def of_option(error: Exception, fields: set[str]) -> Refusal:
    """Makes a refusal of an error of `submit`; names the field that set the option."""
    message = str(error)
    found = re.match(r"(?:option )?(\w+)", message)
    name = _FIELDS.get(found[1], found[1]) if found else ""
    return Refusal(message, name if name in fields else None)


def no_such(status: int, method: str, path: str) -> Refusal:
    """Makes a refusal of an unknown path, or of a wrong method."""
    said = f"{method} is not allowed on {path}" if status == 405 else f"there is no {path} here"
    message = (
        f"{said}; this server has GET /v1/models, POST /v1/completions, POST /v1/chat/completions, /health and /metrics"
    )
    return Refusal(message, status=status)


def failed(error: Exception) -> Refusal:
    """Makes a refusal of an error of the model or the device; later requests may succeed."""
    return Refusal(str(error), status=500, kind="server_error", code="generation_failed")


def going_down() -> Refusal:
    """Makes a refusal of an answer that the end of the server cuts off."""
    return Refusal("the server ends; ask again when it is back", status=503, kind="server_error", code="shutting_down")


def too_late(seconds: float) -> Refusal:
    """Makes a refusal of a request whose time is over."""
    message = (
        f"the answer took more than {seconds:g} s and was stopped; ask for fewer tokens, or serve with "
        "--limit seconds=TIME"
    )
    return Refusal(message, status=504, kind="timeout", code="timeout")
