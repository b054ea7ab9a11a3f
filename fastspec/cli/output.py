"""Text of a model on stdout."""

from __future__ import annotations

import sys

import typer

from fastspec.text.terminal import escape_control


def write_text(text: str) -> None:
    """Writes a piece of text: to a terminal without its control characters, to any encoding what that can show."""
    if sys.stdout is None:  # it was closed before the command began
        return
    if sys.stdout.isatty():
        text = escape_control(text)
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding), nl=False)
