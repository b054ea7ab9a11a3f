"""Formats of Llama's tool calls: JSON without a fixed text before it, and calls in the syntax of Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from typing_extensions import override

from fastspec.text.answers.events import Tool
from fastspec.text.answers.interface import ToolFormat, json_call, repeated
from fastspec.text.answers.lark import Lark
from fastspec.text.answers.reader import Steps, TextReader
from fastspec.text.answers.values import dumped, json_of_literal, property_of

_TAG: Final = "<|python_tag|>"
_START, _END = "<|python_start|>", "<|python_end|>"  # Llama 4


class LlamaJson(ToolFormat):
    """Format of tool calls: {"name": ..., "parameters": {...}} as the whole answer, or after `<|python_tag|>`.

    Several calls are separated by ";". No fixed text marks a call. So JSON is read as a call only if it has the name of
    an offered tool. `parse` also reads calls in the syntax of Python.
    """

    name = "llama3_json"
    marks = (_TAG, _START, _END)
    # regular expression for the beginning of an answer with calls; an answer without calls does not begin so
    _unlike: ClassVar[str] = r'\s*\{\s*"(name|type|id|parameters|arguments)"'

    @override
    def parse(self, text: TextReader) -> Steps[None]:
        text.hold()
        yield from text.skip_blanks()
        marked = (yield from text.starts(_TAG)) or (yield from text.starts(_START))
        first = yield from text.next()
        while marked or first in ("{", "[") or (yield from text.content_until(_TAG, _START)):
            marked, first = False, ""
            yield from text.skip_blanks()
            if (yield from text.starts("[")):
                yield from _python_calls(text)
            else:
                yield from _json_calls(text)
            yield from text.skip_blanks()
            if (yield from text.starts(_END)):
                text.drop()

    @override
    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        cases = [f'{lark.text(_begin(tool))} {lark.json(tool.parameters)} "}}"' for tool in tools]
        return lark.rule(f"{lark.optional(_TAG)} {repeated(lark.one_of(cases), lark.text('; '), parallel=parallel)}")

    def text_or_calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        calls = self.calls(lark, tools, parallel=parallel)
        return lark.one_of([lark.text_but(self._unlike, _TAG), calls])


class Pythonic(LlamaJson):
    """Format of tool calls: [NAME(ARGUMENT=VALUE, ...), ...] as the whole answer.

    Llama 4 writes special tokens around it. `parse` also reads the calls of `LlamaJson`.
    """

    name = "pythonic"
    _unlike: ClassVar[str] = r"\s*\["

    @override
    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        cases = [f"{lark.text(tool.name + '(')} {_keywords(lark, tool)} {lark.text(')')}" for tool in tools]
        calls = repeated(lark.one_of(cases), lark.text(", "), parallel=parallel)
        listed = f"{lark.text('[')} {calls} {lark.text(']')}"
        return lark.one_of([listed, *([f"{lark.mark(_START)} {listed} {lark.mark(_END)}"] if lark.has(_START) else [])])


def _begin(tool: Tool) -> str:
    return f'{{"name": {dumped(tool.name)}, "parameters": '


def _keywords(lark: Lark, tool: Tool) -> str:
    """Returns the grammar expression of a call's arguments, each as NAME=VALUE.

    Required arguments come first. The others may be left out.
    """
    needed, properties = tool.parameters.get("required") or [], tool.parameters.get("properties") or {}

    def item(name: str) -> str:
        return f"{lark.text(name + '=')} {lark.json(property_of(tool.parameters, name))}"

    items = {name: lark.rule(item(name)) for name in properties}
    first = [rule for name, rule in items.items() if name in needed]
    others = [rule for name, rule in items.items() if name not in needed]
    comma = lark.text(", ")
    optional = [f"({comma} {rule})?" for rule in others]
    if first:
        return " ".join([f" {comma} ".join(first), *optional])
    cases = [" ".join([rule, *optional[at + 1 :]]) for at, rule in enumerate(others)]
    return f"({' | '.join(cases)})?" if cases else ""


def _json_calls(text: TextReader) -> Steps[None]:
    while (yield from json_call(text, text.tools.__contains__)):
        text.hold()
        yield from text.skip_blanks()
        if not (yield from text.starts(";")):
            break


def _python_calls(text: TextReader) -> Steps[None]:
    """Parses calls in the syntax of Python, up to the bracket that ends their list."""
    while True:
        yield from text.skip_blanks()
        name, mark = yield from text.take_until("(", "]", "\n")
        if mark != "(" or name not in text.tools:
            return
        yield from _python_call(text, name)
        text.hold()
        yield from text.skip_blanks()
        if not (yield from text.starts(",")):
            break
    if (yield from text.starts("]")):
        text.drop()


def _python_call(text: TextReader, name: str) -> Steps[None]:
    text.begin_call(name)
    before = "{"
    while True:
        yield from text.skip_blanks()
        key, mark = yield from text.take_until("=", ")")
        if mark != "=":
            break
        value = yield from text.python_value()
        text.arguments(f"{before}{dumped(key.strip())}: {json_of_literal(value)}")
        before = ", "
        if not (yield from text.starts(",")):
            yield from text.starts(")")
            break
    text.arguments("{}" if before == "{" else "}")
