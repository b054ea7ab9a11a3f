"""Reports errors of a command as one line on stderr, with the names of its flags."""

from __future__ import annotations

import errno
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

from fastspec.errors import InvalidLogits, OutOfPages, RankFailed


@contextmanager
def errors_in_one_line(context: typer.Context | None = None) -> Iterator[None]:
    """Prints an error that the user can fix as one line, and exits with code 2. Prints a warning as one line.

    Other errors keep their traceback.

    Args:
        context: context of the command. It replaces argument names in messages by the command's flags. None: the
            messages stay.
    """
    import torch  # imported here, because `--help` does not need torch

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Prints a warning as one line."""
        clear = "\r\x1b[K" if sys.stderr is not None and sys.stderr.isatty() else ""  # clears the progress line
        typer.echo(f"{clear}{_line(message, context)}", err=True)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    except typer.BadParameter as error:
        if context is not None:
            error.message = _without_flag(in_flags(error.message, context), str(error.param_hint or ""))
        raise
    except OSError as error:  # an unusable file or folder, or a full disk
        if error.errno == errno.EPIPE:  # the reader of a pipe has ended: no message is needed
            raise
        _end(error, None)
    except (ValueError, MemoryError, OutOfPages, InvalidLogits, RankFailed, torch.OutOfMemoryError) as error:
        _end(error, context)


def in_flags(message: str, context: typer.Context) -> str:
    """Replaces argument names in a message by flags of this command: `max_length=9` by `--max-length 9`.

    A name that is also an English word, such as `draft`, is replaced only before `=`.
    """
    flags = {str(each.name): each.opts[0] for each in context.command.params if each.opts[0].startswith("--")}
    if not flags:
        return message

    def flag_of(found: re.Match[str]) -> str:
        name, sets = found[1], found[2]
        return found[0] if not sets and "_" not in name else flags[name] + (" " if sets else "")

    names = "|".join(sorted(flags, key=len, reverse=True))
    return re.sub(rf"(?<![\w.`'\"/-])({names})(?![\w`'\"/])(=(?!=))?", flag_of, message)


def _without_flag(message: str, flag: str) -> str:
    """Removes the flag from the start of a message, because click prints it there itself."""
    return message.removeprefix(f"{flag} ") if flag else message


def _line(message: object, context: typer.Context | None) -> str:
    text = " ".join(str(message).split())
    return f"fastspec: {text if context is None else in_flags(text, context)}"


def _end(error: BaseException, context: typer.Context | None) -> None:
    typer.echo(_line(error, context), err=True)
    raise typer.Exit(2) from None
