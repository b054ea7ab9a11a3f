"""OpenAPI document of the server, for GET /openapi.json. It has the schemas of the classes that parse requests."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import fastspec
from fastspec.server.field_table import RESPONSE_ROW_OF, ROW_OF
from fastspec.server.fields import Chat, Completion
from fastspec.server.responses.body import ResponseBody
from fastspec.server.responses.routes import NewConversation, NewItems, NewMetadata
from fastspec.server.tokens import Detokenize, Health, Prompt, Tokenize, Tokens, Version
from fastspec.server.weights import Paused, Sleeping, UpdateWeights, WeightVersion

Json: TypeAlias = "dict[str, Any]"

_REF: Final = "#/components/schemas/{model}"
_KEY: Final = [{"key": list[str]()}]
_ERROR: Final[Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE: Final[Json] = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {"type": "object"},
        "completion_tokens_details": {"type": "object"},
    },
}
_MODEL: Final[Json] = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "root": {"type": "string"},
        "parent": {"type": ["string", "null"]},
        "max_model_len": {"type": "integer"},
        "permission": {"type": "array", "items": {"type": "object"}},
    },
}
_MODELS: Final[Json] = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": _REF.format(model="Model")}},
    },
}
_PAGE: Final[list[Json]] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
_RESPONSE: Final[Json] = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "status", "output", "tools", "tool_choice"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "model": {"type": "string"},
        "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "output": {"type": "array", "items": {"type": "object", "required": ["id", "type", "status"]}},
        "tools": {"type": "array", "items": {"type": "object"}},
    },
}


def _answer(kind: str) -> Json:
    """Returns the JSON schema of an answer of /v1/completions or /v1/chat/completions. `kind`: its key `object`."""
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "system_fingerprint": {"type": "string"},
            "choices": {"type": "array", "items": {"type": "object", "required": ["index", "finish_reason"]}},
            "usage": {"$ref": _REF.format(model="Usage")},
        },
    }


def description(root_path: str = "", *, weight_updates: bool = False) -> Json:
    """Returns the OpenAPI document of a server.

    Args:
        root_path: path that a proxy puts before the paths of the server. Empty: there is none.
        weight_updates: True adds the paths for a trainer, such as /update_weights.
    """
    bodies: list[type[BaseModel]] = [
        Chat,
        Completion,
        ResponseBody,
        NewConversation,
        NewItems,
        NewMetadata,
        Tokenize,
        Detokenize,
        Tokens,
        Prompt,
        Health,
        Version,
    ]
    if weight_updates:
        bodies += [UpdateWeights, WeightVersion, Paused, Sleeping]
    _, schemas = models_json_schema([(each, "validation") for each in bodies], ref_template=_REF)
    components: Json = schemas["$defs"] | {
        "Error": _ERROR,
        "Usage": _USAGE,
        "Model": _MODEL,
        "Models": _MODELS,
        "ChatAnswer": _answer("chat.completion"),
        "CompletionAnswer": _answer("text_completion"),
        "ResponseAnswer": _RESPONSE,
    }
    for body, rows in ((Chat, ROW_OF), (Completion, ROW_OF), (ResponseBody, RESPONSE_ROW_OF)):
        for field, schema in components[body.__name__]["properties"].items():
            schema["description"] = rows[field].note
    name, response = _path_parameter("name"), _json("ResponseAnswer")
    return {
        "openapi": "3.1.0",
        "info": {"title": "fastspec", "version": fastspec.__version__},
        "servers": [{"url": root_path or "/"}],
        "security": _KEY,
        "paths": {
            "/health": _open_get("Tells that the models are loaded.", "Health"),
            "/ping": _open_get("Tells the same as /health.", "Health"),
            "/version": {"get": _operation("Tells the version of fastspec.", _json("Version"))},
            "/metrics": {"get": _operation("Counts and times.", {"text/plain": {"schema": {"type": "string"}}})},
            "/openapi.json": {"get": _operation("This document.", _ANY)},
            "/tokenize": _post("Token ids of a prompt or of messages.", Tokenize, _json("Tokens")),
            "/detokenize": _post("Text of token ids.", Detokenize, _json("Prompt")),
            "/v1/models": {"get": _operation("Lists the names of the model.", _json("Models"))},
            "/v1/models/{name}": {"get": _operation("Tells of one name.", _json("Model")) | {"parameters": [name]}},
            "/v1/completions": _post("Continues prompts.", Completion, _json("CompletionAnswer") | _EVENTS),
            "/v1/chat/completions": _post("Answers messages.", Chat, _json("ChatAnswer") | _EVENTS),
            "/v1/responses": _post("Answers items of a conversation.", ResponseBody, response | _EVENTS),
            "/v1/responses/input_tokens": _post("Counts the tokens of a prompt.", ResponseBody, _ANY),
        }
        | _of_the_store()
        | (_of_a_trainer() if weight_updates else {}),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _of_the_store() -> Json:
    """Returns the OpenAPI entries of the paths of stored responses and conversations."""
    id, item, response = _path_parameter("id"), _path_parameter("item"), _json("ResponseAnswer")
    follow = [
        {"name": "stream", "in": "query", "schema": {"enum": ["true", "false"], "default": "false"}},
        {"name": "starting_after", "in": "query", "schema": {"type": "integer"}},
    ]
    return {
        "/v1/responses/{id}": {
            "get": _operation("Returns a stored response.", response | _EVENTS) | {"parameters": [id, *follow]},
            "delete": _operation("Forgets a stored response.", _ANY) | {"parameters": [id]},
        },
        "/v1/responses/{id}/cancel": {
            "post": _operation("Cancels a response of the background.", response) | {"parameters": [id]}
        },
        "/v1/responses/{id}/input_items": {
            "get": _operation("Lists the items before its output.", _ANY) | {"parameters": [id, *_PAGE]}
        },
        "/v1/conversations": _post("Begins a conversation.", NewConversation, _ANY),
        "/v1/conversations/{id}": {
            "parameters": [id],
            "get": _operation("Returns a conversation without its items.", _ANY),
            "delete": _operation("Forgets a conversation.", _ANY),
            **_post("Replaces its metadata.", NewMetadata, _ANY),
        },
        "/v1/conversations/{id}/items": {
            "parameters": [id],
            "get": _operation("Lists its items.", _ANY) | {"parameters": _PAGE},
            **_post("Adds items.", NewItems, _ANY),
        },
        "/v1/conversations/{id}/items/{item}": {
            "parameters": [id, item],
            "get": _operation("Returns one item.", _ANY),
            "delete": _operation("Removes one item.", _ANY),
        },
    }


def _of_a_trainer() -> Json:
    level = {"name": "level", "in": "query", "schema": {"enum": ["1", "2"], "default": "1"}}
    new = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("path", "version")]
    mode = {"name": "mode", "in": "query", "schema": {"enum": ["wait", "abort"], "default": "wait"}}
    return {
        "/update_weights": _post("Replaces weights.", UpdateWeights, _json("WeightVersion")),
        "/weight_version": {"get": _operation("Tells the version of the target's weights.", _json("WeightVersion"))},
        "/pause": {"post": _operation("Lets new requests wait.", _json("Paused")) | {"parameters": [mode]}},
        "/resume": {"post": _operation("Lets the waiting requests go on.", _json("Paused"))},
        "/is_paused": {"get": _operation("Tells if requests wait.", _json("Paused"))},
        "/sleep": {"post": _operation("Frees memory of the model.", _json("Sleeping")) | {"parameters": [level, mode]}},
        "/wake_up": {"post": _operation("Brings it back.", _json("Sleeping")) | {"parameters": new}},
        "/is_sleeping": {"get": _operation("Tells if the model sleeps.", _json("Sleeping"))},
    }


_ANY: Final[Json] = {"application/json": {"schema": {"type": "object"}}}
_EVENTS: Final[Json] = {"text/event-stream": {"schema": {"type": "string"}}}


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _json(model: str) -> Json:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}


def _operation(summary: str, content: Json) -> Json:
    responses = {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "A refusal or an error, as OpenAI writes it.", "content": _json("Error")},
    }
    return {"summary": summary, "responses": responses}


def _open_get(summary: str, model: str) -> Json:
    """Returns the OpenAPI entry of a path that needs no API key. `model`: name of the schema of its answer."""
    one = _operation(summary, _json(model)) | {"security": list[Json]()}
    one["responses"]["503"] = {"description": "The models are loading.", "content": _json(model)}
    return {"get": one, "head": one}


def _post(summary: str, body: type[BaseModel], content: Json) -> Json:
    return {"post": _operation(summary, content) | {"requestBody": {"required": True, "content": _json(body.__name__)}}}
