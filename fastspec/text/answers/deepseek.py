"""Format of the tool calls of DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from typing_extensions import override

from fastspec.text.answers.events import Tool
from fastspec.text.answers.interface import MarkedFormat, repeated
from fastspec.text.answers.lark import Lark
from fastspec.text.answers.reader import Steps, TextReader

_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_END: Final = "<｜tool▁calls▁end｜>"
_SEP: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```json\n"


class DeepSeek(MarkedFormat):
    """Format of DeepSeek's tool calls.

    V3: a call is `function` SEPARATOR NAME, then JSON between lines of backticks. V3.1: a call is NAME SEPARATOR JSON.

    Args:
        template: Jinja text of the chat template. It decides which of the two forms a grammar demands. `parse` reads
            both forms.
    """

    name = "deepseek_v3"
    begin: ClassVar[str] = "<｜tool▁calls▁begin｜>"
    marks = (begin, _END, _CALL, _CALL_END, _SEP)

    def __init__(self, template: str) -> None:
        self._fenced = "```json" in template

    @override
    def parse(self, text: TextReader) -> Steps[None]:
        while (yield from text.content_until(self.begin)):
            yield from text.skip_blanks()
            while (yield from text.starts(_CALL)):
                name, _ = yield from text.take_until(_SEP)
                yield from text.skip_blanks()
                if (yield from text.next()) != "{":
                    name, _ = yield from text.take_until("\n")
                    yield from text.starts(_FENCE)
                    yield from text.skip_blanks()
                if not name.strip() or (yield from text.next()) != "{":
                    break
                text.begin_call(name.strip())
                yield from text.json_value(text.arguments)
                yield from text.take_until(_CALL_END)
                yield from text.skip_blanks()
            yield from text.starts(_END)

    @override
    def after_begin(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        cases = []
        for tool in tools:
            before = f"function{_SEP}{tool.name}\n{_FENCE}" if self._fenced else f"{tool.name}{_SEP}"
            after = f"\n```{_CALL_END}" if self._fenced else _CALL_END
            head = lark.text(_CALL + before, self.marks)
            cases.append(f"{head} {lark.json(tool.parameters)} {lark.text(after, self.marks)}")
        between = lark.text("\n") if self._fenced else ""
        return f"{repeated(lark.one_of(cases), between, parallel=parallel)} {lark.mark(_END)}"
