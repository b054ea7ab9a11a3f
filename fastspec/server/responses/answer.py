"""Builds a response of /v1/responses, and its events, from the answer of a chat."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from fastspec.server.errors import Refusal
from fastspec.server.responses.body import ResponseBody
from fastspec.server.responses.items import Item, encoded
from fastspec.server.texts import BROKEN, Answer, Piece
from fastspec.text.answers.events import Arguments, CallBegins, Content, Event, Reasoning

Sent: TypeAlias = "dict[str, Any]"

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # prefixes of the ids of items
_PARTS: Final = {"message": "output_text", "reasoning": "reasoning_text"}  # type of an item's only part


class OutputItem:
    """An item of a response's output, while its text arrives.

    Args:
        index: index of the item in the output.
        kind: type of the item: "message", "reasoning" or "function_call".
        facts: keys and values that are added to the JSON object of the item.
        encodes: True if a reasoning item has the key `encrypted_content` when its text is complete.

    Attributes:
        text: text of the item so far; for a call its arguments.
        logprobs: log-probabilities of a message's tokens.
    """

    def __init__(self, index: int, kind: str, facts: Mapping[str, object], *, encodes: bool = False) -> None:
        self.index, self.kind, self._facts, self._encodes = index, kind, facts, encodes
        self.id = f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
        self.text, self.logprobs = "", list[Sent]()

    def item(self, status: str) -> Item:
        """Returns the item as a JSON object with this status.

        The text of a message or a reasoning is left out if the status is "in_progress".
        """
        shown: Item = {"id": self.id, "type": self.kind, "status": status, **self._facts}
        if self.kind == "function_call":
            return shown | {"arguments": self.text}
        ended = status != "in_progress"
        if self._encodes and self.kind == "reasoning" and ended:
            shown["encrypted_content"] = encoded(self.text)
        return shown | {"content": [self._part(self.text, self.logprobs)] if ended else []}

    def _part(self, text: str, logprobs: Sequence[Sent]) -> Sent:
        part: Sent = {"type": _PARTS[self.kind], "text": text}
        return part | ({"annotations": [], "logprobs": list(logprobs)} if self.kind == "message" else {})

    def begin(self) -> list[Sent]:
        """Returns the events that announce the item to the client, before its text.

        They are "response.output_item.added" and "response.content_part.added". A function call has only the first.
        """
        events: list[Sent] = [{"type": "response.output_item.added", "output_index": self.index}]
        events[0]["item"] = self.item("in_progress")
        if self.kind in _PARTS:
            events.append(self._event("response.content_part.added", part=self._part("", [])))
        return events

    def add(self, text: str, logprobs: Sequence[Sent]) -> Sent:
        """Adds a piece of text, with the log-probabilities of its tokens. Returns the event of the piece."""
        self.text += text
        self.logprobs += logprobs
        told = {"logprobs": list(logprobs)} if self.kind == "message" else {}
        return self._event(f"{self._name}.delta", delta=text, **told)

    def end(self, status: str) -> list[Sent]:
        """Returns the events that end the item. `status`: final status of the item."""
        whole: Sent = {"arguments" if self.kind == "function_call" else "text": self.text}
        events = [self._event(f"{self._name}.done", **whole)]
        if self.kind == "message":
            events[0]["logprobs"] = list(self.logprobs)
        if self.kind in _PARTS:
            part = self._part(self.text, self.logprobs)
            events.append(self._event("response.content_part.done", part=part))
        done: Sent = {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)}
        return [*events, done]

    @property
    def _name(self) -> str:
        """Beginning of the type of all events with the item's text. The ending, ".delta" or ".done", is left out."""
        part = "function_call_arguments" if self.kind == "function_call" else _PARTS[self.kind]
        return f"response.{part}"

    def _event(self, type: str, **facts: object) -> Sent:
        place = {"content_index": 0} if self.kind in _PARTS else {}
        return {"type": type, "item_id": self.id, "output_index": self.index, **place, **facts}


class ResponseBuilder:
    """Builds the events of one response. The last event has the whole response.

    Args:
        body: body of the request.
        model: name of the model.
        stored: True if the response is kept for later requests.
    """

    def __init__(self, body: ResponseBody, model: str, *, stored: bool) -> None:
        self._wants_logprobs, self._wants_encoded, self._numbers = body.wants_logprobs, body.wants_encoded, 0
        self._output: list[Item] = []
        self._open: OutputItem | None = None
        self._pending: list[Sent] = []  # log-probabilities of tokens whose text has not arrived yet
        self.response: Sent = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued" if body.background else "in_progress",
            "model": model,
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "service_tier": "default",
            "store": stored,
            "usage": None,
            **body.told(),
        }

    @property
    def output(self) -> tuple[Item, ...]:
        """Items of the output that are complete."""
        return tuple(self._output)

    @property
    def ended(self) -> bool:
        """True if the last event has been built."""
        return self.response["status"] not in ("queued", "in_progress")

    def begin(self) -> list[Sent]:
        """Returns the first events: the response is created, then queued or in progress."""
        status = self.response["status"]
        return self._numbered([self._state("response.created"), self._state(f"response.{status}")])

    def piece(self, answer: Answer, piece: Piece) -> list[Sent]:
        """Returns the events for a piece of the answer."""
        return self._starts() + self._piece(answer, piece)

    def _starts(self) -> list[Sent]:
        """Returns the event response.in_progress if the response was queued until now. Else returns an empty list."""
        if self.response["status"] != "queued":
            return []
        self.response["status"] = "in_progress"
        return self._numbered([self._state("response.in_progress")])

    def _piece(self, answer: Answer, piece: Piece) -> list[Sent]:
        if self._wants_logprobs:
            self._pending += _logprobs(answer, piece)
        return self._numbered([sent for event in piece.events for sent in self._of(answer, event)])

    def end(self, reason: str, usage: Mapping[str, Any]) -> list[Sent]:
        """Returns the last events, when the answer has ended.

        Args:
            reason: finish reason of the answer. "abort": a trainer has stopped it.
            usage: token counts as OpenAI's `usage` of a chat.
        """
        status = "incomplete" if reason in ("length", "abort") else "completed"
        events = list(self._close(status))
        if status == "completed" and not any(item["type"] in ("message", "function_call") for item in self._output):
            events += [*self._begin("message", {"role": "assistant"}), *self._close(status)]  # a message without text
        self.response |= {"status": status, "usage": _usage(usage)}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens" if reason == "length" else None}
        else:
            self.response["completed_at"] = int(time.time())
        return self._numbered([*events, self._state(f"response.{status}")])

    def failed(self, error: Refusal) -> list[Sent]:
        """Returns the last events of a response that an error has stopped."""
        events = list(self._close("incomplete"))
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self._numbered([*events, self._state("response.failed")])

    def cancelled(self) -> list[Sent]:
        """Returns the last events of a response that its client has cancelled."""
        events = list(self._close("incomplete"))
        self.response["status"] = "cancelled"
        return self._numbered([*events, self._state("response.cancelled")])

    def _of(self, answer: Answer, event: Event) -> Iterator[Sent]:
        if isinstance(event, CallBegins):
            call = {"call_id": answer.call_ids[event.index], "name": event.name}
            yield from self._close("completed")
            yield from self._begin("function_call", call)
            return
        if isinstance(event, Arguments):
            assert self._open is not None, "arguments follow the beginning of their call"
            yield self._open.add(event.text, [])
            return
        kind = "message" if isinstance(event, Content) else "reasoning"
        if self._open is None or self._open.kind != kind:
            yield from self._close("completed")
            yield from self._begin(kind, {"summary": []} if isinstance(event, Reasoning) else {"role": "assistant"})
        assert self._open is not None, "it has begun"
        yield self._open.add(event.text, self._taken(self._open, event.text) if isinstance(event, Content) else [])

    def _taken(self, message: OutputItem, text: str) -> list[Sent]:
        """Removes and returns the pending log-probabilities of the tokens of a message's next piece, `text`.

        Tokens before the first piece (special tokens, blanks) are dropped. Tokens after the piece stay pending.
        """
        if not message.text:
            while self._pending and not _begins(self._pending[0]["token"], text):
                del self._pending[0]
        left = len((message.text + text).encode()) - sum(map(_size, message.logprobs))
        taken = []
        while self._pending and left > 0:
            taken.append(self._pending.pop(0))
            left -= _size(taken[-1])
        return taken

    def _begin(self, kind: str, facts: Mapping[str, object]) -> list[Sent]:
        self._open = OutputItem(len(self._output), kind, facts, encodes=self._wants_encoded)
        return self._open.begin()

    def _close(self, status: str) -> Iterator[Sent]:
        """Ends the open item, if there is one, and yields the events that end it. `status`: its final status."""
        if self._open is not None:
            item, self._open = self._open, None
            if item.kind != "reasoning":  # no log-probabilities of its tokens are pending
                self._pending = []
            self._output.append(item.item(status))
            yield from item.end(status)

    def _state(self, type: str) -> Sent:
        return {"type": type, "response": {**self.response, "output": list(self._output)}}

    def _numbered(self, events: Sequence[Sent]) -> list[Sent]:
        first, self._numbers = self._numbers, self._numbers + len(events)
        return [{**event, "sequence_number": number} for number, event in enumerate(events, first)]


def _logprobs(answer: Answer, piece: Piece) -> list[Sent]:
    """Returns the log-probabilities of a piece's tokens. Tokens of the reasoning and a stop id are left out."""
    start, stop = max(piece.start, answer.reasoning_tokens), piece.stop
    if stop and answer.request.new_tokens[stop - 1] in answer.handle.call.options.stop_ids:
        stop -= 1
    told = answer.chat_logprobs(start, stop) if start < stop else None
    return [] if told is None else [_with_bytes(entry) for entry in told["content"]]


def _begins(token: str, text: str) -> bool:
    """True if a token whose text is `token` may be the first token of `text`."""
    return text.startswith(token) or token.startswith(text) or BROKEN in token


def _size(entry: Mapping[str, Any]) -> int:
    """Returns the number of bytes of the token in an entry of log-probabilities."""
    return len(entry["bytes"] or entry["token"].encode())


def _with_bytes(entry: Mapping[str, Any]) -> Sent:
    """Returns a chat's entry of log-probabilities with an empty list in place of each `bytes` that is None."""
    tops = [{**top, "bytes": top["bytes"] or []} for top in entry["top_logprobs"]]
    return {**entry, "bytes": entry["bytes"] or [], "top_logprobs": tops}


def _usage(usage: Mapping[str, Any]) -> Sent:
    """Converts the `usage` object of a chat to that of a response. `cache_write_tokens` is always 0."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
