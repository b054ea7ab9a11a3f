"""Errors of a command, as one line on stderr."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fastspec.errors import InvalidLogits, OutOfPages, RankFailed


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What a user can mend becomes one line and exit code 2; everything else stays an error."""
    import torch  # what is done in here needs it; `--help` does without

    try:
        yield
    except OSError as error:  # a file or a folder that cannot be used, a full disk
        if error.errno == errno.EPIPE:  # the reader has gone: no message is needed
            raise
        typer.echo(f"fastspec: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    except (ValueError, MemoryError, OutOfPages, InvalidLogits, RankFailed, torch.OutOfMemoryError) as error:
        typer.echo(f"fastspec: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
