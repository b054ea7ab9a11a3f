"""Errors that refuse HTTP requests, with the JSON body of OpenAI's API."""

from __future__ import annotations

import re
from typing import Any

from fastspec.grammar.spec import KINDS
from fastspec.inputs.table import OPTIONS

_TOLD = 80  # characters of a path that an error message repeats
# keyword that a message may begin with -> field of the request that set it
_FIELDS = {row.keyword: row.field for row in OPTIONS if not row.field.startswith("-")}


class Refusal(Exception):
    """Error that refuses a request. It has the status and the body of the HTTP answer.

    Args:
        message: text for the client. It names the value that was sent, the allowed values, and the next step.
        field: name of the faulty field of the request's body. None: the error is not about a field.
        status: HTTP status.
        kind: value of `type` in the body, such as "server_error".
        code: value of `code` in the body, such as "model_not_found". None: the error has no code.
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
        self.message, self.field, self.status = message, field, status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": field, "code": code}}

    def renamed(self, message: str, field: str | None) -> Refusal:
        """Returns a copy of this refusal with another message and field, and the same status, type and code."""
        error = self.body["error"]
        return Refusal(message, field, status=self.status, kind=error["type"], code=error["code"])


def of_option(error: Exception, fields: set[str]) -> Refusal:
    """Converts an error of `FastSpecGenerator.submit` about an option to a refusal that names the request's field.

    Args:
        error: error whose message begins with the name of the option.
        fields: names of all fields in the request. The refusal names the one that set the option.
    """
    message = str(error)
    found = re.match(r"(?:option )?(\w+)", message)
    option = found[1] if found else ""
    names = [_FIELDS.get(option, option), *(["structured_outputs"] if option in KINDS else [])]
    return Refusal(message, next((name for name in names if name in fields), None))


def no_such(status: int, method: str, path: str) -> Refusal:
    """Makes the refusal of a request with an unknown path (404), or with a wrong method (405)."""
    path = path[:_TOLD]
    said = f"{method} is not allowed on {path}" if status == 405 else f"there is no {path} here"
    message = f"{said}; GET /openapi.json lists the paths of this server, such as POST /v1/chat/completions"
    return Refusal(message, status=status)


def loading() -> Refusal:
    """Makes the refusal of a request that arrives before the models are loaded."""
    return Refusal("the models are loading; ask again soon", status=503, kind="server_error", code="loading")


def failed(error: Exception) -> Refusal:
    """Makes the refusal of a request that an error of the model or the device stopped. Later requests may succeed."""
    return Refusal(str(error), status=500, kind="server_error", code="generation_failed")


def sleeping() -> Refusal:
    """Makes the refusal of a request that arrives while the model sleeps, which frees its memory."""
    return Refusal("the model sleeps; POST /wake_up first", status=503, kind="server_error", code="sleeping")


def going_down() -> Refusal:
    """Makes the error for a request whose answer is cut off, because the server shuts down."""
    return Refusal("the server ends; ask again when it is back", status=503, kind="server_error", code="shutting_down")


def too_late(seconds: float) -> Refusal:
    """Makes the refusal of a request whose answer took longer than the time limit, `seconds`."""
    message = (
        f"the answer took more than {seconds:g} s and was stopped; ask for fewer tokens, or serve with "
        "--limit seconds=TIME"
    )
    return Refusal(message, status=504, kind="timeout", code="timeout")
