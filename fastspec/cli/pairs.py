"""`fastspec pairs`: lists draft models that fit a target, from a table in the package."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

import typer

from fastspec.cli.output import write_text
from fastspec.models.pairs import GROUPS, natural_pairs


def pairs(
    model: Annotated[
        str | None, typer.Argument(help="Directory, GGUF file or Hub id. Default: the whole table.")
    ] = None,
) -> None:
    """Lists draft models for a target: smaller models with the same tokenizer, then others. Needs no network."""
    if model is None:
        for group in GROUPS:
            write_text(f"{group.name}: {', '.join(name for name, _ in group.models)}\n")
        return
    found = natural_pairs(model)
    if found is None:
        known = ", ".join(group.name for group in GROUPS)
        near = get_close_matches(model, [name for group in GROUPS for name, _ in group.models], 1, 0.8)
        meant = f"; did you mean {near[0]}?" if near else ";"
        typer.echo(
            f"fastspec: no pair is known for {model}{meant} the table has {known}. Any smaller model with the same "
            "tokenizer fits, and so does --proposer ngram, which needs none",
            err=True,
        )
        raise typer.Exit(2)
    write_text(f"{found}\n")
