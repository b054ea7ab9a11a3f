"""Responses that later requests continue, in memory."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastspec.server.errors import Refusal
from fastspec.server.responses.items import Item


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its conversation.

    Attributes:
        body: the response.
        items: the conversation up to its end; those of earlier responses are shared with them.
        owner: API key of the request; None: it had none.
    """

    body: dict[str, Any]
    items: tuple[Item, ...]
    owner: str | None

    def inputs(self, *, limit: str, order: str, after: str | None) -> dict[str, Any]:
        """A page of the items before the output, as the query of a request asks for it.

        Args:
            limit: largest number of items, 1 to 100.
            order: "asc", or "desc" for the newest first.
            after: id of the item before the page; None: the first page.

        Raises:
            Refusal: another value.
        """
        items = [_listed(item) for item in self.items[: len(self.items) - len(self.body["output"])]]
        if order not in ("asc", "desc"):
            raise Refusal(f"order must be asc or desc, got {order[:80]!r}", "order")
        if not limit.isdecimal() or not 1 <= int(limit) <= 100:
            raise Refusal(f"limit must be 1 to 100, got {limit[:80]!r}", "limit")
        if order == "desc":
            items.reverse()
        start = 0 if after is None else next((at for at, item in enumerate(items, 1) if item["id"] == after), None)
        if start is None:
            raise Refusal(f"after names {str(after)[:80]!r}, which is no input of this response", "after")
        page = items[start : start + int(limit)]
        ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
        return {"object": "list", "data": page, "has_more": start + len(page) < len(items), **ids}


def with_ids(items: Sequence[Item]) -> list[Item]:
    """Gives an id to each item that has none."""
    return [{"id": f"item_{uuid.uuid4().hex}", **item} for item in items]


def _listed(item: Item) -> Item:
    """An item as lists have it: a message has a type, a status and parts."""
    if item.get("type", "message") != "message":
        return item
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    parts = [{"type": kind, "text": item["content"]}] if isinstance(item["content"], str) else item["content"]
    if kind == "output_text":
        parts = [{"annotations": [], **part} for part in parts]
    return {"status": "completed", **item, "type": "message", "content": parts}


class ResponseStore:
    """The last responses. Each is known only to requests with the API key of the request that made it.

    Args:
        size: number of responses; the one that was not used for the longest time makes room. 0: none is kept.

    Raises:
        ValueError: `size` is below 0.
    """

    def __init__(self, size: int = 0) -> None:
        if size < 0:
            raise ValueError(f"response_store must be 0 or more responses, got {size}")
        self.size = size
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def keep(self, response: StoredResponse) -> None:
        """Keeps a response under its id."""
        self._stored[response.body["id"]] = response
        while len(self._stored) > self.size:
            self._stored.popitem(last=False)

    def get(self, id: str, owner: str | None, field: str | None = None) -> StoredResponse:
        """Returns a response.

        Args:
            id: id of the response.
            owner: API key of the request.
            field: field of a body that names it; None: the path does.

        Raises:
            Refusal: it is not kept here.
        """
        found = self._stored.get(id)
        if found is None or found.owner != owner:
            message = "this server keeps no responses: send all items as input, or serve with --response-store N"
            if self.size:
                message = (
                    f"there is no response {id[:80]!r} here; the last {self.size} are kept, unless store was false"
                )
            status, code = (400, "previous_response_not_found") if field else (404, "response_not_found")
            raise Refusal(message, field, status=status, code=code)
        self._stored.move_to_end(id)
        return found

    def delete(self, id: str, owner: str | None) -> None:
        """Forgets a response. Raises Refusal as `get`."""
        self.get(id, owner)
        del self._stored[id]

    def resolved(self, items: Sequence[Item], owner: str | None) -> list[Item]:
        """Replaces references among items by the items that they name.

        Raises:
            Refusal: such an item is not kept here.
        """
        return [self._item(at, item, owner) for at, item in enumerate(items)]

    def _item(self, at: int, item: Item, owner: str | None) -> Item:
        if item.get("type") != "item_reference" and item.keys() != {"id"}:
            return item
        for response in reversed(self._stored.values()):
            for one in response.items if response.owner == owner else ():
                if one.get("id") == item.get("id"):
                    return one
        kept = f"the last {self.size} responses are kept" if self.size else "this server keeps no responses"
        raise Refusal(
            f"input[{at}] refers to {str(item.get('id'))[:80]!r}, and {kept}: send the item itself (clients do with "
            "store=false), or serve with --response-store N",
            "input",
        )
