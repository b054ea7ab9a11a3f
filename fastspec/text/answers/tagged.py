"""Formats of tool calls that have a tag for each argument: Qwen3-Coder, and GLM-4.5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from typing_extensions import override

from fastspec.text.answers.events import Tool
from fastspec.text.answers.interface import MarkedFormat, repeated
from fastspec.text.answers.lark import Lark
from fastspec.text.answers.reader import Steps, TextReader
from fastspec.text.answers.values import dumped, json_of_text, property_of

_BEGIN, _END = "<tool_call>", "</tool_call>"


class _Written:
    """Adds the events of one tool call: its beginning, then the JSON object of its arguments, one at a time."""

    def __init__(self, text: TextReader, name: str) -> None:
        self._text, self._tool = text, text.tools.get(name)
        self._before = "{"
        text.begin_call(name)

    def add(self, name: str, value: str) -> None:
        """Adds one argument. `value`: text of the argument as the model wrote it, without JSON's quotes."""
        schema = property_of(self._tool.parameters, name) if self._tool else {}
        self._text.arguments(f"{self._before}{dumped(name)}: {json_of_text(value, schema)}")
        self._before = ", "

    def end(self) -> None:
        """Ends the JSON object of the arguments."""
        self._text.arguments("{}" if self._before == "{" else "}")


class Qwen3Coder(MarkedFormat):
    """Format of Qwen3-Coder's tool calls.

    `<tool_call>` `<function=NAME>` `<parameter=NAME>` VALUE `</parameter>` ... `</function>` `</tool_call>`
    """

    name = "qwen3_coder"
    marks = (_BEGIN, _END)
    begin: ClassVar[str] = _BEGIN

    @override
    def parse(self, text: TextReader) -> Steps[None]:
        while mark := (yield from text.content_until(_BEGIN, "<function=")):
            if mark == _BEGIN:
                yield from text.skip_blanks()
                if not (yield from text.starts("<function=")):
                    continue
            name, mark = yield from text.take_until(">", "\n")
            if mark != ">" or not name.strip():
                continue
            written = _Written(text, name.strip())
            while (yield from text.take_until("<parameter=", "</function>", _END))[1] == "<parameter=":
                key, mark = yield from text.take_until(">")
                value, end = yield from text.take_until("</parameter>")
                if mark and end:
                    written.add(key.strip(), value.removeprefix("\n").removesuffix("\n"))
            written.end()
            yield from text.skip_blanks()
            yield from text.starts(_END)

    @override
    def after_begin(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        cases = []
        for tool in tools:
            values = _arguments(lark, tool, lambda name: f"<parameter={name}>\n", "\n</parameter>", "\n")
            end = lark.text(f"</function>\n{_END}", self.marks)
            cases.append(f"{lark.text(f'{chr(10)}<function={tool.name}>{chr(10)}')} {values} {end}")
        return repeated(lark.one_of(cases), lark.text(f"\n{_BEGIN}", self.marks), parallel=parallel)


class Glm4(MarkedFormat):
    """Format of the tool calls of GLM-4.5.

    `<tool_call>` NAME `<arg_key>` NAME `</arg_key>` `<arg_value>` VALUE `</arg_value>` ... `</tool_call>`
    """

    name = "glm4"
    marks = (_BEGIN, _END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    begin: ClassVar[str] = _BEGIN

    @override
    def parse(self, text: TextReader) -> Steps[None]:
        while (yield from text.content_until(_BEGIN)):
            name, mark = yield from text.take_until("<arg_key>", _END)
            if mark is None or not name.strip():
                continue
            written = _Written(text, name.strip())
            while mark == "<arg_key>":
                key, _ = yield from text.take_until("</arg_key>")
                yield from text.take_until("<arg_value>")
                value, end = yield from text.take_until("</arg_value>")
                if end:
                    written.add(key.strip(), value)
                _, mark = yield from text.take_until("<arg_key>", _END)
            written.end()

    @override
    def after_begin(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        cases = []
        for tool in tools:
            values = _arguments(
                lark, tool, lambda name: f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>", "\n", self.marks
            )
            cases.append(f"{lark.text(tool.name + chr(10))} {values} {lark.mark(_END)}")
        return repeated(lark.one_of(cases), lark.text(f"\n{_BEGIN}", self.marks), parallel=parallel)


def _arguments(
    lark: Lark, tool: Tool, begin: Callable[[str], str], end: str, after: str, marks: Sequence[str] = ()
) -> str:
    """Returns the grammar expression of a call's arguments, in the order of the schema.

    Arguments that are not required may be left out.

    Args:
        lark: grammar to which rules are added.
        tool: the tool that is called.
        begin: function that returns the text before the value of an argument, given its name.
        end: text that ends a value.
        after: text after `end`, before the next argument.
        marks: see `Lark.text`.
    """
    needed = tool.parameters.get("required") or []
    items = []
    for name in tool.parameters.get("properties") or {}:
        value = lark.bare_value(property_of(tool.parameters, name), end, marks)
        item = lark.rule(f"{lark.text(begin(name), marks)} {value} {lark.text(after)}")
        items.append(item if name in needed else f"{item}?")
    return " ".join(items)
