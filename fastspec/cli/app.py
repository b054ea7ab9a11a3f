"""The command line, with the commands `generate`, `demo` and `doctor`. Other commands have their own files."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import fastspec
from fastspec.cli import flags
from fastspec.cli.chat import chat
from fastspec.cli.errors import errors_in_one_line
from fastspec.cli.imports import import_all
from fastspec.cli.inputs import Prompt, PromptFile, check_call, check_grammar, read_prompt
from fastspec.cli.output import GREEN, write_text
from fastspec.cli.pairs import pairs
from fastspec.cli.progress import LOADING, Progress
from fastspec.cli.quantize import quantize
from fastspec.cli.rank_processes import start_ranks
from fastspec.cli.serve import serve
from fastspec.demo import demo_pair

if TYPE_CHECKING:  # imported later by the commands that use them: importing torch would slow down `--help`
    from fastspec.generator import FastSpecGenerator
    from fastspec.output import GenerateOutput, Stats
    from fastspec.text.text_stream import StreamWriter

DEMO_PROMPT = "def main(argv=None):"
_AT_ONCE = 8  # number of texts decoded in one batch
_ENOUGH = 60.0  # seconds of timed runs after which `demo` starts no further round

app = typer.Typer(
    help="Exact speculative decoding for Hugging Face causal language models.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Registers a command. The list of commands shows the first line of its docstring."""
    return app.command(short_help=(function.__doc__ or "").partition("\n")[0])(function)


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


@_command
@flags.with_options
def generate(
    context: typer.Context,
    target: flags.Target = None,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    draft: flags.Draft = None,
    stream: Annotated[bool, typer.Option(help="Print text while it is decoded, or only at the end.")] = True,
    color: Annotated[bool, typer.Option("--color", help="Print accepted drafts in green.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print the acceptance of each draft position.")] = False,
    num_speculative_tokens: flags.Drafts = 4,
    verification: flags.Rule = None,
    proposer: flags.Drafter = None,
    corpus: flags.Corpus = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    max_length: flags.MaxLength = None,
    tensor_parallel: flags.TensorParallel = None,
    target_quantization: flags.TargetFormat = None,
    draft_quantization: flags.DraftFormat = None,
    kv_dtype: flags.KVDtype = None,
    **shaping: object,
) -> None:
    """Continues a prompt and prints the new text. A line on stderr has the statistics."""
    source, drafter = flags.pair_of(target, draft)
    import_all()
    with errors_in_one_line(context), Progress() as progress:
        text, piped = read_prompt(prompt, prompt_file)
        check_call(context.params)
        flags.check_values({**context.params, "prompt": text})
        asked = flags.options_of(shaping)
        check_grammar(asked)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "max_length": max_length}
        corpora = flags.corpora_of(corpus)
        options["max_batch_size"] = min(asked.get("num_return_sequences", 1), _AT_ONCE)
        options |= flags.given(
            target_quantization=target_quantization,
            draft_quantization=draft_quantization,
            kv_dtype=kv_dtype,
            verification=verification,
            tensor_parallel=tensor_parallel,
            proposer=flags.proposer_of(proposer, corpus=corpora, prediction=asked.get("predictions")),
        )
        flags.suggest_draft(target, draft, str(options.get("proposer")) if "proposer" in options else None)
        # stdin is read once, in this process; the ranks get its text as a flag
        again = [*sys.argv[1:], "--prompt", text] if piped else None
        start_ranks(tensor_parallel, device, again, context=context)
        pieces: list[tuple[str, bool]] = []

        def show(piece: str, drafted: bool) -> None:
            progress.stage(None)  # no progress line while the text itself is printed
            write_text(piece, GREEN if drafted and color else "")

        progress.stage(LOADING)
        with _opened(context, source, drafter, num_speculative_tokens, options) as generator:
            for name, content in corpora.items():
                generator.add_corpus(name, content)
            progress.stage("decoding")
            write = show if stream else lambda *piece: pieces.append(piece)
            output = _generate(generator, text, write, **asked)
            where = generator.device
        progress.stage(None)
        for piece in pieces:
            show(*piece)
        write_text("\n")
        typer.echo(f"{output.stats}; {', '.join(output.finish_reasons)}; {where}", err=True)
        if stats:
            typer.echo(_by_position(output.stats), err=True)


@_command
def demo(
    context: typer.Context,
    prompt: Annotated[str, typer.Option(help="Python code to continue.")] = DEMO_PROMPT,
    max_new_tokens: flags.MaxNewTokens = 128,
    num_speculative_tokens: flags.Drafts = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each kind of decoding; the median is shown.")] = 3,
    device: flags.Device = None,
    tensor_parallel: flags.TensorParallel = None,
    draft_quantization: flags.DraftFormat = None,
) -> None:
    """Decodes one prompt with the shipped pair, with and without drafts, and compares time and text.

    The baseline is the faster of two plain decodings: one with exact=True, one with exact=False. With exact=False the
    bits of a row may depend on the number of rows.
    """
    import_all()
    target, draft = map(str, demo_pair())
    rounded = flags.given(draft_quantization=draft_quantization)
    options: dict[str, Any] = {"device": device, **flags.given(tensor_parallel=tensor_parallel)}
    with errors_in_one_line(context), Progress() as progress, ExitStack() as opened:
        check_call(context.params)
        flags.check_values(context.params)
        start_ranks(tensor_parallel, device, context=context)
        progress.stage(LOADING)
        generator = opened.enter_context(
            _opened(context, target, draft, num_speculative_tokens, {**options, **rounded})
        )
        loose = opened.enter_context(_opened(context, target, None, 0, {**options, "exact": False}))
        progress.stage("warming up")
        plain = _Runs(generator, prompt, max_new_tokens, drafts=0)
        plain_loose = _Runs(loose, prompt, max_new_tokens, drafts=0)
        speculative = _Runs(generator, prompt, max_new_tokens, drafts=num_speculative_tokens)
        named = {"plain": plain, "plain, exact=False": plain_loose, "speculative": speculative}
        start, done = time.monotonic(), 0
        # with several ranks only the count decides, because their clocks differ
        while done < repeats and (not done or tensor_parallel or time.monotonic() - start < _ENOUGH):
            done += 1
            for name, runs in named.items():  # alternate, so that a slower machine slows all variants equally
                progress.stage(f"{name}, run {done} of {repeats}")
                runs.run()
        progress.stage(None)
        write_text(f"{prompt}{speculative.results[0][0]}\n\n")
        fewer = "" if done == repeats else f" of {repeats} runs, because this machine is slow or busy"
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


@_command
def doctor(
    device: Annotated[str | None, typer.Option(help="Check this device only. Default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Checks this machine and decodes a few tokens on it; lists what works, what does not, and the fix."""
    from fastspec.cli.doctor import diagnose

    with Progress() as progress:
        report = diagnose(device, tell=progress.stage)
    write_text(f"{report.to_json() if as_json else report}\n")
    raise typer.Exit(0 if report.ok else 1)


for _each in (pairs, quantize, chat, serve):
    _command(_each)


class _Runs:
    """Timed runs of one prompt with one number of drafts per step. A first, untimed run allocates memory."""

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
        self._generate(write=lambda piece, drafted: None, max_new_tokens=min(8, max_new_tokens))

    def run(self) -> None:
        """Makes one timed run."""
        pieces: list[str] = []
        output = self._generate(write=lambda piece, drafted: pieces.append(piece))
        self.results.append(("".join(pieces), tuple(output.new_tokens[0])))
        self._stats.append(output.stats)

    @property
    def seconds(self) -> float:
        """Median seconds of a run."""
        return statistics.median(stats.seconds for stats in self._stats)

    def __str__(self) -> str:
        """Formats the runs as one line."""
        return str(replace(self._stats[0], seconds=self.seconds))


def _opened(
    context: typer.Context, target: str, draft: str | None, drafts: int, options: dict[str, Any]
) -> FastSpecGenerator:
    usual = {"max_batch_size": 1, "progress": False}
    return flags.opened(context, target, draft, num_speculative_tokens=drafts, **{**usual, **options})


def _generate(
    generator: FastSpecGenerator, prompt: str, write: Callable[[str, bool], object], **options: Any
) -> GenerateOutput:
    """Decodes a prompt.

    Calls `write(text, drafted)` for each piece; `drafted` is True if a draft token completed the piece.
    """
    tokenizer = generator.tokenizer
    from fastspec.text.origin import OriginWriter
    from fastspec.text.stop_strings import StoppedWriter

    ids, stops = tokenizer(prompt)["input_ids"], options.get("stop_strings", ())
    several = options.get("num_return_sequences", 1) > 1
    writer = None if several else OriginWriter(tokenizer, write, stops)
    output = generator.generate([ids], streamer=writer, return_dict_in_generate=True, **options)
    result = cast("GenerateOutput", output)
    if writer is not None:
        writer.finish(drafted=result.stats.dropped > 0)
        return result
    for index, tokens in enumerate(result.new_tokens):
        write(f"{chr(10) * (index > 0)}--- {index + 1} of {len(result.new_tokens)}\n", False)
        _replay(StoppedWriter(tokenizer, lambda piece: write(piece, False), stops), ids, tokens)
    return result


def _replay(writer: StreamWriter, prompt: list[int], tokens: list[int]) -> None:
    """Streams tokens that are already known through `writer`."""
    import torch

    writer.put(torch.tensor(prompt, device="cpu"))
    writer.put(torch.tensor(tokens, device="cpu"))
    writer.end()


def _by_position(stats: Stats) -> str:
    """Formats the share of drafting steps that accepted draft 1, 2, .. k."""
    shares = stats.accepted_per_position
    if shares is None:
        return "accepted: nothing was drafted"
    return "accepted: " + ", ".join(f"draft {index} {share:.0%}" for index, share in enumerate(shares, 1))
