"""The command line: `fastspec generate` streams text, `demo` compares; others have files of their own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fastspec
from fastspec.cli import flags
from fastspec.cli.chat import chat
from fastspec.cli.errors import errors_in_one_line
from fastspec.cli.imports import import_all
from fastspec.cli.output import write_text
from fastspec.cli.pairs import pairs
from fastspec.cli.progress import Progress
from fastspec.cli.quantize import quantize
from fastspec.cli.ranks import start_ranks
from fastspec.cli.serve import serve
from fastspec.demo import demo_pair

if TYPE_CHECKING:  # imported by the commands that need them: torch takes longer than `--help` may
    from fastspec.generator import FastSpecGenerator
    from fastspec.output import GenerateOutput, Stats
    from fastspec.text.text_stream import StreamWriter

DEMO_PROMPT = "def main(argv=None):"
_AT_ONCE = 8  # texts decoded together
_LOADING = "loading the models and making their steps ready"
_ENOUGH = 60.0  # seconds of timed runs after which the demo begins no other round

app = typer.Typer(
    help="Exact speculative decoding for Hugging Face causal language models.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastspec {fastspec.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact speculative decoding for Hugging Face causal language models."""


@app.command()
@flags.with_options
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    target: Annotated[str | None, typer.Option(help="Directory or Hub id; else the shipped pair.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Directory or Hub id of the draft model or head, or mtp: the target's own MTP layer."),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print text as it comes, or all at the end.")] = True,
    num_speculative_tokens: flags.Drafts = 4,
    verification: flags.Rule = None,
    proposer: flags.Drafter = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: flags.Device = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of prompt and text to make room for.")] = None,
    tensor_parallel: flags.TensorParallel = None,
    draft_quantization: flags.DraftFormat = None,
    kv_dtype: flags.KVDtype = None,
    **shaping: object,
) -> None:
    """Continues a prompt and prints the new text; a line on stderr says how it went."""
    if draft is not None and target is None:
        raise typer.BadParameter("a draft needs its target: give --target too", param_hint="--draft")
    import_all()
    flags.suggest_draft(target, draft, proposer)
    if target is None:
        target, draft = map(str, demo_pair())
    start_ranks(tensor_parallel, device)
    flags.check_values(context.params)
    asked = flags.options_of(shaping)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "max_length": max_length}
    options["max_batch_size"] = min(asked.get("num_return_sequences", 1), _AT_ONCE)
    options |= flags.given(draft_quantization=draft_quantization, kv_dtype=kv_dtype)
    if verification is not None:
        options["verification"] = verification
    if tensor_parallel is not None:
        options["tensor_parallel"] = tensor_parallel
    if proposer is not None:
        options["proposer"] = flags.proposer_of(proposer)
    pieces: list[str] = []

    def show(piece: str) -> None:
        progress.stage(None)  # text shows itself
        write_text(piece)

    with errors_in_one_line(), Progress() as progress:
        progress.stage(_LOADING)
        with _opened(context, target, draft, num_speculative_tokens, options) as generator:
            progress.stage("decoding")
            write = show if stream else pieces.append
            output = _generate(generator, prompt, write, **asked)
            where = generator.device
            progress.stage(None)
        write_text("".join([*pieces, "\n"]))
        typer.echo(f"{output.stats}; {', '.join(output.finish_reasons)}; {where}", err=True)


@app.command()
def demo(
    context: typer.Context,
    prompt: Annotated[str, typer.Option(help="Python code to continue.")] = DEMO_PROMPT,
    max_new_tokens: flags.MaxNewTokens = 128,
    num_speculative_tokens: flags.Drafts = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; the median counts.")] = 3,
    device: flags.Device = None,
    tensor_parallel: flags.TensorParallel = None,
    draft_quantization: flags.DraftFormat = None,
) -> None:
    """Decodes one prompt with the shipped pair, plainly and speculatively, and compares time and text.

    Speculative decoding is compared with the faster kind of plain decoding: exact, or exact=False, which does not keep
    bits independent of the number of rows.
    """
    import_all()
    flags.check_values(context.params)
    start_ranks(tensor_parallel, device)
    target, draft = map(str, demo_pair())
    options: dict[str, Any] = {"device": device, "progress": False}
    rounded = flags.given(draft_quantization=draft_quantization)
    if tensor_parallel is not None:
        options["tensor_parallel"] = tensor_parallel
    with errors_in_one_line(), Progress() as progress, ExitStack() as opened:
        progress.stage(_LOADING)
        generator = opened.enter_context(
            _opened(context, target, draft, num_speculative_tokens, {**options, **rounded})
        )
        loose = opened.enter_context(_opened(context, target, None, 0, {**options, "exact": False}))
        progress.stage("first runs, which are not timed")
        plain = _Runs(generator, prompt, max_new_tokens, drafts=0)
        plain_loose = _Runs(loose, prompt, max_new_tokens, drafts=0)
        speculative = _Runs(generator, prompt, max_new_tokens, drafts=num_speculative_tokens)
        named = {"plain": plain, "plain, exact=False": plain_loose, "speculative": speculative}
        start, done = time.monotonic(), 0
        # several ranks go by the count alone, for their clocks differ
        while done < repeats and (not done or tensor_parallel or time.monotonic() - start < _ENOUGH):
            done += 1
            for name, runs in named.items():  # in turns, so that a machine that slows down slows all alike
                progress.stage(f"{name}, run {done} of {repeats}")
                runs.run()
        progress.stage(None)
        write_text(f"{prompt}{speculative.results[0][0]}\n\n")
        fewer = "" if done == repeats else f" of {repeats}, for this machine is slow or busy"
        typer.echo(f"{generator.device}, median of {done}{fewer}:")
    typer.echo(f"plain               {plain}")
    typer.echo(f"plain, exact=False  {plain_loose}")
    typer.echo(f"speculative         {speculative}")
    ratio = min(plain.seconds, plain_loose.seconds) / speculative.seconds
    typer.echo(
        f"speed-up            {ratio:.2f}x over the faster plain way"
        f"{'' if ratio > 1 else ': speculative decoding is not faster here'}"
    )
    if len({*plain.results, *speculative.results}) > 1:
        typer.echo("texts equal         NO, and they should be: please report this")
        raise typer.Exit(1)
    typer.echo("texts equal         yes, token by token (plain and speculative)")


@app.command()
def doctor(
    device: Annotated[str | None, typer.Option(help="Check this one only. Default: every one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examines this machine and decodes a little on it: what works, what will not, and the fix."""
    from fastspec.cli.doctor import diagnose

    with Progress() as progress:
        report = diagnose(device, tell=progress.stage)
    write_text(f"{report.to_json() if as_json else report}\n")
    raise typer.Exit(0 if report.ok else 1)


app.command()(pairs)
app.command()(quantize)
app.command()(chat)
app.command()(serve)


class _Runs:
    """Runs of one prompt with one number of drafts per step. The first, untimed one pays for allocations."""

    def __init__(self, generator: FastSpecGenerator, prompt: str, max_new_tokens: int, *, drafts: int) -> None:
        self._generate = partial(
            _generate,
            generator,
            prompt,
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=drafts,
            do_sample=False,
        )
        self.results: list[tuple[str, tuple[int, ...]]] = []  # text and its token ids
        self._stats: list[Stats] = []
        self._generate(write=lambda _: None, max_new_tokens=min(8, max_new_tokens))

    def run(self) -> None:
        """Makes one timed run."""
        pieces: list[str] = []
        output = self._generate(write=pieces.append)
        self.results.append(("".join(pieces), tuple(output.new_tokens[0])))
        self._stats.append(output.stats)

    @property
    def seconds(self) -> float:
        """Median seconds of a run."""
        return statistics.median(stats.seconds for stats in self._stats)

    def __str__(self) -> str:
        """The runs in one line, to be printed."""
        return str(replace(self._stats[0], seconds=self.seconds))


def _opened(
    context: typer.Context, target: str, draft: str | None, drafts: int, options: dict[str, Any]
) -> FastSpecGenerator:
    return flags.opened(context, target, draft, num_speculative_tokens=drafts, **{"max_batch_size": 1, **options})


def _generate(
    generator: FastSpecGenerator, prompt: str, write: Callable[[str], object], **options: Any
) -> GenerateOutput:
    tokenizer = generator.tokenizer
    from fastspec.text.stop_strings import StoppedWriter

    ids = tokenizer(prompt)["input_ids"]

    def writer() -> StreamWriter:
        return StoppedWriter(tokenizer, write, options.get("stop_strings", ()))

    several = options.get("num_return_sequences", 1) > 1
    streamer = None if several else writer()
    result: GenerateOutput = generator.generate([ids], streamer=streamer, return_dict_in_generate=True, **options)
    for index, tokens in enumerate(result.new_tokens if several else ()):
        write(f"{chr(10) * (index > 0)}--- {index + 1} of {len(result.new_tokens)}\n")
        _replay(writer(), ids, tokens)
    return result


def _replay(writer: StreamWriter, prompt: list[int], tokens: list[int]) -> None:
    """Writes the text of tokens that are there already."""
    import torch

    writer.put(torch.tensor(prompt, device="cpu"))
    writer.put(torch.tensor(tokens, device="cpu"))
    writer.end()
