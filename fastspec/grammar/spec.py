"""GrammarSpec: a grammar as the user gives it: a JSON schema, a regular expression, or a Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastspec.errors import UnsupportedOption

KINDS = JSON_SCHEMA, REGEX, GRAMMAR = "json_schema", "regex", "grammar"  # the keywords of `generate` for grammars


class GrammarError(UnsupportedOption):
    """Error for a grammar that cannot be parsed or allows no text, or if llguidance or a tokenizer is missing."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Grammar of a row as the user gave it.

    Attributes:
        kind: type of the grammar, one of KINDS.
        text: a JSON schema as JSON, a regular expression, or a grammar in Lark's notation.
    """

    kind: str
    text: str

    @property
    def missing_library(self) -> str:
        """Error message for an environment without llguidance."""
        return f"{self.kind} needs the package llguidance, which is not installed: pip install 'llguidance>=1.9'"

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> GrammarSpec | None:
        """Returns the grammar of one row. Returns None if the row's options have no grammar.

        Args:
            given: options of the row by keyword.

        Raises:
            ValueError: more than one of `KINDS` is given, or a value has a wrong type.
        """
        asked = [kind for kind in KINDS if given.get(kind) is not None]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)} are given for one prompt; give only one of them")
        if not asked:
            return None
        kind, value = asked[0], given[asked[0]]
        return cls(kind, _schema(value) if kind == JSON_SCHEMA else _text(kind, value))


def _text(kind: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{kind} must be a text, got {value!r}")
    return value


def _schema(value: Any) -> str:
    """Converts a dict, a JSON text, or a pydantic class to a schema as JSON."""
    if callable(made := getattr(value, "model_json_schema", None)):
        value = made()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"json_schema must be a JSON schema, got a text that is not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"json_schema must be a JSON schema (a dict, or its JSON), got {value!r}")
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"json_schema must be a JSON schema, got a dict that cannot be written as JSON ({error})"
        ) from None
