"""Checks of a call's flags that need no model, made before models are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import typer

from fastspec.adaptive.controller import AUTO
from fastspec.grammar.spec import GrammarSpec
from fastspec.sampling.rules import MODES


def check_call(given: Mapping[str, Any]) -> None:
    """Refuses flags of `generate`, `chat` or `serve` that no model could satisfy.

    Args:
        given: values by the names of the command's parameters; a name that is missing is not checked.

    Raises:
        typer.BadParameter: a value out of range, or two values that exclude each other.
    """
    drafts, longest = given.get("num_speculative_tokens", 0), given.get("max_length")
    if drafts != AUTO and drafts < 0:
        _refuse("--num-speculative-tokens", f"must be 0 or more, or {AUTO}; got {drafts}")
    if longest is not None and longest < 2:
        _refuse("--max-length", f"must be at least 2, one token of prompt and one of text; got {longest}")
    new = given.get("max_new_tokens")
    if new is not None and longest is not None and new >= longest:
        _refuse("--max-new-tokens", f"{new} leaves no room for a prompt in --max-length {longest}; lower it")
    copies = given.get("num_return_sequences", 1)
    if copies > 1 and not given["temperature"]:
        _refuse("--num-return-sequences", f"{copies} greedy texts would all be the same; give --temperature too")
    if copies > 1 and given.get("color"):
        _refuse("--color", "shows one text as it is drafted; leave out --num-return-sequences")
    rule = given.get("verification")
    if rule is not None and rule not in MODES:
        _refuse("--verification", f"must be one of {', '.join(MODES)}; got {rule!r}")


def check_grammar(options: Mapping[str, Any]) -> None:
    """Refuses a grammar that cannot be read, or whose library is missing.

    Args:
        options: keywords of `generate`.

    Raises:
        ValueError: as `GrammarSpec.read`, or llguidance is not installed.
    """
    grammar = GrammarSpec.read(options)
    if grammar is not None and find_spec("llguidance") is None:
        raise ValueError(grammar.missing_library)


def _refuse(flag: str, message: str) -> None:
    raise typer.BadParameter(message, param_hint=flag)
