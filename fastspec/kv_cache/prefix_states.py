"""Recurrent states that are kept for later prompts, beside the pages of the prefix cache.

K/V of a prefix can be cut anywhere. A recurrent state cannot: it belongs to one position. So the states of a prompt
are kept at two positions: after its last node that may be shared, where its chat will go on, and after the last node
that it shares with earlier prompts, where later ones will branch off. A prompt is computed from the last position with
a kept state on. It shares the pages after that position all the same: its passes write the same bits there again.

A state is copied when it is kept and when a row begins from it, so a kept one is never in use. Where there is no room,
the least recently used one is dropped; and it is dropped with the pages of its node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fastspec.kv_cache.states import StateCache


@dataclass(slots=True)
class StoredState:
    """The stored states after one prefix.

    Attributes:
        row: of the state pools of both models.
        models: whose state is stored: False is the target, True the draft.
    """

    row: int
    models: set[bool]


class PrefixStates:
    """Keeps states by the node of the prefix cache that ends where they are.

    Args:
        target, draft: states of the models' rows; None: the model attends in every layer. One of them has states.
        unit: positions of a node.
    """

    def __init__(self, target: StateCache | None, draft: StateCache | None, unit: int) -> None:
        self.unit = unit
        self._caches = {of: cache for of, cache in ((False, target), (True, draft)) if cache is not None}
        self._pools = {of: cache.kept for of, cache in self._caches.items() if cache.kept is not None}
        count = min(pool.count for pool in self._pools.values())
        self._free = list(range(count - 1, 0, -1))
        self._kept: OrderedDict[Hashable, StoredState] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """The number of prefixes with states."""
        return len(self._kept)

    def recurrent(self, *, draft: bool) -> bool:
        """True if the model has recurrent states."""
        return draft in self._pools

    def resumable(self, nodes: Sequence[Hashable], *, draft: bool) -> int:
        """Positions of a path of nodes that the model can skip: all, or up to the last node whose state is stored."""
        if not self.recurrent(draft=draft):
            return len(nodes) * self.unit
        found = (place for place in range(len(nodes), 0, -1) if draft in self._of(nodes[place - 1]))
        return next(found, 0) * self.unit

    def _of(self, key: Hashable) -> set[bool]:
        return self._kept[key].models if key in self._kept else set()

    def load(self, nodes: Sequence[Hashable], length: int, row: Tensor, *, draft: bool) -> None:
        """Copies that model's state after `length` positions, as `resumable` gave them, to a row, int64 [1]."""
        if not length or not self.recurrent(draft=draft):
            return
        key = nodes[length // self.unit - 1]
        self._kept.move_to_end(key)
        self._pools[draft].load(self._kept[key].row, self._caches[draft], row, length)

    def capture_after(self, length: int, *, draft: bool) -> None:
        """Lets that model's next passes leave the state after `length` positions for `save`; 0: they leave none."""
        if self.recurrent(draft=draft):
            self._pools[draft].at.fill_(length)

    def save(self, key: Hashable, *, draft: bool) -> None:
        """Keeps what that model's passes left, under this key."""
        if not self.recurrent(draft=draft):
            return
        if key not in self._kept:
            if not self._free:
                self.forget(next(iter(self._kept)))
            self._kept[key] = StoredState(self._free.pop(), set())
        self._kept.move_to_end(key)
        self._pools[draft].save(self._kept[key].row)
        self._kept[key].models.add(draft)

    def rename(self, key: Hashable, node: Hashable | None) -> None:
        """Keeps under a node what was kept under another key; None, or a node with states: forgets it."""
        if key in self._kept and node is not None and node not in self._kept:
            self._kept[node] = self._kept.pop(key)
        self.forget(key)

    def forget(self, key: Hashable) -> None:
        """Drops the states that are kept under this key, if any."""
        if key in self._kept:
            self._free.append(self._kept.pop(key).row)

    def clear(self) -> None:
        """Drops all kept states."""
        for key in list(self._kept):
            self.forget(key)
