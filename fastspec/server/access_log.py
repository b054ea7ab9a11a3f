"""The access log: one line for each request, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Final

from fastspec.server.request_record import RequestRecord

LEVELS: Final = ("debug", "info", "warning", "error")
ACCESS_LOGS: Final = ("text", "json", "off")
_ACCESS: Final = "fastspec.access"


class AccessLog:
    """Writes a line for each request to the logger "fastspec.access".

    Args:
        as_json: write JSON objects; else `name=value` pairs.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json, self._logger = as_json, logging.getLogger(_ACCESS)

    def __call__(self, record: RequestRecord) -> None:
        """Writes the line of an ended request."""
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
    """A value without spaces and control characters, which a client may have sent to forge a line."""
    text = "-" if value is None else str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


def set_up_logging(level: str) -> None:
    """Sends the log of the server to stderr.

    Args:
        level: one of LEVELS.
    """
    chosen = logging.getLevelName(level.upper())
    for name, form in (("fastspec", "fastspec: %(message)s"), (_ACCESS, "%(message)s"), ("uvicorn", "%(message)s")):
        logger, handler = logging.getLogger(name), logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(form))
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(max(chosen, logging.WARNING) if name == "uvicorn" and chosen > logging.DEBUG else chosen)
