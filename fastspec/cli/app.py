"""The command line, with the commands `generate`, `demo` and `doctor`. Other commands have their own files."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import fastspec
from fastspec.cli import flags
from fastspec.cli.chat import chat, lines_typed
from fastspec.cli.errors import errors_in_one_line
from fastspec.cli.imports import import_all
from fastspec.cli.inputs import Prompt, PromptFile, check_call, check_grammar, read_prompt
from fastspec.cli.output import GREEN, write_text
from fastspec.cli.pairs import pairs
from fastspec.cli.progress import LOADING, Progress
from fastspec.cli.quantize import quantize
from fastspec.cli.rank_processes import start_ranks
from fastspec.cli.serve import serve
from fastspec.demo import REAL_MODELS, demo_pair, real_model
from fastspec.text.chat_template import ChatTemplate, ConversationError

if TYPE_CHECKING:  # imported later by the commands that use them: importing torch would slow down `--help`
    from fastspec.generator import FastSpecGenerator
    from fastspec.output import GenerateOutput, Stats
    from fastspec.text.text_stream import StreamWriter

DEMO_PROMPT = "def main(argv=None):"
REAL_PROMPT = """Write this Python file again, with a docstring in every function:

def add(a, b):
    return a + b


def scale(values, by):
    return [value * by for value in values]
"""
_AT_ONCE = 8  # largest batch size, when --num-return-sequences asks for several texts
_ENOUGH = 60.0  # seconds after which `demo` starts no further timed runs

app = typer.Typer(
    help="Exact speculative decoding for Hugging Face causal language models.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Registers `function` as a command. `--help` shows the first line of its docstring in the list of commands."""
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
    as_message: Annotated[
        bool, typer.Option("--chat", help="Answer the prompt as a message, through the checkpoint's chat template.")
    ] = False,
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
        options["progress"] = progress.tell
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
        named = str(options.get("proposer")) if "proposer" in options else None
        flags.suggest_draft(target, draft, named, num_speculative_tokens)
        # this process reads stdin once, and passes the text to the ranks as a flag
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
            ids = _prompt_ids(generator, text, as_message=as_message)
            if not as_message and generator.tokenizer.chat_template:
                typer.echo("fastspec: the checkpoint has a chat template; --chat answers the prompt with it", err=True)
            progress.stage("decoding")
            write = show if stream else lambda *piece: pieces.append(piece)
            output = _generate(generator, ids, write, **asked)
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
    prompt: Annotated[
        str | None, typer.Option(help="Python code to continue, or with --model a message to answer.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(REAL_MODELS),
            help="Chat with a real model, with drafts by lookup: SmolLM2-135M-Instruct, from a package of PyPI.",
        ),
    ] = None,
    max_new_tokens: flags.MaxNewTokens = 128,
    num_speculative_tokens: flags.Drafts = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each kind of decoding; the median is shown.")] = 3,
    device: flags.Device = None,
    tensor_parallel: flags.TensorParallel = None,
    draft_quantization: flags.DraftFormat = None,
) -> None:
    """Decodes one prompt with the shipped pair, with and without drafts, and compares time and text.

    The baseline is the faster of two decodings without drafts: one with exact=True, one with exact=False. With
    exact=False the rounding of a result may depend on the batch size. With --model the baseline is exact=True.
    With --model accepted drafts are green, and on a terminal you can continue the conversation.
    """
    import_all()
    options: dict[str, Any] = {"device": device, **flags.given(tensor_parallel=tensor_parallel)}
    with errors_in_one_line(context), Progress() as progress, ExitStack() as opened:
        check_call(context.params)
        flags.check_values(context.params)
        rounded = flags.given(draft_quantization=draft_quantization)
        if model is None:
            target, draft = map(str, demo_pair())
        else:
            target, draft = str(real_model(model)), None
            rounded |= {"proposer": flags.proposer_of("ngram"), "progress": progress.tell}
        asked = prompt or (DEMO_PROMPT if model is None else REAL_PROMPT)
        start_ranks(tensor_parallel, device, context=context)
        progress.stage(LOADING)
        generator = opened.enter_context(
            _opened(context, target, draft, num_speculative_tokens, {**options, **rounded})
        )
        ids = _prompt_ids(generator, asked, as_message=model is not None)
        variants = {"plain": (generator, 0), "speculative": (generator, num_speculative_tokens)}
        if model is None:
            loose = opened.enter_context(_opened(context, target, None, 0, {**options, "exact": False}))
            variants = {"plain": variants["plain"], "plain, exact=False": (loose, 0), **variants}
        progress.stage("warming up")
        named = {name: _Runs(one, ids, max_new_tokens, drafts=drafts) for name, (one, drafts) in variants.items()}
        start, done = time.monotonic(), 0
        # with several ranks only the count decides, because their clocks differ
        while done < repeats and (not done or tensor_parallel or time.monotonic() - start < _ENOUGH):
            done += 1
            for name, runs in named.items():  # alternate, so that a slower machine slows all variants equally
                progress.stage(f"{name}, run {done} of {repeats}")
                runs.run()
        progress.stage(None)
        speculative = named.pop("speculative")
        write_text(asked if model is None else f">>> {asked}\n")
        for piece, drafted in speculative.pieces:
            _show(piece, drafted and model is not None)
        write_text("\n\n")
        fewer = "" if done == repeats else f" of {repeats} runs, because this machine is slow or busy"
        typer.echo(f"{generator.device}, median of {done}{fewer}:")
        _compare(named, speculative)
        if model is not None and sys.stdin is not None and sys.stdin.isatty():
            _converse(generator, asked, speculative, max_new_tokens, num_speculative_tokens)


def _compare(plain: Mapping[str, _Runs], speculative: _Runs) -> None:
    """Prints the statistics of all runs, the speed-up over the fastest plain decoding, and whether texts are equal.

    Args:
        plain: runs without draft tokens, by the name of the decoding. The runs with the name "plain" must give the same
            text as the speculative ones.
        speculative: runs with draft tokens.

    Raises:
        typer.Exit: the texts of plain and speculative decoding differ.
    """
    for name, runs in {**plain, "speculative": speculative}.items():
        typer.echo(f"{name:<18}  {runs}")
    ratio = min(runs.seconds for runs in plain.values()) / speculative.seconds
    over = "the faster plain way" if len(plain) > 1 else "plain"
    slower = "" if ratio > 1 else ": speculative decoding is not faster here"
    typer.echo(f"speed-up            {ratio:.2f}x over {over}{slower}")
    if len({*plain["plain"].results, *speculative.results}) > 1:
        typer.echo("texts equal         NO, and they should be: please report this")
        raise typer.Exit(1)
    typer.echo("texts equal         yes, token by token (plain and speculative)")


def _converse(
    generator: FastSpecGenerator, question: str, answered: _Runs, max_new_tokens: int, drafts: int | str
) -> None:
    """Continues the conversation: answers each line that the user types. Accepted draft tokens are green.

    Args:
        generator: decodes the answers.
        question: first message of the conversation.
        answered: runs that decoded the answer to `question`.
        max_new_tokens: largest number of new tokens of an answer.
        drafts: number of draft tokens per step, or "auto".
    """
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answered.results[0][0]}]
    typer.echo("(ask more; /bye or Ctrl-D ends)", err=True)
    for line in lines_typed():
        said.append({"role": "user", "content": line})
        ids = ChatTemplate(generator.tokenizer).ids(said)
        room = min(max_new_tokens, generator.max_length - len(ids))
        if room < 1:
            typer.echo(
                f"(the conversation has {len(ids)} tokens, and there is room for {generator.max_length})", err=True
            )
            return
        pieces: list[str] = []

        def show(piece: str, drafted: bool, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            _show(piece, drafted)

        output = _generate(generator, ids, show, max_new_tokens=room, num_speculative_tokens=drafts, do_sample=False)
        said.append({"role": "assistant", "content": "".join(pieces)})
        write_text("\n")
        typer.echo(f"({output.stats})", err=True)


def _show(piece: str, drafted: bool) -> None:
    """Writes a piece of text. On a terminal it is green if `drafted` is True: an accepted draft token completed it."""
    write_text(piece, GREEN if drafted and sys.stdout is not None and sys.stdout.isatty() else "")


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
    """Timed runs of one prompt with the same number of draft tokens per step.

    The constructor makes an untimed run first. It allocates memory and captures CUDA graphs.
    """

    def __init__(self, generator: FastSpecGenerator, ids: list[int], max_new_tokens: int, *, drafts: int | str) -> None:
        self._generate = partial(
            _generate,
            generator,
            ids,
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=drafts,
            do_sample=False,
        )
        self.results: list[tuple[str, tuple[int, ...]]] = []  # (text, token ids) of each run
        self.pieces: list[tuple[str, bool]] = []  # pieces of the last run's text; True if a draft completed the piece
        self._stats: list[Stats] = []
        self._generate(write=lambda piece, drafted: None, max_new_tokens=min(8, max_new_tokens))

    def run(self) -> None:
        """Makes one timed run."""
        self.pieces = []
        output = self._generate(write=lambda *piece: self.pieces.append(piece))
        self.results.append(("".join(piece for piece, _ in self.pieces), tuple(output.new_tokens[0])))
        self._stats.append(output.stats)

    @property
    def seconds(self) -> float:
        """Median duration of the timed runs, in seconds."""
        return statistics.median(stats.seconds for stats in self._stats)

    def __str__(self) -> str:
        """Formats the statistics of a run, with the median duration, as one line."""
        return str(replace(self._stats[0], seconds=self.seconds))


def _opened(
    context: typer.Context, target: str, draft: str | None, drafts: int, options: dict[str, Any]
) -> FastSpecGenerator:
    usual = {"max_batch_size": 1, "progress": False}
    return flags.opened(context, target, draft, num_speculative_tokens=drafts, **{**usual, **options})


def _prompt_ids(generator: FastSpecGenerator, text: str, *, as_message: bool) -> list[int]:
    """Returns the token ids of `text`. If `as_message` is True, returns the ids of a chat with `text` as only message.

    Raises:
        ConversationError: the checkpoint has no chat template, or it refuses the message.
    """
    tokenizer = generator.tokenizer
    if not as_message:
        return list(tokenizer(text)["input_ids"])
    template = ChatTemplate(tokenizer)
    if not template.exists:
        raise ConversationError("--chat: the checkpoint has no chat template; leave it out to continue the prompt")
    return template.ids([{"role": "user", "content": text}])


def _generate(
    generator: FastSpecGenerator, ids: list[int], write: Callable[[str, bool], object], **options: Any
) -> GenerateOutput:
    """Decodes a prompt of token ids.

    Calls `write(text, drafted)` for each piece of new text. `drafted` is True if a draft token completed the piece.

    Args:
        generator: decodes the prompt.
        ids: token ids of the prompt.
        write: see above.
        **options: keyword arguments of `generator.generate`.
    """
    tokenizer = generator.tokenizer
    from fastspec.text.origin import OriginWriter
    from fastspec.text.stop_strings import StoppedWriter

    stops = options.get("stop_strings", ())
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
    """Passes a prompt and its decoded tokens to a streamer, as `generate` does."""
    import torch

    writer.put(torch.tensor(prompt, device="cpu"))
    writer.put(torch.tensor(tokens, device="cpu"))
    writer.end()


def _by_position(stats: Stats) -> str:
    """Formats the acceptance rate of each draft position as text.

    The rate is the share of the steps with draft tokens in which draft token 1, 2, .. k was accepted.
    """
    shares = stats.accepted_per_position
    if shares is None:
        return "accepted: nothing was drafted"
    return "accepted: " + ", ".join(f"draft {index} {share:.0%}" for index, share in enumerate(shares, 1))
