"""Responses that later requests continue, in memory."""

from __future__ import annotations

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
        if not self.size:
            raise Refusal(
                "this server keeps no responses: send all items as input, or serve with --response-store N",
                field,
                status=400 if field else 404,
                code="previous_response_not_found" if field else "response_not_found",
            )
        found = self._stored.get(id)
        if found is None or found.owner != owner:
            raise Refusal(
                f"there is no response {id[:80]!r} here; the last {self.size} are kept, unless store was false",
                field,
                status=400 if field else 404,
                code="previous_response_not_found" if field else "response_not_found",
            )
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
