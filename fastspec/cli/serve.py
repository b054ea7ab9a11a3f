"""`fastspec serve`: the models behind OpenAI's protocol."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastspec.cli import flags
from fastspec.cli.errors import errors_in_one_line
from fastspec.cli.imports import import_all
from fastspec.cli.progress import Progress
from fastspec.cli.ranks import follow, start_ranks, this_rank
from fastspec.models.pairs import public_name

if TYPE_CHECKING:
    from fastspec.server.service import Limits

_LOADING = "loading the models and making their steps ready"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DRAIN = 60.0  # seconds for the last answers, where answers may take longer


def serve(
    target: flags.Target = None,
    draft: flags.Draft = None,
    proposer: flags.Drafter = None,
    num_speculative_tokens: flags.Drafts = 4,
    max_batch_size: Annotated[int, typer.Option(help="Answers written at once; further ones wait.")] = 8,
    max_length: flags.MaxLength = None,
    draft_quantization: flags.DraftFormat = None,
    kv_dtype: flags.KVDtype = None,
    device: flags.Device = None,
    tensor_parallel: flags.TensorParallel = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Of the model, for clients. Default: its directory's, or its Hub id.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY|@FILE", help="Clients must send it; @FILE reads it from a file.")
    ] = None,
    sanitize_control_tokens: Annotated[
        bool,
        typer.Option(
            "--sanitize-control-tokens",
            help="Read control tokens in messages, such as <|im_end|>, as plain text: a user cannot forge a turn.",
        ),
    ] = False,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=NUMBER",
            help="body=BYTES, tokens=COUNT of an answer, requests=COUNT at once, seconds=TIME. Repeatable.",
        ),
    ] = None,
) -> None:
    """Serves the models by OpenAI's protocol, until Ctrl-C or SIGTERM: then the last answers come to their ends."""
    source, drafter = flags.pair_of(target, draft)
    import_all()
    flags.suggest_draft(target, draft, proposer)
    key = _key(api_key)
    start_ranks(tensor_parallel, device, ends_by_signal=True)
    options: dict[str, Any] = {"max_batch_size": max_batch_size, "max_length": max_length, "device": device}
    options["num_speculative_tokens"] = num_speculative_tokens
    options |= flags.given(tensor_parallel=tensor_parallel, draft_quantization=draft_quantization, kv_dtype=kv_dtype)
    if proposer is not None:
        options["proposer"] = flags.proposer_of(proposer)
    from fastspec.generator import FastSpecGenerator
    from fastspec.shapes import SAMPLERS

    with errors_in_one_line():
        try:
            from fastspec.server.run import Server, listening
            from fastspec.server.service import Limits, Service
        except ModuleNotFoundError as error:
            raise ValueError(
                f"fastspec serve needs its extra, and {error.name} is not installed: pip install 'fastspec[serve]' "
                "(in a clone: pip install -e '.[serve]')"
            ) from None
        limited = _limits(limits or [], Limits())
        follows = this_rank() > 0
        with nullcontext() if follows else listening(host, port) as on, Progress() as progress:
            progress.stage(_LOADING)
            with FastSpecGenerator(source, drafter, **options) as generator:
                for sampler in SAMPLERS:  # nothing is captured while answers are written
                    generator.warmup(sampler=sampler, length=generator.max_length)
                    generator.warmup(sampler=sampler)
                progress.stage(None)
                if on is None:  # rank 0 answers
                    follow(generator)
                    return
                service = Service(
                    generator, name or _name(target), limited, sanitize_control_tokens=sanitize_control_tokens
                )
                address = f"http://{f'[{host}]' if ':' in host else host}:{on.getsockname()[1]}/v1"

                def started() -> None:
                    typer.echo(f"fastspec: {service.name} at {address}", err=True)
                    if key is None and host not in _LOOPBACK:
                        typer.echo("fastspec: others can reach this address, and there is no --api-key", err=True)

                Server(service, api_key=key, drain=min(_DRAIN, limited.seconds), started=started).serve_on(on)
        if service.cut_off:
            typer.echo(f"fastspec: {service.cut_off} requests were cut off", err=True)
            raise typer.Exit(1)
        typer.echo("fastspec: the last answers are given", err=True)


def _name(target: str | None) -> str:
    """What clients call the model: "demo" for the shipped pair, a directory's name, or a Hub id."""
    return "demo" if target is None else public_name(target)


def _key(given: str | None) -> str | None:
    """The key, or the first line of the file that it is in: a command line is for all to see."""
    if given is None:
        return None
    lines, where = [given], "it"
    try:
        if given.startswith("@"):
            where = given[1:]
            lines = Path(where).read_text(encoding="utf-8").splitlines()
        flags.check_text(given)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {where}: {error}", param_hint="--api-key") from None
    if not lines or not lines[0].strip():  # which no client can send
        raise typer.BadParameter(f"{where} has no key in its first line", param_hint="--api-key")
    return lines[0].strip()


def _limits(given: list[str], defaults: Limits) -> Limits:
    """The limits that were given, and the usual ones."""
    kinds = {field.name: float if field.name == "seconds" else int for field in fields(defaults)}
    chosen: dict[str, Any] = {}
    for one in given:
        name, _, number = one.partition("=")
        try:
            chosen[name] = kinds[name](number)
        except (KeyError, ValueError):
            raise typer.BadParameter(
                f"{one!r} is not NAME=NUMBER with {', '.join(kinds)}", param_hint="--limit"
            ) from None
        if not chosen[name] > 0:
            raise typer.BadParameter(f"{one!r} is not above 0", param_hint="--limit")
    return replace(defaults, **chosen)
