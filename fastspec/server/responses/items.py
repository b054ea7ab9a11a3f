"""Converts the items of a conversation to the messages of a chat."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from fastspec.server.errors import Refusal
from fastspec.text.chat_template import Message

Item: TypeAlias = "dict[str, Any]"

# keys that an item of each type may have. Some, such as id, status and phase, are written by servers and not read here
_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "message": frozenset(["type", "id", "status", "phase", "role", "content"]),
    "function_call": frozenset(["type", "id", "status", "call_id", "name", "arguments"]),
    "function_call_output": frozenset(["type", "id", "status", "call_id", "name", "output"]),
    "reasoning": frozenset(["type", "id", "status", "summary", "content", "encrypted_content"]),
}
_TEXTS: Final = ("input_text", "output_text", "text")  # types of the parts of a content
_PLACE: Final = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?")
_ENCODED: Final = "fastspec."  # prefix of `encrypted_content`
_SHOWN: Final = 80  # characters of a value that an error repeats


@dataclass(slots=True)
class _Placed:
    """A chat message, with the paths of the request's items from which it was made.

    Attributes:
        message: the message.
        place: path of the first of these items, such as "input[2]".
        calls: path of the item of each of its tool calls.
    """

    message: Message
    place: str
    calls: list[str] = field(default_factory=list)


class MessageBuilder:
    """Builds the messages of a chat from the items of a conversation.

    The items of one turn of the model (reasoning, a message, calls) become one message of the assistant.

    Args:
        instructions: text of the first message, which has the role system. None: there is no such message.
    """

    def __init__(self, instructions: str | None = None) -> None:
        self._placed: list[_Placed] = []
        self._turn: _Placed | None = None  # message of the assistant to which more items may belong
        if instructions is not None:
            self._append("instructions", {"role": "system", "content": instructions})

    @property
    def messages(self) -> list[Message]:
        """Chat messages that were made from the items added until now."""
        return [each.message for each in self._placed]

    def add(self, place: str, items: Sequence[Item], without: frozenset[int] = frozenset()) -> None:
        """Adds items, which become messages or parts of messages.

        Args:
            place: name of the list of items, such as "input", for errors.
            items: items with a type. An item without a type is a message.
            without: indices of items that are left out.

        Raises:
            Refusal: an item has an unknown type, key or part.
        """
        for at, item in enumerate(items):
            if at not in without:
                self._add(f"{place}[{at}]", {name: value for name, value in item.items() if value is not None})

    def renamed(self, message: str) -> str:
        """Replaces the paths of messages in the text of an error by the paths of their items, such as input[2]."""

        def place(found: re.Match[str]) -> str:
            at = int(found[1])
            if at >= len(self._placed):
                return found[0]
            placed = self._placed[at]
            return placed.place if found[2] is None else placed.calls[int(found[2])]

        return _PLACE.sub(place, message)

    def _add(self, place: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _KEYS or (kind == "message" and "role" not in item):
            raise Refusal(
                f"{place}.type must be one of {', '.join(_KEYS)}, got {str(kind)[:_SHOWN]!r}; leave the item out",
                "input",
            )
        if unknown := sorted(item.keys() - _KEYS[kind]):
            raise Refusal(f"{place}.{unknown[0]} is not supported in a {kind}; leave it out", "input")
        if kind == "message":
            self._message(place, item)
        elif kind == "function_call":
            self._call(place, item)
        elif kind == "reasoning":
            self._reasoning(place, item)
        else:
            content = _content(f"{place}.output", item.get("output"))
            result = {"role": "tool", "tool_call_id": _text(place, item, "call_id"), "content": content}
            self._append(place, result | ({"name": item["name"]} if "name" in item else {}))

    def _append(self, place: str, message: Message) -> _Placed:
        placed = _Placed(message, place)
        self._placed.append(placed)
        self._turn = placed if message["role"] == "assistant" else None
        return placed

    def _message(self, place: str, item: Mapping[str, Any]) -> None:
        role, content = item["role"], _content(f"{place}.content", item.get("content"))
        turn = self._turn
        if role == "assistant" and turn is not None and not turn.message["content"] and not turn.calls:
            turn.message["content"] = content
        else:
            self._append(place, {"role": role, "content": content})

    def _call(self, place: str, item: Mapping[str, Any]) -> None:
        turn = self._turn or self._append(place, {"role": "assistant", "content": ""})
        if not turn.message["content"]:
            turn.message["content"] = None  # as a message with calls and no text has it
        function = {"name": _text(place, item, "name"), "arguments": _text(place, item, "arguments")}
        call = {"id": _text(place, item, "call_id"), "type": "function", "function": function}
        turn.message.setdefault("tool_calls", []).append(call)
        turn.calls.append(place)

    def _reasoning(self, place: str, item: Mapping[str, Any]) -> None:
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(isinstance(one, dict) and "text" in one for one in parts):
            raise Refusal(f"{place}.content must be a list of parts with a text", "input")
        text, turn = "\n".join(str(one["text"]) for one in parts), self._turn
        if not parts and "encrypted_content" in item:
            text = _decoded(place, _text(place, item, "encrypted_content"))
        if not text:
            return
        if turn is None or turn.message["content"] or turn.calls:
            turn = self._append(place, {"role": "assistant", "content": ""})
        before = turn.message.get("reasoning_content")
        turn.message["reasoning_content"] = text if before is None else f"{before}\n{text}"


def encoded(reasoning: str) -> str:
    """Encodes the text of a reasoning as `encrypted_content`. It is base64, and not encrypted.

    Some clients send a reasoning back only in this form.
    """
    return _ENCODED + urlsafe_b64encode(reasoning.encode()).decode()


def _decoded(place: str, content: str) -> str:
    try:
        if content.startswith(_ENCODED):
            return urlsafe_b64decode(content.removeprefix(_ENCODED)).decode()
    except ValueError:
        pass
    raise Refusal(
        f"{place}.encrypted_content can be read only by the server that wrote it; leave the item out", "input"
    )


def _text(place: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise Refusal(f"{place}.{name} must be a text, got {str(value)[:_SHOWN]!r}", "input")
    return value


def _content(place: str, content: object) -> str | list[Message]:
    """Converts the content of an item to the content of a chat message: a text, or a list of text parts.

    Args:
        place: path of the content in the request, for errors.
        content: content of the item.

    Raises:
        Refusal: the content is neither a text nor a list of text parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise Refusal(f"{place} must be a text or a list of parts, got {str(content)[:_SHOWN]!r}", "input")
    for at, part in enumerate(content):
        if part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise Refusal(
                f"{place}[{at}] must be of type {' or '.join(_TEXTS[:2])} with a text, got "
                f"{str(part.get('type'))[:_SHOWN]!r}; nothing else is read here",
                "input",
            )
    texts = [part["text"] for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
