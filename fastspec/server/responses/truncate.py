"""Chooses the oldest items of a conversation to drop, so that the others fit into the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fastspec.server.responses.items import Item

_ROLES: Final = {"user": "user", "system": "pinned", "developer": "pinned"}


def _side(item: Item) -> str:
    """Returns the author of an item: "user", "model" or "tool". Returns "pinned" if the item is never dropped."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return "tool"
    return _ROLES.get(str(item.get("role")), "model") if kind == "message" else "model"


def droppable(items: Sequence[Item]) -> list[list[int]]:
    """Returns the groups of items that can be dropped, oldest first. Each group is a list of indices in `items`.

    A turn begins with a message of the user. Each turn before the last one is one group. In the last turn, each reply
    of the model is a group, with the results of its tool calls. The user's message and the last reply of the last turn
    are never dropped. Messages of the roles system and developer are never dropped.
    """
    turns: list[list[list[int]]] = [[]]  # a turn is a list of groups: the user's messages, then each reply
    before = ""
    for at, item in enumerate(items):
        side = _side(item)
        if side == "pinned":
            continue
        if side == "user" and before != "user":
            turns.append([])
        if before != side and not (side == "tool" and before == "model"):
            turns[-1].append([])
        turns[-1][-1].append(at)
        before = side
    *older, last = [turn for turn in turns if turn] or [[]]
    first = 1 if last and _side(items[last[0][0]]) == "user" else 0
    return [[at for reply in turn for at in reply] for turn in older] + last[first:-1]


def dropped(items: Sequence[Item], fits: Callable[[frozenset[int]], bool]) -> frozenset[int]:
    """Returns the indices of the items to drop: the smallest number of the oldest groups, so that the others fit.

    If the conversation never fits, returns the indices of all items that can be dropped. For groups see `droppable`.

    Args:
        items: items of a conversation.
        fits: returns True if the conversation fits without the items at these indices.
    """
    groups = droppable(items)

    def oldest(count: int) -> frozenset[int]:
        return frozenset(at for group in groups[:count] for at in group)

    low, high = 0, len(groups)
    while low < high:
        middle = (low + high) // 2
        if fits(oldest(middle)):
            high = middle
        else:
            low = middle + 1
    return oldest(low)
