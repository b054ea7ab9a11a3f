"""Reader of an answer's text while it arrives, for parsers that are Python generators.

A parser calls the methods of a `TextReader` with `yield from`. A method that needs more text than has arrived yields,
and continues when more text has arrived. It decides by the text alone. So the parser's events do not depend on the
division of the text into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TypeAlias, TypeVar

from fastspec.text.answers.events import Arguments, CallBegins, Content, Event, Reasoning, Tool

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]

_BLANK = " \t\r\n"


class TextReader:
    """Holds the text of an answer that its parser has not taken yet, and collects the parser's events.

    A mark is a fixed text, such as `<tool_call>`. Text that a parser takes after a mark becomes content if no call
    begins. So nothing that the model wrote is lost.

    Args:
        tools: tools that may be called, by name. Empty: there are no calls.
        opened: True if the prompt has already begun the reasoning.

    Attributes:
        tools, opened: the arguments of the constructor.
        in_reasoning: True while the parser reads reasoning.
    """

    def __init__(self, tools: Mapping[str, Tool], *, opened: bool = False) -> None:
        self.tools, self.opened, self.in_reasoning = tools, opened, False
        self._text, self._ended = "", False
        self._events: list[Event] = []
        self._calls = 0
        self._skipped = ""  # characters that are dropped at the beginning of the next content or reasoning
        self._held: tuple[type[Content | Reasoning], str] = (Content, "")  # blanks at the end of the last piece
        # text that was taken since the last mark; None: it does not become content
        self._taken: str | None = None

    def feed(self, text: str, *, last: bool = False) -> None:
        """Appends text that has arrived. `last`: True if the answer ends after this text."""
        self._text += text
        self._ended = self._ended or last

    def events(self) -> list[Event]:
        """Returns the events since the last call of this method. Consecutive events of one kind are joined."""
        found, self._events = self._events, []
        return found

    # methods by which a parser adds events

    def content(self, text: str) -> None:
        """Adds a piece of content. Blanks at its end are held back, and dropped if a call follows."""
        text = text.lstrip(self._skipped) if self._skipped else text
        if text:
            self._skipped = ""
            self._add_text(Content, text, _BLANK)

    def reasoning(self, text: str) -> None:
        """Adds a piece of reasoning. Line feeds at the beginning and the end of the whole reasoning are dropped."""
        text = text.lstrip(self._skipped) if self._skipped else text
        if text:
            self._skipped = ""
            self._add_text(Reasoning, text, "\n")

    def begin_call(self, name: str) -> None:
        """Adds an event: a call of the tool `name` begins. Its arguments follow."""
        self._taken, self._held, self._skipped = None, (Content, ""), _BLANK
        self._push(CallBegins(self._calls, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Adds a piece of the last call's arguments, which are JSON text."""
        if text:
            self._push(Arguments(self._calls - 1, text))

    def hold(self) -> None:
        """Starts to keep the text that the parser takes. It becomes content if no call begins."""
        self._give_back()
        self._taken = ""

    def drop(self) -> None:
        """Drops the text that was taken since the last mark or `hold`, so that it does not become content."""
        self._taken = None

    # methods by which a parser takes text

    def content_until(self, *marks: str) -> Steps[str | None]:
        """Takes text up to the first occurrence of any mark, and adds it as content. The mark is also taken.

        Returns:
            The mark. If several marks begin at the same place, it is the longest one. None: the answer has ended.
        """
        self._give_back()
        mark = yield from self._pass(self.content, marks)
        self._taken = mark
        if mark is None:
            self._flush()
        return mark

    def reasoning_until(self, *marks: str) -> Steps[str | None]:
        """Takes text up to the first occurrence of any mark, and adds it as reasoning. Returns: see `content_until`."""
        self._taken, self.in_reasoning, self._skipped = None, True, "\n"
        mark = yield from self._pass(self.reasoning, marks)
        if mark is not None:
            self.in_reasoning, self._held, self._skipped = False, (Content, ""), "\n"
        return mark

    def take_until(self, *marks: str) -> Steps[tuple[str, str | None]]:
        """Takes text up to and with the first occurrence of any mark. Returns (text before the mark, mark).

        The mark is None if the answer has ended.
        """
        parts: list[str] = []
        mark = yield from self._pass(parts.append, marks)
        return "".join(parts), mark

    def take_before(self, *marks: str) -> Steps[str]:
        """Takes and returns the text before the first occurrence of any mark. The mark is not taken."""
        taken, mark = yield from self.take_until(*marks)
        if mark is not None:
            self._text = mark + self._text
            if self._taken is not None:
                self._taken = self._taken.removesuffix(mark)
        return taken

    def arguments_until(self, *marks: str) -> Steps[str | None]:
        """Takes text up to the first occurrence of any mark, and adds it to the arguments of the last call.

        Returns: see `content_until`.
        """
        return (yield from self._pass(self.arguments, marks))

    def starts(self, mark: str) -> Steps[bool]:
        """Returns True if the next text is `mark`, and takes it. Returns False if not, and takes nothing."""
        while not self._ended and len(self._text) < len(mark) and mark.startswith(self._text):
            yield
        found = self._text.startswith(mark)
        if found:
            self._cut(len(mark))
        return found

    def next(self) -> Steps[str]:
        """Returns the next character without taking it. Returns an empty text at the end of the answer."""
        while not self._text and not self._ended:
            yield
        return self._text[:1]

    def skip_blanks(self) -> Steps[None]:
        """Takes blanks and line feeds."""
        while (yield from self.next()) and self._text[0] in _BLANK:
            self._cut(1)

    def json_value(self, take: Callable[[str], object]) -> Steps[bool]:
        """Takes one JSON value, and passes its text to `take` while it arrives.

        Returns:
            False if the answer has ended within the value.
        """
        depth, quoted, escaped, begun = 0, False, False, False
        while True:
            for at, char in enumerate(self._text):
                end = None
                if quoted:
                    quoted = escaped or char != '"'
                    escaped = not escaped and char == "\\"
                    end = at + 1 if not quoted and not depth else None
                elif char == '"':
                    quoted = True
                    end = at if begun and not depth else None
                elif char in "{[":
                    end = at if begun and not depth else None
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    end = at if depth < 0 else None if depth else at + 1
                elif char == "<" or (not depth and char in ",: \n\r\t"):  # outside of a text no JSON has a "<"
                    end = at
                begun = True
                if end is not None:
                    take(self._cut(end))
                    return True
            take(self._cut(len(self._text)))
            if self._ended:
                return False
            yield

    def json_text(self) -> Steps[str]:
        """Takes and returns the text of one JSON value. It is incomplete if the answer ends within the value."""
        parts: list[str] = []
        yield from self.json_value(parts.append)
        return "".join(parts)

    def json_string(self) -> Steps[str | None]:
        """Takes a JSON string, and returns its value. Returns None if the next value is not a valid string."""
        if (yield from self.next()) != '"':
            return None
        return string_of((yield from self.json_text()))

    def python_value(self) -> Steps[str]:
        """Takes and returns the text of a Python literal. It ends before a comma or bracket that is not part of it."""
        taken, depth, quote, escaped = "", 0, "", False
        while char := (yield from self.next()):
            if quote:
                quote = quote if escaped or char != quote else ""
                escaped = not escaped and char == "\\"
            elif char in "\"'":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            if depth < 0 or (not depth and not quote and char == ","):
                break
            taken += self._cut(1)
        return taken

    def rest(self) -> Steps[None]:
        """Reads the rest of the answer and adds it to its content."""
        yield from self.content_until()

    def _pass(self, take: Callable[[str], object], marks: Iterable[str]) -> Steps[str | None]:
        while True:
            at, mark = self._find(marks)
            if at:
                take(self._cut(at))
            if mark is not None:
                self._cut(len(mark))
                return mark
            if self._ended and not self._text:
                return None
            if not self._ended:
                yield

    def _find(self, marks: Iterable[str]) -> tuple[int, str | None]:
        """Searches the text that has not been taken for the first occurrence of any mark.

        Returns:
            (number of characters before the mark, mark). If there is no mark, it is None, and the number is that of all
            characters. If the text may end with an incomplete mark, only the characters before it are counted.
        """
        text = self._text
        places: list[tuple[int, int, str | None]] = []
        for mark in marks:
            at = text.find(mark)
            if at >= 0:
                places.append((at, -len(mark), mark))
            elif not self._ended and (size := overlap(text, mark)):
                places.append((len(text) - size, -len(mark), None))
        at, _, found = min(places, key=lambda place: place[:2], default=(len(text), 0, None))
        return at, found

    def _cut(self, size: int) -> str:
        piece, self._text = self._text[:size], self._text[size:]
        if self._taken is not None:
            self._taken += piece
        return piece

    def _give_back(self) -> None:
        """Adds the text that was taken since the last mark or `hold` as content, if no call has begun."""
        taken, self._taken = self._taken, None
        if taken:
            self.content(taken)

    def _flush(self) -> None:
        kind, blanks = self._held
        self._held = (Content, "")
        if blanks:
            self._push(kind(blanks))

    def _add_text(self, kind: type[Content | Reasoning], text: str, blanks: str) -> None:
        if self._held[0] is not kind:
            self._flush()
        text = self._held[1] + text
        kept = text.rstrip(blanks)
        if kept:
            self._push(kind(kept))
        self._held = (kind, text[len(kept) :])

    def _push(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Content) and isinstance(last, Content):
            self._events[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            self._events[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index:
            self._events[-1] = Arguments(last.index, last.text + event.text)
        else:
            self._events.append(event)


def overlap(text: str, mark: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `mark`. 0: there is none."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def string_of(text: str) -> str | None:
    """Returns the value of a JSON string.

    Returns None if `text` is not a JSON string, or has half of a surrogate pair.
    """
    try:
        value = json.loads(text)
        value.encode()
    except (ValueError, AttributeError):
        return None
    return str(value)
