"""Converts arguments of tool calls that a model writes without JSON's quotes. The tool's schema has their types."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any, Final

_TYPES: Final = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def property_of(parameters: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the JSON schema of one argument, with the definitions to which it may refer.

    Returns {} if the tool's schema does not describe the argument.

    Args:
        parameters: JSON schema of all arguments of the tool.
        name: name of the argument.
    """
    found = (parameters.get("properties") or {}).get(name)
    if not isinstance(found, dict):
        return {}
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return {**found, **shared}


def types_of(schema: dict[str, Any], root: dict[str, Any] | None = None, depth: int = 0) -> set[str]:
    """Returns the JSON types that a schema allows. Returns an empty set if the schema does not limit the type.

    Args:
        schema: JSON schema of a value.
        root: schema with the definitions to which `$ref` refers. None: `schema` has them.
        depth: number of schemas around this one. If it is 8 or more, `$ref` is not followed.
    """
    root = schema if root is None else root
    if isinstance(schema.get("$ref"), str) and depth < 8:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return types_of(target, root, depth + 1) if isinstance(target, dict) else set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(one) for one in kind}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return {_TYPES.get(type(value), "null") for value in values}
    cases = [case for word in ("anyOf", "oneOf") for case in schema.get(word) or [] if isinstance(case, dict)]
    each = [types_of(case, root, depth + 1) for case in cases]
    return set().union(*each) if each and all(each) else set()


def json_of_text(text: str, schema: dict[str, Any]) -> str:
    """Returns the JSON text of an argument whose string values the model writes without quotes.

    Args:
        text: text of the argument, as the model wrote it.
        schema: JSON schema of the argument. If it allows only strings, `text` is a string. Otherwise `text` is read as
            a literal of JSON or Python if possible.
    """
    types = types_of(schema)
    if types == {"string"}:
        return dumped(text)
    value = _read(text.strip())
    fits = value is not None and (not types or bool(types & set(_names_of(value[0]))))
    return dumped(value[0]) if value is not None and (fits or "string" not in types) else dumped(text)


def json_of_literal(text: str) -> str:
    """Converts a literal of Python or JSON to JSON text. A text that is neither becomes a JSON string."""
    value = _read(text.strip())
    return dumped(text.strip() if value is None else value[0])


def dumped(value: object) -> str:
    """Returns the JSON text of a value. Half of a surrogate pair is escaped, because UTF-8 cannot encode it."""
    text = json.dumps(value, ensure_ascii=False, default=list)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, default=list)
    return text


def _read(text: str) -> tuple[object] | None:
    """Returns the value of a literal of JSON or Python as a tuple of length 1.

    Returns None if `text` is no such literal. The tuple distinguishes this from the value None.
    """
    try:
        return (json.loads(text, parse_constant=_refused),)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False, default=list)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return (value,)


def _names_of(value: object) -> Iterator[str]:
    yield _TYPES.get(type(value), "null")
    if isinstance(value, int) and not isinstance(value, bool):
        yield "number"
    if isinstance(value, float) and value.is_integer():
        yield "integer"


def _refused(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
