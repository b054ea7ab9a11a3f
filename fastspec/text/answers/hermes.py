"""Format of tool calls as JSON in tags: Hermes, Qwen 2.5, Qwen 3 and many others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from fastspec.text.answers.events import Tool
from fastspec.text.answers.interface import MarkedFormat, json_call, repeated
from fastspec.text.answers.lark import Lark
from fastspec.text.answers.reader import Steps, TextReader
from fastspec.text.answers.values import dumped


class Hermes(MarkedFormat):
    """Format of tool calls: `<tool_call>` {"name": ..., "arguments": {...}} `</tool_call>`, once for each call."""

    name = "hermes"
    marks = ("<tool_call>", "</tool_call>")
    begin: ClassVar[str] = "<tool_call>"

    @override
    def parse(self, text: TextReader) -> Steps[None]:
        while (yield from text.content_until(self.begin)):
            if (yield from json_call(text)):
                yield from text.take_until("</tool_call>")

    @override
    def after_begin(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        end = lark.text("}\n" + self.marks[1], self.marks)
        cases = [f"{lark.text(_begin(tool))} {lark.json(tool.parameters)} {end}" for tool in tools]
        return repeated(lark.one_of(cases), lark.text("\n<tool_call>", self.marks), parallel=parallel)


def _begin(tool: Tool) -> str:
    return f'\n{{"name": {dumped(tool.name)}, "arguments": '
