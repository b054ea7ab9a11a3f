"""Format of gpt-oss (OpenAI's harmony): channels for analysis, commentary with tool calls, and the final answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from fastspec.text.answers.events import Tool
from fastspec.text.answers.interface import ReasoningFormat, ToolFormat
from fastspec.text.answers.lark import Lark
from fastspec.text.answers.reader import Steps, TextReader

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_CONSTRAIN: Final = "<|constrain|>"
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class Harmony(ToolFormat, ReasoningFormat):
    """Format of gpt-oss (OpenAI's harmony). An answer is a sequence of messages.

    Each message has a header with its channel and its recipient.
    """

    name = "harmony"
    marks = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    @override
    def parse(self, text: TextReader) -> Steps[None]:
        mark: str | None = ""
        while mark is not None:
            text.hold()
            header, mark = yield from text.take_until(_MESSAGE)
            if mark is None and _CHANNEL not in header and _START not in header:
                return  # no header: what was taken becomes content
            text.drop()
            called = _RECIPIENT.search(header)
            if mark is None:
                return
            if called and text.tools:
                text.begin_call(called[1])
                mark = yield from text.arguments_until(*_ENDS)
            elif _ANALYSIS.search(header):
                mark = yield from text.reasoning_until(*_ENDS)
            else:
                mark = yield from text.content_until(*_ENDS)
                text.drop()

    def opens(self, end: str) -> bool:
        return False  # a prompt ends before the first header

    def before_answer(self, lark: Lark, *, opened: bool) -> str:
        head = lark.text(f"{_CHANNEL}analysis{_MESSAGE}", self.marks)
        return lark.rule(f"({head} {lark.until(_ENDS[0])} {lark.text(f'{_START}assistant', self.marks)})*")

    def before_content(self, lark: Lark) -> str:
        return lark.text(f"{_CHANNEL}final{_MESSAGE}", self.marks)

    @override
    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        cases = []  # `parallel` has no effect: the token that ends a call also ends the answer
        for tool in tools:
            schema = lark.json(tool.parameters)
            for head in (
                f"{_CHANNEL}commentary to=functions.{tool.name} {_CONSTRAIN}json{_MESSAGE}",
                f" to=functions.{tool.name}{_CHANNEL}commentary {_CONSTRAIN}json{_MESSAGE}",
            ):
                cases.append(f"{lark.text(head, self.marks)} {schema}")
        return lark.one_of(cases)

    def text_or_calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        final = f"{self.before_content(lark)} {lark.any_text()}"
        return lark.one_of([final, self.calls(lark, tools, parallel=parallel)])
