"""JSON schemas in the shapes that pydantic, zod and OpenAPI documents have in the wild."""

from __future__ import annotations

import enum
import random
import string
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AnyUrl, BaseModel, Field, SecretStr, create_model

Schema = dict[str, Any]


class Colour(enum.Enum):
    RED = "red"
    BLUE = 3


class Node(BaseModel):
    value: int
    kids: list[Node] = Field(default=[], max_length=2)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=1, max_length=6)]


SHORT = Annotated[str, Field(max_length=5)]
PYDANTIC: list[Any] = [
    *(int, float, bool, SHORT, Path, SecretStr, bytes, Decimal, datetime, date, time, timedelta, UUID, AnyUrl, Colour),
    *(Node, int | None, int | SHORT | None, dict[str, int], tuple[int, SHORT], list[SHORT], Any),
    *(Literal["a", 3, True], Annotated[Cat | Dog, Field(discriminator="kind")], list[Node]),
    *(Annotated[int, Field(gt=0, lt=100, multiple_of=5)], Annotated[str, Field(pattern="^[a-z]{2,4}$")]),
    *(Annotated[list[int], Field(min_length=1, max_length=3)], Annotated[float, Field(ge=-1, le=1)]),
]


def _name(chance: random.Random) -> str:
    return "".join(chance.choices(string.ascii_lowercase, k=3))


def of_pydantic(chance: random.Random) -> Schema:
    """The schema of a model with some random fields."""
    fields: dict[str, Any] = {}
    for kind in chance.choices(PYDANTIC, k=chance.randint(1, 4)):
        default = ... if chance.random() < 0.7 else None
        fields[_name(chance)] = (kind, Field(default, description="why", title=chance.choice([None, "A title"])))
    return create_model("Answer", **fields).model_json_schema()


def _zod(chance: random.Random, depth: int) -> Schema:
    leaf: list[Schema] = [
        {"type": "string", "maxLength": 5},
        {"type": "string", "format": chance.choice(["date-time", "email", "uuid", "uri", "base64", "emoji", "cuid2"])},
        {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "enum": ["a", "b", "c d"]},
        {"const": "x", "type": "string"},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        {"type": "string", "minLength": 1, "maxLength": 4, "pattern": "^[a-f]+$"},
    ]
    if depth == 0:
        return chance.choice(leaf)
    inner = _zod(chance, depth - 1)
    names = sorted({_name(chance) for _ in range(chance.randint(1, 3))})
    return chance.choice(
        [
            {
                "type": "object",
                "properties": {name: _zod(chance, depth - 1) for name in names},
                "required": names[: chance.randint(0, len(names))],
                "additionalProperties": False,
            },
            {"type": "array", "items": inner, "minItems": chance.randint(0, 1), "maxItems": 2},
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": inner},
            {"anyOf": [inner, {"type": "boolean"}]},
            {"type": "array", "prefixItems": [inner, {"type": "boolean"}], "items": False, "minItems": 2},
            {"allOf": [{"type": "object", "properties": {"one": inner}, "required": ["one"]}]},
        ]
    )


def of_zod(chance: random.Random) -> Schema:
    """An object as zod's toJSONSchema writes it."""
    fields = {_name(chance): _zod(chance, chance.randint(0, 2)) for _ in range(chance.randint(1, 3))}
    whole: Schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}
    return whole | {"properties": fields, "required": list(fields), "additionalProperties": False}


def of_openapi(chance: random.Random) -> Schema:
    """An object as OpenAPI 3.1 documents have it: annotations, formats of numbers, and definitions."""
    item: Schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "format": chance.choice(["int32", "int64"]), "readOnly": True, "example": 7},
            "format": {"type": "string", "maxLength": 3, "deprecated": True, "x-order": 2},
            "price": {"type": "number", "format": chance.choice(["float", "double"]), "minimum": 0},
        },
        "required": ["id"],
        "additionalProperties": False,
        "xml": {"name": "item"},
    }
    return {
        "title": "Order",
        "type": "object",
        "properties": {
            "items": {"type": "array", "items": {"$ref": "#/components/schemas/Item"}, "maxItems": 2},
            "state": {"type": "string", "enum": ["open", "closed"], "default": "open"},
            "note": {"type": ["string", "null"], "maxLength": 4},
            "file": {"type": "string", "format": chance.choice(["binary", "byte", "password"]), "maxLength": 3},
            "payment": {
                "oneOf": [{"$ref": "#/components/schemas/Card"}, {"$ref": "#/components/schemas/Bill"}],
                "discriminator": {"propertyName": "kind"},
            },
        },
        "required": chance.sample(["items", "state", "note", "file", "payment"], k=chance.randint(1, 5)),
        "additionalProperties": False,
        "components": {
            "schemas": {
                "Item": item,
                "Card": {"type": "object", "properties": {"kind": {"const": "card"}}, "required": ["kind"]},
                "Bill": {"type": "object", "properties": {"kind": {"const": "bill"}}, "required": ["kind"]},
            }
        },
        "externalDocs": {"url": "https://example.com"},
    }


MAKERS: dict[str, Callable[[random.Random], Schema]] = {"pydantic": of_pydantic, "zod": of_zod, "openapi": of_openapi}
