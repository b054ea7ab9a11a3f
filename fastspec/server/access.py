"""Access to the server: keys, origins of browser pages, and the path under which a proxy publishes it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from fastspec.server.errors import Refusal
from fastspec.server.request_log import RequestRecord

_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#]+")
_ROOT_PATH: Final = re.compile(r"(/[^/\s?#]+)*")


def check_api_key(key: str) -> None:
    """Raises ValueError if an API key is empty or blank, because no client could send it."""
    if not key.strip():
        raise ValueError("api_key is empty, which lets nobody in; give one, or none")


@dataclass(frozen=True, slots=True)
class Access:
    """Rules of access to a server, and the observers of its requests.

    Attributes:
        api_keys: API keys. Each request must send one of them, except those to /health and /ping. Empty: no request
            needs a key.
        origins: origins of browser pages that may read answers, such as "https://chat.example". "*" is every origin.
        root_path: path that a proxy puts before the paths of this server, such as "/llm".
        observers: functions that are called with the record of each request after its end.
        weight_updates: True if clients with a key may also change the model's weights, pause it and let it sleep.

    Raises:
        ValueError: a key is empty, an origin or the path is malformed, or weight updates are allowed without a key.
    """

    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    root_path: str = ""
    observers: tuple[Callable[[RequestRecord], None], ...] = ()
    weight_updates: bool = False

    def __post_init__(self) -> None:
        for key in self.api_keys:
            check_api_key(key)
        if self.weight_updates and not self.api_keys:
            raise ValueError("weight updates need an api_key: without one anyone could replace the model")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"an origin must be '*' or scheme://host[:port] in small letters and without a path, got {origin!r}"
                )
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ValueError(f"root_path must begin with / and not end with it, got {self.root_path!r}")

    def check(self, request: Request) -> str | None:
        """Checks the API key in the header Authorization, and returns it. Returns None if the server needs no key.

        Raises:
            Refusal: the request has no key, or a wrong one.
        """
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # the scheme may be in upper or lower case (RFC 9110, 11.1); starlette decodes headers as latin-1
        sent = given.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else b""
        # all keys are compared, each in constant time: the duration does not tell how many characters agree
        matches = [secrets.compare_digest(sent, key.encode()) for key in self.api_keys]
        if matches and not any(matches):
            raise Refusal(
                "this server wants its API key: send the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )
        return self.api_keys[matches.index(True)] if matches else None
