"""Grammars of answers, in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastspec.text.answers.values import types_of

_ANY: Final = r"(.|\n)"


class NoGrammar(ValueError):
    """A format or a schema for which no grammar can be written; the message has the next step."""


class Lark:
    """Writes a grammar rule by rule. Its methods return expressions for the right side of a rule.

    Args:
        added: ids of the tokens that were added to the vocabulary, special ones among them. A grammar writes such a
            token as its id, because its text does not match it.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        """The whole grammar; `start` is the whole answer."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, expression: str) -> str:
        """Adds a rule; returns its name."""
        return self._add("r", "", expression)

    def one_of(self, expressions: Sequence[str]) -> str:
        """One of some expressions."""
        return self.rule(" | ".join(expressions))

    def text(self, written: str, marks: Sequence[str] = ()) -> str:
        """A fixed text. Marks in it that are tokens of the vocabulary are written as these tokens.

        Args:
            written: the text.
            marks: marks inside the text.
        """
        parts = re.split("|".join(f"({re.escape(mark)})" for mark in marks), written) if marks else [written]
        return " ".join(self.mark(part) if part in marks else _quoted(part) for part in parts if part)

    def mark(self, mark: str) -> str:
        """A mark: its token, or its letters where it is none."""
        token = self._added.get(mark)
        return _quoted(mark) if token is None else f"<[{token}]>"

    def has(self, mark: str) -> bool:
        """True if the mark is a token."""
        return mark in self._added

    def optional(self, mark: str) -> str:
        """A mark that may be left out; nothing if it is no token."""
        return f"{self.mark(mark)}?" if self.has(mark) else ""

    def json(self, schema: dict[str, Any]) -> str:
        """JSON of a schema."""
        return self.rule(f"%json {json.dumps(schema)}")

    def any_text(self, *without: str) -> str:
        """Any text in which these marks are not, possibly none. It may have other added tokens."""
        return self._free(self._terminal(_ANY + "*", without), without)

    def until(self, mark: str) -> str:
        """Any text that ends with the mark, and the mark."""
        if mark in self._added:
            return self.rule(f"{self.any_text(mark)} {self.mark(mark)}")
        return self._lazy(self._terminal(_ANY + "*", [mark]), mark)

    def _free(self, terminal: str, without: Sequence[str]) -> str:
        """Texts of a terminal, with added tokens between them."""
        others = sorted(set(self._added.values()) - {self._added.get(mark) for mark in without})
        between = f" (<[{_ranges(others)}]> {terminal}?)*" if others else ""
        return self.rule(f"{terminal}?{between}")

    def _lazy(self, terminal: str, end: str) -> str:
        """A text of a terminal up to the first place where another text follows, and that text."""
        return self._add("r", "[lazy]", f"{terminal} {_quoted(end)}")

    def text_but(self, beginning: str, mark: str) -> str:
        """Any text in which the mark is not spelled, and that does not begin so.

        Args:
            beginning: a regular expression.
            mark: not within the text.
        """
        first = self._terminal(_ANY + "*", [mark])
        self._rules[-1] += f" & ~/{beginning}{_ANY}*/"
        return self.rule(f"{first}?")

    def bare_value(self, schema: dict[str, Any], end: str, marks: Sequence[str] = ()) -> str:
        """A value that is written without quotes if it is a text, and the text after it.

        Args:
            schema: JSON schema of the value.
            end: the text after it, which is not within it.
            marks: see `text`.

        Raises:
            NoGrammar: texts with a pattern or a format.
        """
        types = types_of(schema)
        cases = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
        )
        if cases:
            written = [case if isinstance(case, str) else json.dumps(case, ensure_ascii=False) for case in cases]
            return f"({' | '.join(map(_quoted, written))}) {self.text(end, marks)}"
        if types and "string" not in types:
            return f"{self.json(schema)} {self.text(end, marks)}"
        for word in ("pattern", "format"):
            if word in schema:
                raise NoGrammar(
                    f"the model writes texts without quotes, and their {word} cannot be checked there, got "
                    f"{schema[word]!r}; leave it out of the schema"
                )
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
        text = self._terminal(f"{_ANY}{{{shortest},{longest}}}", [end])
        if end in self._added:
            return f"{text}{'' if shortest else '?'} {self.mark(end)}"
        return self._lazy(text, end)

    def _terminal(self, pattern: str, without: Sequence[str]) -> str:
        text = f"/{pattern}/" + "".join(rf" & ~/{_ANY}*{_escaped(mark)}{_ANY}*/" for mark in without)
        return self._add("T", "", text)

    def _add(self, kind: str, options: str, expression: str) -> str:
        name = f"{kind}{'_' if kind.islower() else ''}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name


def _ranges(ids: Sequence[int]) -> str:
    """Ascending ids in the notation of token ranges: 3,5-9."""
    parts: list[list[int]] = []
    for id in ids:
        if parts and parts[-1][1] == id - 1:
            parts[-1][1] = id
        else:
            parts.append([id, id])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(mark: str) -> str:
    return re.escape(mark).replace("/", r"\/").replace("\n", "n")
