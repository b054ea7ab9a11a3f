"""Parses an answer while it arrives, and writes the grammar of answers that a request restricts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastspec.text.answers.choose import AnswerFormats
from fastspec.text.answers.events import Event, Tool
from fastspec.text.answers.lark import Lark, NoGrammar
from fastspec.text.answers.reader import Steps, TextReader


class AnswerParser:
    """Converts the text of one answer to events: content, reasoning and tool calls.

    The events do not depend on the division of the text into pieces.

    Args:
        formats: formats of tool calls and reasoning.
        tools: tools that the model may call. Empty: the text of a call is content.
        opened: True if the prompt has already begun the reasoning.
    """

    def __init__(self, formats: AnswerFormats, tools: Sequence[Tool], *, opened: bool = False) -> None:
        self._formats, self._reader = formats, TextReader({tool.name: tool for tool in tools}, opened=opened)
        self._run = self._steps()
        next(self._run)  # up to where it needs text

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens whose text the parser needs."""
        kinds = (self._formats.reasoning, self._formats.tools if self._reader.tools else None)
        return frozenset(mark for kind in kinds if kind is not None for mark in kind.marks)

    @property
    def reads_reasoning(self) -> bool:
        """True if answers may have reasoning."""
        return self._formats.reasoning is not None

    @property
    def in_reasoning(self) -> bool:
        """True if the next text belongs to the reasoning."""
        return self._reader.in_reasoning

    def push(self, text: str) -> None:
        """Receives the next piece of the answer's text."""
        if text:
            self._reader.feed(text)
            next(self._run, None)

    def finish(self) -> None:
        """Ends the answer."""
        self._reader.feed("", last=True)
        next(self._run, None)

    def events(self) -> list[Event]:
        """Returns the events since the last call of this method. Later text does not change them."""
        return self._reader.events()

    def _steps(self) -> Steps[None]:
        if self._formats.reasoning is not None:
            yield from self._formats.reasoning.parse(self._reader)
        if self._formats.tools is not None and self._reader.tools:
            yield from self._formats.tools.parse(self._reader)
        yield from self._reader.rest()


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """Restrictions that a request sets for its answer.

    Attributes:
        tools: tools that the model may call.
        required: True if the answer must call a tool.
        parallel: True if the answer may have several calls.
        schema: JSON schema that the content must follow. None: any text.
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True
    schema: dict[str, Any] | None = None

    @property
    def demands(self) -> bool:
        """True if these restrictions forbid some answers, so that decoding needs a grammar."""
        calls = self.required or not self.parallel or any(tool.strict for tool in self.tools)
        return self.schema is not None or bool(self.tools and calls)

    def grammar(self, formats: AnswerFormats, added: Mapping[str, int], *, opened: bool) -> str:
        """Returns the grammar of the whole answer, with its reasoning.

        Args:
            formats: formats of the model's answers.
            added: text -> id of the tokens that were added to the vocabulary.
            opened: True if the prompt has begun the reasoning.

        Raises:
            NoGrammar: a format has no grammar for this rule.
        """
        lark = Lark(added)
        reasoning = formats.reasoning
        before = "" if reasoning is None else reasoning.before_answer(lark, opened=opened)
        return lark.grammar(f"{before} {self._answer(formats, lark)}".strip())

    def _answer(self, formats: AnswerFormats, lark: Lark) -> str:
        content = ""
        if self.schema is not None:
            head = "" if formats.reasoning is None else formats.reasoning.before_content(lark)
            content = f"{head} {lark.json(self.schema)}"
        if not self.tools:
            return content
        if formats.tools is None:
            raise NoGrammar(
                "the chat template shows no known format of tool calls, so they cannot be demanded; serve with "
                "--tool-call-parser NAME"
            )
        # arguments of a tool that is not strict may be any object, unless the answer must call a tool
        strict = [tool if tool.strict or self.required else Tool(tool.name, _loose(tool)) for tool in self.tools]
        if self.required:
            return formats.tools.calls(lark, strict, parallel=self.parallel)
        if content:
            return lark.one_of([content, formats.tools.calls(lark, strict, parallel=self.parallel)])
        return formats.tools.text_or_calls(lark, strict, parallel=self.parallel)


def _loose(tool: Tool) -> dict[str, Any]:
    """Returns a JSON schema that allows any values for the arguments of a tool.

    It keeps the names of the arguments, because some formats write the arguments one by one.
    """
    names = tool.parameters.get("properties") or {}
    return {"type": "object", "properties": {name: {} for name in names}}
