"""Format of reasoning between two fixed texts, such as `<think>` and `</think>`, at the beginning of an answer."""

from __future__ import annotations

from typing_extensions import override

from fastspec.text.answers.interface import ReasoningFormat
from fastspec.text.answers.lark import Lark
from fastspec.text.answers.reader import Steps, TextReader


class Between(ReasoningFormat):
    """Format of reasoning between two fixed texts. The prompt may already end with the first one.

    Args:
        name: name of the format.
        begin, end: the fixed texts before and after the reasoning.
        marks: special tokens in `begin` and `end`. Default: both are special tokens.
    """

    def __init__(self, name: str, begin: str, end: str, marks: tuple[str, ...] = ()) -> None:
        self.name, self.begin, self.end = name, begin, end  # type: ignore[misc]
        self.marks = marks or (begin, end)  # type: ignore[misc]

    @override
    def parse(self, text: TextReader) -> Steps[None]:
        if not text.opened:
            text.hold()
            yield from text.skip_blanks()
            if not (yield from text.starts(self.begin)):
                return
        yield from text.reasoning_until(self.end)

    def opens(self, end: str) -> bool:
        return end.rstrip().endswith(self.begin.rstrip())

    def before_answer(self, lark: Lark, *, opened: bool) -> str:
        marks = (*self.marks, self.begin)
        whole = lark.until(self.end) if opened else f'("\\n"? {lark.text(self.begin, marks)} {lark.until(self.end)})?'
        return lark.rule(f'{whole} ("\\n\\n" | "\\n")?')
