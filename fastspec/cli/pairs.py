"""`fastspec pairs`: lists draft models that fit a target, from a table in the package."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from typing import Annotated

import typer

from fastspec.cli.flags import LOOKUP
from fastspec.cli.output import write_text
from fastspec.models.pairs import GROUPS, natural_pairs

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+(:.+)?)?")  # also with a file: owner/name:file.gguf


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
    if found is None and (wrong := _no_model(model)):
        typer.echo(
            f"fastspec: {wrong}; give a checkpoint directory, a GGUF file, or a Hub id like owner/name", err=True
        )
        raise typer.Exit(2)
    if found is None:
        known = ", ".join(group.name for group in GROUPS)
        near = get_close_matches(model, [name for group in GROUPS for name, _ in group.models], 1, 0.8)
        meant = f"; did you mean {near[0]}?" if near else ";"
        typer.echo(
            f"fastspec: no pair is known for {model}{meant} the table has {known}. Any smaller model with the same "
            f"tokenizer fits. {LOOKUP}",
            err=True,
        )
        raise typer.Exit(2)
    write_text(f"{found}\n")


def _no_model(name: str) -> str | None:
    """Returns the reason why `name` cannot be a model: no such file or directory, or nothing of a model in it.

    Returns None if it may be a model.
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        files = os.listdir(path)
        has_model = "config.json" in files or any(file.endswith(".gguf") for file in files)
        return None if has_model else f"{name} has neither a config.json nor a GGUF file"
    if os.path.isfile(path):
        from fastspec.models.checkpoints.gguf.header import MAGIC  # imports torch, which other names do not need

        with open(path, "rb") as file:
            return None if file.read(len(MAGIC)) == MAGIC else f"{name} is not a GGUF file"
    if _HUB_ID.fullmatch(name):
        return None
    return f"{name} is not a file or directory, and not a Hub id"
