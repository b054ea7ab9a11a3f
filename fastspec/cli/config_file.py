"""`--config FILE`: flags of a command in a TOML file."""

from __future__ import annotations

import sys
from pathlib import Path

import typer


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Makes the entries of a TOML file the defaults of a command's flags. A flag on the command line wins.

    Args:
        context: of the command.
        file: its keys are flags without the leading dashes; None: there is none.

    Raises:
        typer.BadParameter: the file cannot be read, or a key is no flag of the command.
    """
    if file is None:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # a package of the extra `serve`
        import tomli as tomllib
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {file} as TOML: {error}") from None
    # every name of a parameter: "max-length", "max_length", and the argument "target"
    names = {name.lstrip("-"): one for one in context.command.params for name in [*one.opts, *one.secondary_opts]}
    found: dict[str, object] = {}
    for key, value in given.items():
        one = names.get(key.replace("_", "-")) or names.get(key)
        if one is None or one.name == "config" or isinstance(value, dict):
            known = ", ".join(sorted(name for name in names if name not in ("config", "help", "h")))
            raise typer.BadParameter(f"{file}: {key} is no flag of this command; wanted some of {known}")
        # a flag that may repeat takes a list here
        several = getattr(one, "multiple", False)
        if isinstance(value, list) != several:
            raise typer.BadParameter(f"{file}: {key} must be {'a list' if several else 'one value'}, got {value!r}")
        found[str(one.name)] = value
    context.default_map = found
    return file
