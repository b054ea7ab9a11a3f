"""Keeps responses and conversations in memory, so that later requests can continue them."""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastspec.server.errors import Refusal
from fastspec.server.responses.background import BackgroundRun
from fastspec.server.responses.items import Item, MessageBuilder

_SHOWN = 80  # characters of a value that an error repeats


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation before it.

    Attributes:
        body: the response as a JSON object. It changes while the response is generated.
        inputs: items of the conversation before the response's output.
        owner: API key of the request. None: it had none.
        run: run that generates the response in the background. None: it was generated while its request waited.
    """

    body: dict[str, Any]
    inputs: tuple[Item, ...]
    owner: str | None
    run: BackgroundRun | None = None

    @property
    def items(self) -> tuple[Item, ...]:
        """Items of the conversation up to and with the output of the response."""
        return (*self.inputs, *self.body["output"])

    @property
    def open(self) -> bool:
        """True while the response is generated in the background."""
        return self.run is not None and self.run.open


@dataclass(slots=True)
class StoredConversation:
    """A stored conversation. Responses continue it, and add their items to it.

    Attributes:
        metadata: names and texts that the client has given to it.
        owner: API key of the request that created it. None: it had none.
        id: id of the conversation.
        created: time of its creation, in Unix seconds.
        items: all items. Each has an id.
        busy: True while a response that continues it is generated.
        size: bytes of its items as JSON.
    """

    metadata: dict[str, str]
    owner: str | None
    id: str = field(default_factory=lambda: f"conv_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    items: list[Item] = field(default_factory=list)
    busy: bool = False
    size: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """The conversation as OpenAI's JSON object, without its items."""
        return {"id": self.id, "object": "conversation", "created_at": self.created, "metadata": self.metadata}

    def add(self, items: Sequence[Item]) -> None:
        """Adds items to the end. Each must have an id."""
        self.items += items
        self.size += sum(map(_bytes_of, items))

    def find(self, id: str) -> Item:
        """Returns the item with this id. Raises Refusal if there is none."""
        for item in self.items:
            if item["id"] == id:
                return item
        raise Refusal(f"there is no item {id[:_SHOWN]!r} in this conversation; list its items", status=404)

    def remove(self, id: str) -> None:
        """Removes the item with this id. Raises Refusal if there is none."""
        item = self.find(id)
        self.items.remove(item)
        self.size -= _bytes_of(item)


def _bytes_of(item: Item) -> int:
    return len(json.dumps(item))


def checked(items: Sequence[Item]) -> list[Item]:
    """Checks new items of a conversation, and returns them, each with an id.

    Raises:
        Refusal: an item cannot be converted to a part of a chat.
    """
    try:
        MessageBuilder().add("items", items)
    except Refusal as error:
        raise error.renamed(error.message, "items") from None
    return with_ids(items)


def with_ids(items: Sequence[Item]) -> list[Item]:
    """Returns items, with a new id for each one that has none."""
    return [{**item, "id": item.get("id") or f"item_{uuid.uuid4().hex}"} for item in items]


def listed(item: Item) -> Item:
    """Returns an item in the form in which OpenAI's API lists it.

    A message gets a type, a status and a list of parts. Other items stay as they are.
    """
    if item.get("type", "message") != "message":
        return item
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    parts = [{"type": kind, "text": item["content"]}] if isinstance(item["content"], str) else item["content"]
    if kind == "output_text":
        parts = [{"annotations": [], **part} for part in parts]
    return {"status": "completed", **item, "type": "message", "content": parts}


def page_of(items: Sequence[Item], *, limit: str, order: str, after: str | None) -> dict[str, Any]:
    """Returns a page of a list of items, as OpenAI's JSON object.

    Args:
        items: items, each with an id.
        limit: largest number of items of the page, 1 to 100, as text.
        order: "asc", or "desc" for the newest first.
        after: id of the item before the page. None: the first page.

    Raises:
        Refusal: `limit` or `order` is invalid, or no item has the id `after`.
    """
    shown = [listed(item) for item in items]
    if order not in ("asc", "desc"):
        raise Refusal(f"order must be asc or desc, got {order[:_SHOWN]!r}", "order")
    if not limit.isdecimal() or not 1 <= int(limit) <= 100:
        raise Refusal(f"limit must be 1 to 100, got {limit[:_SHOWN]!r}", "limit")
    if order == "desc":
        shown.reverse()
    start = 0 if after is None else next((at for at, item in enumerate(shown, 1) if item["id"] == after), None)
    if start is None:
        raise Refusal(f"after names {str(after)[:_SHOWN]!r}, which is none of the items; leave it out", "after")
    page = shown[start : start + int(limit)]
    ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": page, "has_more": start + len(page) < len(shown), **ids}


class Owned(Protocol):
    """Entry of a store. It belongs to one API key."""

    @property
    def owner(self) -> str | None:
        """The API key. None: the entry belongs to requests without a key."""


OwnedT = TypeVar("OwnedT", bound=Owned)


def _of_owner(kept: OrderedDict[str, OwnedT], id: str, owner: str | None) -> OwnedT | None:
    """Returns the entry with this id, and marks it as the most recently used one.

    Returns None if there is no such entry, or if it has another owner.
    """
    found = kept.get(id)
    if found is None or found.owner != owner:
        return None
    kept.move_to_end(id)
    return found


class ResponseStore:
    """Store of the most recently used responses and conversations.

    Only requests with the API key that created an entry can read it.

    Args:
        size: largest number of responses, and also of conversations. If it is exceeded, the least recently used one is
            dropped. 0: nothing is kept.

    Raises:
        ValueError: `size` is below 0.
    """

    def __init__(self, size: int = 0) -> None:
        if size < 0:
            raise ValueError(f"response_store must be 0 or more responses, got {size}")
        self.size = size
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._conversations: OrderedDict[str, StoredConversation] = OrderedDict()

    def keep(self, response: StoredResponse) -> None:
        """Stores a response under its id. Drops the least recently used ended responses until `size` are left."""
        self._stored[response.body["id"]] = response
        ended = [id for id, each in self._stored.items() if not each.open]
        for id in ended[: max(0, len(ended) - self.size)]:
            del self._stored[id]

    def get(self, id: str, owner: str | None, field: str | None = None) -> StoredResponse:
        """Returns a stored response.

        Args:
            id: id of the response.
            owner: API key of the request.
            field: field of the request's body that has the id, for errors. None: the path has it.

        Raises:
            Refusal: the response is not stored here, or has another owner.
        """
        found = _of_owner(self._stored, id, owner)
        if found is None:
            message = "this server keeps no responses: send all items as input, or serve with --response-store N"
            if self.size:
                message = (
                    f"there is no response {id[:_SHOWN]!r} here; the last {self.size} are kept, unless store was false"
                )
            status, code = (400, "previous_response_not_found") if field else (404, "response_not_found")
            raise Refusal(message, field, status=status, code=code)
        return found

    def delete(self, id: str, owner: str | None) -> None:
        """Drops a response. If it is still being generated, cancels it. Args and errors: see `get`."""
        found = self.get(id, owner)
        if found.run is not None:
            found.run.cancel()
        del self._stored[id]

    def begin(self, conversation: StoredConversation) -> StoredConversation:
        """Stores a new conversation, and returns it. Raises Refusal if this server keeps no conversations."""
        if not self.size:
            raise Refusal(
                "this server keeps no conversations: send all items as input, or serve with --response-store N"
            )
        self._conversations[conversation.id] = conversation
        idle = [id for id, each in self._conversations.items() if not each.busy]
        for id in idle[: max(0, len(idle) - self.size)]:
            del self._conversations[id]
        return conversation

    def conversation(self, id: str, owner: str | None, field: str | None = None) -> StoredConversation:
        """Returns a conversation. Args: see `get`.

        Raises:
            Refusal: the conversation is not stored here, or has another owner.
        """
        found = _of_owner(self._conversations, id, owner)
        if found is None:
            kept = f"the last {self.size} are kept" if self.size else "serve with --response-store N to keep some"
            raise Refusal(
                f"there is no conversation {id[:_SHOWN]!r} here; {kept}",
                field,
                status=400 if field else 404,
                code="conversation_not_found",
            )
        return found

    def end(self, id: str, owner: str | None) -> None:
        """Drops a conversation. Args and errors: see `conversation`."""
        self.conversation(id, owner)
        del self._conversations[id]

    def resolved(self, items: Sequence[Item], owner: str | None) -> list[Item]:
        """Replaces references to stored items (`item_reference`) by these items. Returns all items.

        Args:
            items: items of a request.
            owner: API key of the request. None: it had none.

        Raises:
            Refusal: an item to which a reference points is not stored here.
        """
        return [self._item(at, item, owner) for at, item in enumerate(items)]

    def _item(self, at: int, item: Item, owner: str | None) -> Item:
        if item.get("type") != "item_reference" and item.keys() != {"id"}:
            return item
        kept: list[StoredConversation | StoredResponse] = [*self._conversations.values(), *self._stored.values()]
        for each in reversed(kept):
            for one in each.items if each.owner == owner else ():
                if one.get("id") == item.get("id"):
                    return one
        told = f"the last {self.size} responses are kept" if self.size else "this server keeps no responses"
        raise Refusal(
            f"input[{at}] refers to {str(item.get('id'))[:_SHOWN]!r}, and {told}: send the item itself (clients do "
            "with store=false), or serve with --response-store N",
            "input",
        )
