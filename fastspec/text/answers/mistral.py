"""Format of the tool calls of Mistral's models, after `[TOOL_CALLS]`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from fastspec.text.answers.events import Tool
from fastspec.text.answers.interface import MarkedFormat, json_call, repeated
from fastspec.text.answers.lark import Lark
from fastspec.text.answers.reader import Steps, TextReader
from fastspec.text.answers.values import dumped

_ARGS, _ID = "[ARGS]", "[CALL_ID]"


class Mistral(MarkedFormat):
    """Format of Mistral's tool calls: `[TOOL_CALLS]` and a JSON list of calls.

    Newer models write `[TOOL_CALLS]` NAME `[ARGS]` {...}, once for each call.

    Args:
        template: Jinja text of the chat template. It decides which of the two forms a grammar demands. `parse` reads
            both forms.
    """

    name = "mistral"
    marks = ("[TOOL_CALLS]", _ARGS, _ID)
    begin: ClassVar[str] = "[TOOL_CALLS]"

    def __init__(self, template: str) -> None:
        self._named = _ARGS in template

    def call_id(self) -> str:
        return secrets.token_hex(5)[:9]  # the templates accept nine letters and digits

    @override
    def parse(self, text: TextReader) -> Steps[None]:
        while (yield from text.content_until(self.begin)):
            yield from text.skip_blanks()
            if (yield from text.starts("[")):
                yield from _listed(text)
            elif (yield from text.next()) == "{":
                yield from json_call(text)
            else:
                yield from _named(text)

    @override
    def after_begin(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        if self._named:
            cases = [f"{lark.text(tool.name + _ARGS, self.marks)} {lark.json(tool.parameters)}" for tool in tools]
            return repeated(lark.one_of(cases), lark.mark(self.begin), parallel=parallel)
        cases = [f'{lark.text(_begin(tool))} {lark.json(tool.parameters)} "}}"' for tool in tools]
        calls = repeated(lark.one_of(cases), lark.text(", "), parallel=parallel)
        return f'" "? {lark.text("[")} {calls} {lark.text("]")}'


def _begin(tool: Tool) -> str:
    return f'{{"name": {dumped(tool.name)}, "arguments": '


def _listed(text: TextReader) -> Steps[None]:
    while (yield from json_call(text)):
        text.hold()
        yield from text.skip_blanks()
        if not (yield from text.starts(",")):
            if (yield from text.starts("]")):
                text.drop()
            break


def _named(text: TextReader) -> Steps[None]:
    name = yield from text.take_before(_ARGS, _ID, "{")
    if (yield from text.starts(_ID)):
        yield from text.take_before(_ARGS, "{")
    yield from text.starts(_ARGS)
    yield from text.skip_blanks()
    if name.strip() and (yield from text.next()) == "{":
        text.begin_call(name.strip())
        yield from text.json_value(text.arguments)
