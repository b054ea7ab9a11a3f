"""`fastspec quantize`: writes a quantised copy of a checkpoint in the compressed-tensors format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastspec.cli.errors import errors_in_one_line
from fastspec.cli.progress import Progress

_MIB = 2**20


def quantize(
    source: Annotated[str, typer.Argument(help="Directory or Hub id of a checkpoint in 16 or 32 bits.")],
    destination: Annotated[Path, typer.Argument(help="Directory to create.")],
    form: Annotated[str, typer.Option("--format", help="int4, int8 or fp8.")] = "int4",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
) -> None:
    """Writes a quantised copy of a checkpoint in the compressed-tensors format.

    Weights of layers are rounded to nearest, without calibration data. A quantised draft does not change the text. A
    quantised target is a different model and may give a different text.
    """
    from fastspec.models.checkpoints.quantised.write import write_quantised

    with errors_in_one_line(), Progress() as progress:
        write_quantised(
            source, destination, form, revision=revision, tell=lambda file: progress.stage(f"writing file {file}")
        )
        progress.stage(None)
        size = sum(path.stat().st_size for path in destination.glob("*.safetensors"))
        typer.echo(f"{destination}: {size / _MIB:.1f} MiB of weights in {form}")
