"""`fastspec chat`: a conversation on a terminal."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastspec.cli import flags
from fastspec.cli.errors import errors_in_one_line
from fastspec.cli.imports import import_all
from fastspec.cli.inputs import check_call
from fastspec.cli.output import StatusLine, write_text
from fastspec.cli.progress import LOADING, Progress
from fastspec.errors import InvalidLogits
from fastspec.text.chat_template import ChatTemplate, ConversationError

if TYPE_CHECKING:
    from fastspec.generator import FastSpecGenerator

_HELP = "/clear starts again, /bye or Ctrl-D ends, Ctrl-C stops an answer"
_REDRAW = 0.3  # seconds between two updates of the status line, and before the first one


def chat(
    context: typer.Context,
    target: flags.Target = None,
    draft: flags.Draft = None,
    system: Annotated[str | None, typer.Option(help="System message: an instruction before the conversation.")] = None,
    max_new_tokens: flags.MaxNewTokens = 512,
    num_speculative_tokens: flags.Drafts = 4,
    temperature: flags.Temperature = 0.0,
    top_p: flags.TopP = None,
    seed: flags.Seed = None,
    proposer: flags.Drafter = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    max_length: flags.MaxLength = None,
    target_quantization: flags.TargetFormat = None,
    draft_quantization: flags.DraftFormat = None,
    kv_dtype: flags.KVDtype = None,
) -> None:
    """Chats with the model through its chat template. Without a template it continues what you write."""
    source, drafter = flags.pair_of(target, draft)
    import_all()
    with errors_in_one_line(context), Progress() as progress:
        check_call(context.params)
        flags.check_values(context.params)
        sampling = flags.given(top_p=top_p, seed=seed)
        sampling |= flags.drawing(sampling, temperature)
        options: dict[str, Any] = {"max_batch_size": 1, "device": device, "max_length": max_length, "dtype": dtype}
        options |= {"num_speculative_tokens": num_speculative_tokens, "progress": progress.tell}
        options |= flags.given(
            target_quantization=target_quantization,
            draft_quantization=draft_quantization,
            kv_dtype=kv_dtype,
            proposer=flags.proposer_of(proposer),
        )
        flags.suggest_draft(target, draft, proposer, num_speculative_tokens)
        progress.stage(LOADING)
        with flags.opened(context, source, drafter, **options) as generator:
            progress.stage(None)
            _talk(Conversation(generator, system, max_new_tokens, sampling))


def _talk(conversation: Conversation) -> None:
    """Answers the user's lines until the end of input."""
    _note(f"{conversation.manner}; {_HELP}")
    for line in lines_typed():
        if line == "/clear":
            conversation.clear()
            _note("a new conversation")
        elif line.startswith("/"):
            _note(f"{line} is no command: {_HELP}")
        else:
            _answer(conversation, line)


def _answer(conversation: Conversation, line: str) -> None:
    try:
        conversation.answer(line, write_text)
    except (ValueError, InvalidLogits) as error:
        _note(str(error))


@dataclass
class Conversation:
    """A conversation of a user with the model.

    Attributes:
        generator: decodes the answers.
        system: the system message. None: no system message.
        max_new_tokens: largest number of new tokens of an answer.
        options: keyword arguments of `FastSpecGenerator.submit`.
        said: (role, text) of each message.
    """

    generator: FastSpecGenerator
    system: str | None
    max_new_tokens: int
    options: dict[str, Any]
    said: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokenizer = self.generator.tokenizer
        self._template = ChatTemplate(self._tokenizer)

    @property
    def templated(self) -> bool:
        """True if the checkpoint has a chat template."""
        return self._template.exists

    @property
    def manner(self) -> str:
        """Sentence for the user: it says whether a chat template formats the conversation."""
        if self.templated:
            return "a conversation, formatted by the checkpoint's chat template"
        return "the checkpoint has no chat template: it continues your text instead of answering"

    def clear(self) -> None:
        """Drops all messages."""
        self.said = []

    def answer(self, text: str, write: Callable[[str], object]) -> None:
        """Decodes the answer to `text`, and passes its pieces to `write` as they arrive.

        Ctrl-C stops the answer. Its text so far stays in the conversation.

        Raises:
            ValueError, InvalidLogits: decoding failed. The question is removed from the conversation.
        """
        before = list(self.said)
        try:
            flags.check_text(text)
            self._answer(text, write)
        except (ValueError, InvalidLogits):
            self.said = before
            raise

    def _answer(self, text: str, write: Callable[[str], object]) -> None:
        from fastspec.text.text_stream import TextStream

        self.said.append(("user", text))
        prompt = self._fitting()
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            write(piece)

        room = min(self.max_new_tokens, self.generator.max_length - len(prompt))
        handle = self.generator.submit(prompt, max_new_tokens=room, **self.options)
        stream = TextStream(self._tokenizer, context=prompt)
        speed = _Speed()
        try:
            with StatusLine() as line:
                for token in handle:
                    show(stream.push([token]))
                    if told := speed.after_token():
                        line.show(told)
                show(stream.finish())
            note = str(handle.result().stats)
        except KeyboardInterrupt:
            handle.cancel()
            note = "stopped"
        self.said.append(("assistant", "".join(pieces)))
        write("\n")
        _note(note)

    def _fitting(self) -> list[int]:
        """Returns the token ids of the conversation. Drops its oldest turns if it is too long.

        Raises:
            ValueError: the last message alone is too long.
        """
        dropped = 0
        while True:
            prompt = self._ids()
            if len(prompt) < self.generator.max_length - 1:
                if dropped:
                    _note(
                        f"the conversation is longer than {self.generator.max_length} tokens: dropped its first turns"
                    )
                return prompt
            if len(self.said) < 2:
                raise ValueError(
                    f"the message has {len(prompt)} tokens and --max-length is {self.generator.max_length}; "
                    "shorten it, or raise --max-length"
                )
            del self.said[: 2 if len(self.said) > 2 else 1]
            dropped += 1

    def _ids(self) -> list[int]:
        if not self.templated:
            return list(
                self._tokenizer((self.system or "") + "".join(f"{text}\n" for _, text in self.said))["input_ids"]
            )
        head = [{"role": "system", "content": self.system}] if self.system else []
        try:
            return self._template.ids([*head, *({"role": role, "content": text} for role, text in self.said)])
        except ConversationError as error:
            raise ValueError(f"{error}; leave out --system, or /clear") from error


class _Speed:
    """Measures the decoding speed of an answer: its number of tokens, and the seconds since its first token."""

    def __init__(self) -> None:
        self._count, self._first, self._told = 0, 0.0, 0.0

    def after_token(self) -> str:
        """Counts a token. Returns a new text for the status line, or an empty text if the last one is very recent."""
        now = time.perf_counter()
        self._first = self._first or now
        self._count += 1
        if now - max(self._first, self._told) < _REDRAW:
            return ""
        self._told = now
        return f"{(self._count - 1) / (now - self._first):.1f} tok/s, {self._count} tokens"


def lines_typed() -> Iterator[str]:
    """Yields the lines that the user types, until the end of input or `/bye`."""
    if sys.stdin is None:  # stdin was closed before the command began
        return
    shown = sys.stdin.isatty()
    # bytes that are not UTF-8 become surrogates: `check_text` then refuses that line only
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if shown:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (the arrow keys work in input() once it is there)
    while True:
        try:
            line = input(">>> " if shown else "").strip()
        except KeyboardInterrupt:
            _note(_HELP)
            continue
        except EOFError:
            return
        if line == "/bye":
            return
        if line:
            yield line


def _note(text: str) -> None:
    typer.echo(f"({text})", err=True)
