"""Writes the grammars of answers, in llguidance's variant of the grammar language Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastspec.text.answers.values import types_of

_ANY: Final = r"(.|\n)"


class NoGrammar(ValueError):
    """Raised for a format or a schema for which no grammar can be written. The message says what the user can do."""


class Lark:
    """A grammar that is written rule by rule.

    Most methods add the rules that they need, and return an expression for the right side of other rules.

    Args:
        added: text -> id of the tokens that were added to the vocabulary, including special tokens. A grammar names
            such a token by its id, because its text would not match the token.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        """Returns the text of the grammar. `start` is the expression of the whole answer."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, expression: str) -> str:
        """Adds a rule for an expression. Returns the name of the rule."""
        return self._add("r", "", expression)

    def one_of(self, expressions: Sequence[str]) -> str:
        """Returns an expression that matches one of `expressions`."""
        return self.rule(" | ".join(expressions))

    def text(self, written: str, marks: Sequence[str] = ()) -> str:
        """Returns an expression that matches a fixed text.

        Args:
            written: the text.
            marks: parts of the text that must be matched by one token if the vocabulary has that token.
        """
        parts = re.split("|".join(f"({re.escape(mark)})" for mark in marks), written) if marks else [written]
        return " ".join(self.mark(part) if part in marks else _quoted(part) for part in parts if part)

    def mark(self, mark: str) -> str:
        """Returns an expression that matches a fixed text, `mark`.

        It matches the added token with this text. If there is no such token, it matches the characters.
        """
        token = self._added.get(mark)
        return _quoted(mark) if token is None else f"<[{token}]>"

    def has(self, mark: str) -> bool:
        """True if the text `mark` is an added token of the vocabulary."""
        return mark in self._added

    def optional(self, mark: str) -> str:
        """Returns an expression that matches the added token `mark` or nothing.

        Returns an empty text if there is no such token.
        """
        return f"{self.mark(mark)}?" if self.has(mark) else ""

    def json(self, schema: dict[str, Any]) -> str:
        """Returns an expression that matches JSON text that follows a schema."""
        return self.rule(f"%json {json.dumps(schema)}")

    def any_text(self, *without: str) -> str:
        """Returns an expression that matches every text without the marks in `without`, also the empty text.

        The text may have other added tokens.
        """
        return self._free(self._terminal(_ANY + "*", without), without)

    def until(self, mark: str) -> str:
        """Returns an expression that matches any text up to and with the first occurrence of `mark`."""
        if mark in self._added:
            return self.rule(f"{self.any_text(mark)} {self.mark(mark)}")
        return self._lazy(self._terminal(_ANY + "*", [mark]), mark)

    def _free(self, terminal: str, without: Sequence[str]) -> str:
        """Returns an expression that matches texts of a terminal, with added tokens between these texts.

        Args:
            terminal: name of a terminal of the grammar.
            without: marks whose added tokens may not occur.
        """
        others = sorted(set(self._added.values()) - {self._added.get(mark) for mark in without})
        between = f" (<[{_ranges(others)}]> {terminal}?)*" if others else ""
        return self.rule(f"{terminal}?{between}")

    def _lazy(self, terminal: str, end: str) -> str:
        """Returns an expression that matches text of a terminal up to and with the first occurrence of `end`."""
        return self._add("r", "[lazy]", f"{terminal} {_quoted(end)}")

    def text_but(self, beginning: str, mark: str) -> str:
        """Returns an expression that matches every text without a certain beginning and without a mark.

        It also matches the empty text.

        Args:
            beginning: regular expression. The matched text does not begin with a match of it.
            mark: the matched text does not contain this text.
        """
        first = self._terminal(_ANY + "*", [mark])
        self._rules[-1] += f" & ~/{beginning}{_ANY}*/"
        return self.rule(f"{first}?")

    def bare_value(self, schema: dict[str, Any], end: str, marks: Sequence[str] = ()) -> str:
        """Returns an expression that matches an argument's value, and the text after it.

        A value that is a text is written without quotes, other values as JSON.

        Args:
            schema: JSON schema of the value.
            end: the text after the value. A value that is a text does not contain `end`.
            marks: marks inside `end`, see the method `text`.

        Raises:
            NoGrammar: the schema demands a pattern or a format for a text.
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
    """Writes ascending token ids as ranges, in llguidance's notation: 3,5-9."""
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
