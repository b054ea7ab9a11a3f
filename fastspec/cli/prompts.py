"""The prompt of `fastspec generate`: an argument, a file, or stdin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Text to continue. `-`, or no prompt at all, reads stdin.")
]
PromptFile = Annotated[
    Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Continue the text of this file.")
]
STDIN = "-"


def read_prompt(prompt: str | None, file: Path | None) -> tuple[str, bool]:
    """The prompt, and True if it was read from stdin.

    The text is used unchanged: a final newline is part of the prompt.

    Args:
        prompt: of `--prompt`; "-" reads stdin, and so does None without a file if stdin is no terminal.
        file: of `--prompt-file`.

    Raises:
        typer.BadParameter: two prompts, none, or one that is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise typer.BadParameter("give one of --prompt and --prompt-file", param_hint="--prompt-file")
    if file is not None:
        return _decoded(file.read_bytes(), "--prompt-file"), False
    if prompt not in (None, STDIN):
        return str(prompt), False
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise typer.BadParameter("no prompt; give --prompt TEXT, --prompt-file FILE, or a pipe", param_hint="--prompt")
    text = _decoded(sys.stdin.buffer.read(), "stdin")
    if not text:
        raise typer.BadParameter("stdin is empty; give --prompt TEXT or --prompt-file FILE", param_hint="--prompt")
    return text, True


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"byte {error.start} is not UTF-8; save the text as UTF-8", param_hint=source
        ) from None
