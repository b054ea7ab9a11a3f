"""`fastspec serve`: a server with OpenAI's HTTP protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fastspec.cli import flags
from fastspec.cli.errors import errors_in_one_line
from fastspec.cli.imports import import_all, leave_out_of_collection
from fastspec.cli.inputs import check_call
from fastspec.cli.progress import LOADING, Progress
from fastspec.cli.rank_processes import follow, start_ranks, this_rank
from fastspec.models.pairs import public_name

if TYPE_CHECKING:
    from fastspec.generator import FastSpecGenerator
    from fastspec.server.request_log import RequestRecord
    from fastspec.server.run import Certificate
    from fastspec.server.service import Limits

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PACKAGES = "'fastapi>=0.115' 'prometheus-client>=0.20' 'uvicorn>=0.30'"
_TRACE_PACKAGES = "'opentelemetry-sdk>=1.30' 'opentelemetry-exporter-otlp-proto-http>=1.30'"
_DRAIN = 60.0  # longest default of --drain: seconds in which running answers may complete at the end


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
    target_quantization: flags.TargetFormat = None,
    draft_quantization: flags.DraftFormat = None,
    kv_dtype: flags.KVDtype = None,
    device: flags.Device = None,
    tensor_parallel: flags.TensorParallel = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8000,
    uds: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Listen on this Unix socket, not on an address.")
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            "--served-model-name",
            metavar="NAME",
            help="Name of the model for clients; repeat it for aliases. Default: the Hub id, or the directory's name.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chat template (Jinja) in place of the checkpoint's.")
    ] = None,
    tool_call_parser: Annotated[
        str, typer.Option(metavar="FORMAT", help="Format of tool calls; auto: the one that the chat template shows.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(metavar="FORMAT", help="Format of reasoning; auto: the one that the chat template shows.")
    ] = "auto",
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY|@FILE",
            envvar="FASTSPEC_API_KEY",
            help="Key that clients must send; @FILE reads the first line of a file. Repeatable.",
        ),
    ] = None,
    allow_weight_updates: Annotated[
        bool,
        typer.Option("--allow-weight-updates", help="Let holders of a key replace weights, pause and sleep."),
    ] = False,
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="Let browser pages of this origin read answers: https://chat.example; '*': all. Repeatable.",
        ),
    ] = None,
    root_path: Annotated[
        str, typer.Option(metavar="PATH", help="Path that a proxy puts before the server's own: /llm.")
    ] = "",
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate in PEM; with --ssl-keyfile the server speaks TLS.")
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of the certificate.")] = None,
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
    response_store: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Responses of /v1/responses to keep for previous_response_id.")
    ] = 0,
    drain: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Longest wait for running answers after Ctrl-C. Default: 60, or less if --limit seconds is less.",
        ),
    ] = None,
    access_log: Annotated[
        str, typer.Option(metavar="text|json|off", help="A line for each request, on stderr.")
    ] = "text",
    log_level: Annotated[
        str, typer.Option(metavar="debug|info|warning|error", help="Lowest level that is logged.")
    ] = "info",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send a span for each request by OTLP: http://127.0.0.1:4318/v1/traces."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            is_eager=True,
            callback=flags.read_config,
            help="TOML file with flags as keys; flags win.",
        ),
    ] = None,
) -> None:
    """Serves the models by OpenAI's protocol. On Ctrl-C or SIGTERM it completes the running answers and ends."""
    source, drafter = flags.pair_of(target, draft)
    import_all()
    from fastspec.generator import FastSpecGenerator
    from fastspec.shapes import SAMPLERS

    with errors_in_one_line(context):
        try:
            from fastspec.server.access import Access
            from fastspec.server.request_log import ACCESS_LOGS, LEVELS, set_up_logging
            from fastspec.server.run import Server, answering_that_models_load, listening, listening_at
            from fastspec.server.service import Limits, Service
            from fastspec.text.answers.choose import formats_of
        except ModuleNotFoundError as error:
            raise ValueError(
                f"fastspec serve needs packages, and {error.name} is not installed: pip install {_PACKAGES}"
            ) from None
        check_call(context.params)
        corpora = flags.corpora_of(corpus)
        for value, wanted, flag in ((access_log, ACCESS_LOGS, "--access-log"), (log_level, LEVELS, "--log-level")):
            if value not in wanted:
                raise typer.BadParameter(f"got {value!r}, wanted {', '.join(wanted)}", param_hint=flag)
        keys, limited = _keys(api_keys or []), _limits(limits or [], Limits())
        formats_of("", tools=tool_call_parser, reasoning=reasoning_parser)  # names are checked before models load
        template = None if chat_template is None else _template(chat_template)
        certificate = _certificate(ssl_certfile, ssl_keyfile)
        if allow_weight_updates and not keys:
            raise typer.BadParameter("it needs --api-key", param_hint="--allow-weight-updates")
        access = Access(keys, tuple(origins or ()), root_path, weight_updates=allow_weight_updates)
        options: dict[str, Any] = {"max_batch_size": max_batch_size, "max_length": max_length, "device": device}
        options |= {"num_speculative_tokens": num_speculative_tokens, "dtype": dtype}
        options |= flags.given(
            tensor_parallel=tensor_parallel,
            target_quantization=target_quantization,
            draft_quantization=draft_quantization,
            kv_dtype=kv_dtype,
            proposer=flags.proposer_of(proposer, corpus=corpora, remember=cast("Any", remember)),
        )
        named = str(options.get("proposer")) if "proposer" in options else None
        flags.suggest_draft(target, draft, named, num_speculative_tokens)
        start_ranks(tensor_parallel, device, ends_by_signal=True, context=context)
        set_up_logging(log_level)
        if this_rank() > 0:  # rank 0 answers
            with FastSpecGenerator(source, drafter, **options, progress=False) as generator:
                _add_corpora(generator, corpora)
                _warm_up(generator, SAMPLERS)
                follow(generator)
                return
        with (
            _observers(access_log, otlp_traces_endpoint) as observers,
            listening(host, port) if uds is None else listening_at(uds) as on,
            Progress() as progress,
        ):
            progress.stage(LOADING)
            with answering_that_models_load(on, certificate):
                generator = FastSpecGenerator(source, drafter, **options, progress=progress.tell)
                _add_corpora(generator, corpora)
                _warm_up(generator, SAMPLERS)
            progress.stage(None)
            with generator:
                if template is not None:
                    generator.tokenizer.chat_template = template
                served = names or [_name(target)]
                service = Service(
                    generator,
                    served[0],
                    limited,
                    aliases=served[1:],
                    sanitize_control_tokens=sanitize_control_tokens,
                    tool_call_parser=tool_call_parser,
                    reasoning_parser=reasoning_parser,
                    response_store=response_store,
                )
                leave_out_of_collection()
                scheme = "http" if certificate is None else "https"
                address = f"{scheme}://{f'[{host}]' if ':' in host else host}"
                address = f"{uds}, path /v1" if uds else f"{address}:{on.getsockname()[1]}/v1"

                def started() -> None:
                    typer.echo(f"fastspec: {service.name} at {address}", err=True)
                    if not keys and uds is None and host not in _LOOPBACK:
                        typer.echo("fastspec: anyone can reach this address; set --api-key", err=True)

                Server(
                    service,
                    access=replace(access, observers=tuple(observers)),
                    drain=min(_DRAIN, limited.seconds) if drain is None else drain,
                    certificate=certificate,
                    started=started,
                ).serve_on(on)
        if service.cut_off:
            typer.echo(f"fastspec: {service.cut_off} requests were cut off", err=True)
            raise typer.Exit(1)
        typer.echo("fastspec: all answers are complete", err=True)


def _add_corpora(generator: FastSpecGenerator, corpora: Mapping[str, str]) -> None:
    for name, text in corpora.items():
        generator.add_corpus(name, text)


def _warm_up(generator: FastSpecGenerator, samplers: tuple[str, ...]) -> None:
    """Captures the CUDA graphs of all decode steps before the first request, so that no answer waits for a capture.

    `samplers`: values of the argument `sampler` of `FastSpecGenerator.warmup`.
    """
    for sampler in samplers:
        generator.warmup(sampler=sampler, length=generator.max_length)
        generator.warmup(sampler=sampler)


def _name(target: str | None) -> str:
    """Returns the model's name for clients: "demo" for the shipped pair, else the directory's name or the Hub id."""
    return "demo" if target is None else public_name(target)


def _keys(given: list[str]) -> tuple[str, ...]:
    """Returns the API keys. For `@FILE` the key is the first line of the file.

    A file keeps the key secret: other users of the machine can read a command line.
    """
    return tuple(_key(one) for one in given)


def _key(given: str) -> str:
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


def _template(file: Path) -> str:
    """Reads a chat template, and checks its syntax."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = file.read_text(encoding="utf-8")
        _compile_jinja_template(text)
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        raise typer.BadParameter(f"cannot use {file}: {error}", param_hint="--chat-template") from None
    return text


def _certificate(chain: Path | None, key: Path | None) -> Certificate | None:
    from fastspec.server.run import Certificate

    if (chain is None) != (key is None):
        raise typer.BadParameter(
            "TLS needs both --ssl-certfile and --ssl-keyfile", param_hint="--ssl-keyfile" if chain else "--ssl-certfile"
        )
    return None if chain is None or key is None else Certificate(chain, key)


@contextmanager
def _observers(access_log: str, traces_endpoint: str | None) -> Iterator[list[Callable[[RequestRecord], None]]]:
    """Yields the functions that the server calls with the record of each request: the access log, and traces.

    Args:
        access_log: format of the access log: "text", "json" or "off".
        traces_endpoint: URL to which spans are sent by OTLP. None: no traces.

    Raises:
        ValueError: traces need packages that are not installed.
    """
    from fastspec.server.request_log import AccessLog

    observers: list[Callable[[RequestRecord], None]] = []
    if access_log != "off":
        observers.append(AccessLog(as_json=access_log == "json"))
    if traces_endpoint is None:
        yield observers
        return
    from fastspec.server.traces import Traces

    try:
        traces = Traces.to(traces_endpoint)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs packages, and {error.name} is not installed: pip install {_TRACE_PACKAGES}"
        ) from None
    try:
        yield [*observers, traces]
    finally:
        traces.close()


def _limits(given: list[str], defaults: Limits) -> Limits:
    """Returns `defaults` with the limits that `given` sets, each as NAME=NUMBER."""
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
