"""Writes the model's text to stdout, notes to stderr, and a status line below both."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType

from fastspec.text.terminal import escape_control

GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def write_text(text: str, colour: str = "") -> None:
    """Writes a piece of text to stdout. Control characters are escaped if stdout is a terminal.

    Characters that the encoding of stdout does not have are written as backslash escapes.

    Args:
        text: text of the model, which may contain control characters.
        colour: escape sequence to write before the text. Empty: none.
    """
    if sys.stdout is None:  # stdout was closed before the command began
        return
    if sys.stdout.isatty():
        text = escape_control(text)
    encoding = sys.stdout.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    sys.stdout.write(f"{colour}{text}{_PLAIN}" if colour and text else text)
    sys.stdout.flush()


class StatusLine:
    """Status in the last line of a terminal, while other text scrolls above it. A context manager.

    Writes nothing if stdout or stderr is not a terminal.
    """

    def __init__(self) -> None:
        streams = sys.stdout, sys.stderr
        self._shown = all(each is not None and each.isatty() for each in streams)

    def show(self, text: str) -> None:
        """Replaces the text of the status line."""
        if self._shown:
            columns, rows = shutil.get_terminal_size()
            self._write(f"\x1b7\x1b[{rows};1H\x1b[2K{text[: columns - 1]}\x1b8")

    def __enter__(self) -> StatusLine:
        if self._shown:  # reserve the last line: scroll once, then limit the scrolling region to the lines above it
            rows = shutil.get_terminal_size().lines
            self._write(f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[A")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self.show("")
            self._write("\x1b7\x1b[r\x1b8")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
