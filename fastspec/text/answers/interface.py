"""Interface of the formats in which models write tool calls and reasoning.

A user's own format is a subclass of `ToolFormat` that defines `name`, `marks` and `parse`.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from fastspec.text.answers.events import Tool
from fastspec.text.answers.lark import Lark, NoGrammar
from fastspec.text.answers.reader import Steps, TextReader


class ToolFormat(ABC):
    """A format of tool calls: parses answers with calls, and writes the grammar of calls.

    Attributes:
        name: value of --tool-call-parser that selects the format.
        marks: special tokens whose text `parse` needs. All other special tokens are left out of the text.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parse(self, text: TextReader) -> Steps[None]:
        """Parses the answer after its reasoning. Text that it does not take from `text` becomes content."""

    def call_id(self) -> str:
        """Makes a new id for a tool call."""
        return f"call_{secrets.token_hex(12)}"

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Returns the grammar expression of one call, or of one or more calls if `parallel`.

        Args:
            lark: grammar to which rules are added.
            tools: tools that may be called.
            parallel: True if an answer may have several calls.

        Raises:
            NoGrammar: the format has no grammar, or it cannot express the schema of a tool.
        """
        raise NoGrammar(
            f"the format {self.name} of tool calls has no grammar; leave tool_choice at auto, without strict tools and "
            "with parallel_tool_calls, or give the format the methods calls and text_or_calls"
        )

    def text_or_calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Returns the grammar expression of an answer that may have calls. Args and errors: see `calls`."""
        return self.calls(lark, tools, parallel=parallel)


class MarkedFormat(ToolFormat):
    """A format of tool calls whose calls begin with a fixed text.

    Attributes:
        begin: the fixed text.
    """

    begin: ClassVar[str]

    @abstractmethod
    def after_begin(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Returns the grammar expression of all calls, without the first `begin`. Args: see `calls`."""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        return f"{lark.mark(self.begin)} {self.after_begin(lark, tools, parallel=parallel)}"

    def text_or_calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        after = self.after_begin(lark, tools, parallel=parallel)
        return lark.one_of([lark.any_text(self.begin), f"{lark.until(self.begin)} {after}"])


class ReasoningFormat(ABC):
    """A format of reasoning: parses the reasoning of an answer, and writes its grammar.

    Attributes:
        name: value of --reasoning-parser that selects the format.
        marks: see `ToolFormat`.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parse(self, text: TextReader) -> Steps[None]:
        """Parses the answer up to the end of its reasoning."""

    @abstractmethod
    def opens(self, end: str) -> bool:
        """True if a prompt whose last text is `end` has already begun the reasoning."""

    @abstractmethod
    def before_answer(self, lark: Lark, *, opened: bool) -> str:
        """Returns the grammar expression of the reasoning and all other text before content or calls.

        The expression may be empty.

        Args:
            lark: grammar to which rules are added.
            opened: True if the prompt has begun the reasoning.
        """

    def before_content(self, lark: Lark) -> str:
        """Returns the grammar expression of the text between reasoning and content. It may be empty."""
        return ""


def repeated(call: str, between: str, *, parallel: bool) -> str:
    """Returns the grammar expression of one call, or with `parallel` of one or more calls.

    Args:
        call: expression of one call.
        between: expression of the text between two calls.
        parallel: True if there may be several calls.
    """
    return f"{call} ({between} {call})*" if parallel else call


def json_call(text: TextReader, known: Callable[[str], bool] = lambda name: True) -> Steps[bool]:
    """Parses a call of the form {"name": ..., "arguments": {...}}; "parameters" is the same as "arguments".

    Args:
        text: reader of the answer.
        known: returns True for the name of a known tool. Text with another name is not read as a call.

    Returns:
        True if a call was read. If False, a part of the text may have been taken from the reader.
    """
    early, name, whole = "", None, False
    yield from text.skip_blanks()
    if not (yield from text.starts("{")):
        return False
    while True:
        yield from text.skip_blanks()
        if (yield from text.starts("}")):
            break
        key = yield from text.json_string()
        yield from text.skip_blanks()
        if key not in ("name", "arguments", "parameters", "id", "type") or not (yield from text.starts(":")):
            return name is not None
        yield from text.skip_blanks()
        if key == "name":
            name = yield from text.json_string()
            if name is None or not known(name):
                return False
            text.begin_call(name)
            text.arguments(early)
            whole = whole or bool(early)
        elif key in ("id", "type"):
            yield from text.json_text()
        elif name is None:
            early = yield from _arguments(text)
        elif (yield from text.next()) == '"':
            text.arguments((yield from _arguments(text)))
            whole = True
        else:
            yield from text.json_value(text.arguments)
            whole = True
        yield from text.skip_blanks()
        yield from text.starts(",")
        if not (yield from text.next()):
            break
    if name is not None and not whole:
        text.arguments("{}")
    return name is not None


def _arguments(text: TextReader) -> Steps[str]:
    """Takes the arguments of a call, and returns their JSON text. The model may have quoted it as a JSON string."""
    if (yield from text.next()) == '"':
        return (yield from text.json_string()) or ""
    return (yield from text.json_text())
