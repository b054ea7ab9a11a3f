"""Inputs of a command that need no model: the prompt, and checks of flags before models are loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from fastspec.adaptive.controller import AUTO
from fastspec.grammar.spec import GrammarSpec
from fastspec.sampling.rules import MODES

Prompt = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Text to continue. `-`, or no prompt at all, reads stdin.")
]
PromptFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Continue the text of this file.")]
STDIN = "-"


def read_prompt(prompt: str | None, file: Path | None) -> tuple[str, bool]:
    """Returns (prompt, True if it was read from stdin).

    The text is used unchanged: a final newline is part of the prompt.

    Args:
        prompt: value of `--prompt`. "-" reads stdin. None reads stdin if `file` is None and stdin is not a terminal.
        file: value of `--prompt-file`. None: it is not given.

    Raises:
        typer.BadParameter: both prompts are given, or none. Or the prompt is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise typer.BadParameter("give one of --prompt and --prompt-file", param_hint="--prompt-file")
    if file is not None:
        try:
            return _decoded(file.read_bytes(), "--prompt-file"), False
        except OSError as error:
            raise typer.BadParameter(f"cannot read {file}: {error.strerror}", param_hint="--prompt-file") from None
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


def check_call(given: Mapping[str, Any]) -> None:
    """Refuses values of flags that are invalid for every model.

    Args:
        given: values by the command's parameter names. Missing names are not checked.

    Raises:
        typer.BadParameter: a value is out of range, or two values exclude each other.
    """
    drafts, longest = given.get("num_speculative_tokens", 0), given.get("max_length")
    if drafts != AUTO and drafts < 0:
        _refuse("--num-speculative-tokens", f"must be 0 or more, or {AUTO}; got {drafts}")
    if longest is not None and longest < 2:
        _refuse("--max-length", f"must be at least 2, one token of prompt and one of text; got {longest}")
    new = given.get("max_new_tokens")
    if new is not None and longest is not None and new >= longest:
        _refuse("--max-new-tokens", f"{new} leaves no room for a prompt in --max-length {longest}; lower it")
    copies = given.get("num_return_sequences") or 1
    if copies > 1 and not given["temperature"]:
        _refuse("--num-return-sequences", f"{copies} greedy texts would be equal; give --temperature, too")
    if copies > 1 and given.get("color"):
        _refuse("--color", "shows a single text; leave out --num-return-sequences")
    rule = given.get("verification")
    if rule is not None and rule not in MODES:
        _refuse("--verification", f"must be one of {', '.join(MODES)}; got {rule!r}")


def check_grammar(options: Mapping[str, Any]) -> None:
    """Refuses a grammar that cannot be parsed, or whose library is missing.

    Args:
        options: keyword arguments of `generate`.

    Raises:
        ValueError: an error of `GrammarSpec.read`, or llguidance is not installed.
    """
    grammar = GrammarSpec.read(options)
    if grammar is not None and find_spec("llguidance") is None:
        raise ValueError(grammar.missing_library)


def _refuse(flag: str, message: str) -> None:
    raise typer.BadParameter(message, param_hint=flag)
