"""Interface of the formats in which models write calls of tools and reasoning.

A caller's own format is a subclass of `ToolFormat` with a name, its marks and `parse`.
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
    """Reads the calls of an answer in one format.

    Attributes:
        name: for --tool-call-parser.
        marks: special tokens whose text `parse` needs; all others are left out of the text.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parse(self, text: TextReader) -> Steps[None]:
        """Reads the answer behind its reasoning. What it leaves becomes content."""

    def call_id(self) -> str:
        """Makes the id of a call."""
        return f"call_{secrets.token_hex(12)}"

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Expression of one call, or of several if `parallel`.

        Raises:
            NoGrammar: the format has no grammar, or it cannot express the schema of a tool.
        """
        raise NoGrammar(
            f"the format {self.name} of tool calls has no grammar; leave tool_choice at auto, without strict tools and "
            "with parallel_tool_calls, or give the format the methods calls and text_or_calls"
        )

    def text_or_calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Expression of any text, or of a text and calls. Raises NoGrammar as `calls`."""
        return self.calls(lark, tools, parallel=parallel)


class MarkedFormat(ToolFormat):
    """A format whose calls begin with a mark.

    Attributes:
        begin: the mark.
    """

    begin: ClassVar[str]

    @abstractmethod
    def after_begin(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Expression of all calls behind the first mark."""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        return f"{lark.mark(self.begin)} {self.after_begin(lark, tools, parallel=parallel)}"

    def text_or_calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        after = self.after_begin(lark, tools, parallel=parallel)
        return lark.one_of([lark.any_text(self.begin), f"{lark.until(self.begin)} {after}"])


class ReasoningFormat(ABC):
    """Reads the reasoning of an answer.

    Attributes:
        name: for --reasoning-parser.
        marks: see `ToolFormat`.
        always: True if `parse` reads every answer to its end.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parse(self, text: TextReader) -> Steps[None]:
        """Reads the answer up to the end of its reasoning."""

    @abstractmethod
    def opens(self, end: str) -> bool:
        """True if a prompt with this end has opened the reasoning."""

    @abstractmethod
    def before_answer(self, lark: Lark, *, opened: bool) -> str:
        """Expression of the reasoning and all that comes before an answer or calls; may be empty."""

    def before_content(self, lark: Lark) -> str:
        """Expression of what comes between the reasoning and a content; may be empty."""
        return ""


def repeated(call: str, between: str, *, parallel: bool) -> str:
    """Expression of one call, or of several with a text between them."""
    return f"{call} ({between} {call})*" if parallel else call


def json_call(text: TextReader, known: Callable[[str], bool] = lambda name: True) -> Steps[bool]:
    """Reads a call of the form {"name": ..., "arguments": {...}}; "parameters" is the same as "arguments".

    Args:
        known: True for names that make a call.

    Returns:
        True if a call was read. If not, a part of the text may be taken.
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
    """JSON text of arguments, which may be written as a string."""
    if (yield from text.next()) == '"':
        return (yield from text.json_string()) or ""
    return (yield from text.json_text())
