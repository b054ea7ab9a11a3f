"""`fastspec quantize`: writes a quantised copy of a checkpoint in the compressed-tensors format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastspec.cli.errors import errors_in_one_line
from fastspec.cli.flags import text_of
from fastspec.cli.progress import Progress

_MIB = 2**20


def quantize(
    source: Annotated[str, typer.Argument(help="Directory or Hub id of a checkpoint in 16 or 32 bits.")],
    destination: Annotated[Path, typer.Argument(help="Directory to create.")],
    form: Annotated[str, typer.Option("--format", help="int4, int8 or fp8.")] = "int4",
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text like the model's later input. int4 is rounded to fit it."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
) -> None:
    """Writes a quantised copy of a checkpoint in the compressed-tensors format.

    Weights of layers are rounded to nearest. With --calibrate, int4 is rounded so that products with the activations
    of a text change least (GPTQ). Quantising a draft does not change the generated text. A quantised target is a
    different model and may generate a different text.
    """
    from fastspec.models.checkpoints.quantised.small import cost_of_int4
    from fastspec.models.checkpoints.quantised.write import write_quantised

    with errors_in_one_line(), Progress() as progress:
        text = None if calibrate is None else text_of(calibrate, "--calibrate")
        parameters, missed = write_quantised(
            source,
            destination,
            form,
            revision=revision,
            calibration=text,
            tell=progress.stage,
        )
        progress.stage(None)
        size = sum(path.stat().st_size for path in destination.glob("*.safetensors"))
        typer.echo(f"{destination}: {size / _MIB:.1f} MiB of weights in {form}")
        if form == "int4" and text is None and (cost := cost_of_int4(parameters)):
            typer.echo(
                f"fastspec: {cost}. As a draft it changes no text; as a target give --calibrate FILE, or --format int8",
                err=True,
            )
        if missed:
            typer.echo(
                f"fastspec: {len(missed)} matrices, such as {missed[0]}, got no activations from the text and are "
                "rounded to nearest",
                err=True,
            )
