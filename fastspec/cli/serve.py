"""`fastspec serve`: the models by OpenAI's protocol."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fastspec.cli import flags
from fastspec.cli.errors import errors_in_one_line
from fastspec.cli.imports import import_all
from fastspec.cli.inputs import check_call
from fastspec.cli.progress import LOADING, Progress
from fastspec.cli.rank_processes import follow, start_ranks, this_rank
from fastspec.models.pairs import public_name

if TYPE_CHECKING:
    from fastspec.server.service import Limits

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PACKAGES = "'fastapi>=0.115' 'prometheus-client>=0.20' 'uvicorn>=0.30'"
_DRAIN = 60.0  # seconds for the last answers, where answers may take longer


def serve(
    context: typer.Context,
    target: flags.Target = None,
    draft: flags.Draft = None,
    proposer: flags.Drafter = None,
    corpus: flags.Corpus = None,
    remember: Annotated[
        str | None,
        typer.Option(
            metavar="prompt|session|all",
            help="Draft from earlier answers: to the same prompt, with the same API key, or to all requests.",
        ),
    ] = None,
    num_speculative_tokens: flags.Drafts = 4,
    max_batch_size: Annotated[int, typer.Option(help="Answers decoded at once; more requests wait.")] = 8,
    max_length: flags.MaxLength = None,
    dtype: flags.Dtype = None,
    draft_quantization: flags.DraftFormat = None,
    kv_dtype: flags.KVDtype = None,
    device: flags.Device = None,
    tensor_parallel: flags.TensorParallel = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients. Default: the Hub id, or the directory's name.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY|@FILE", help="Key that clients must send; @FILE reads it from a file.")
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
    """Serves the models by OpenAI's protocol. Ctrl-C or SIGTERM completes the running answers and ends it."""
    source, drafter = flags.pair_of(target, draft)
    import_all()
    from fastspec.generator import FastSpecGenerator
    from fastspec.shapes import SAMPLERS

    with errors_in_one_line(context):
        try:
            from fastspec.server.run import Server, listening
            from fastspec.server.service import Limits, Service
        except ModuleNotFoundError as error:
            raise ValueError(
                f"fastspec serve needs packages, and {error.name} is not installed: pip install {_PACKAGES}"
            ) from None
        check_call(context.params)
        corpora = flags.corpora_of(corpus)
        key, limited = _key(api_key), _limits(limits or [], Limits())
        options: dict[str, Any] = {"max_batch_size": max_batch_size, "max_length": max_length, "device": device}
        options |= {"num_speculative_tokens": num_speculative_tokens, "dtype": dtype, "progress": False}
        options |= flags.given(
            tensor_parallel=tensor_parallel,
            draft_quantization=draft_quantization,
            kv_dtype=kv_dtype,
            proposer=flags.proposer_of(proposer, corpus=corpora, remember=cast("Any", remember)),
        )
        flags.suggest_draft(target, draft, str(options.get("proposer")) if "proposer" in options else None)
        start_ranks(tensor_parallel, device, ends_by_signal=True)
        follows = this_rank() > 0
        with nullcontext() if follows else listening(host, port) as on, Progress() as progress:
            progress.stage(LOADING)
            with FastSpecGenerator(source, drafter, **options) as generator:
                for corpus_name, text in corpora.items():
                    generator.add_corpus(corpus_name, text)
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
                        typer.echo("fastspec: anyone can reach this address; set --api-key", err=True)

                Server(service, api_key=key, drain=min(_DRAIN, limited.seconds), started=started).serve_on(on)
        if service.cut_off:
            typer.echo(f"fastspec: {service.cut_off} requests were cut off", err=True)
            raise typer.Exit(1)
        typer.echo("fastspec: all answers are complete", err=True)


def _name(target: str | None) -> str:
    """The model's name for clients: "demo" for the shipped pair, else a directory's name or a Hub id."""
    return "demo" if target is None else public_name(target)


def _key(given: str | None) -> str | None:
    """The key, or the first line of its file. Other users of the machine can read a command line."""
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
    """The given limits; defaults for the others."""
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
