"""Recurrent states after prefixes of prompts, stored for later prompts along with the pages of the prefix cache.

A prefix of any length can use stored K/V, because each position has its own. A recurrent state belongs to one position.
So the states of a prompt are stored at two positions. One is after its last node that may be shared: a chat continues
there. The other is after the last node that it shares with earlier prompts: later prompts will branch off there. A
prompt is computed from the last position with a stored state. It still shares the pages after that position: its passes
write the same bits there again.

A state is copied when it is stored and when a row begins from it. So a stored state is never in use. If there is no
space, the least recently used one is dropped. It is also dropped with the pages of its node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fastspec.kv_cache.states import StateCache


@dataclass(slots=True)
class StoredState:
    """Stored states after one prefix.

    Attributes:
        row: index of the states in the state pools of both models.
        models: models whose state is stored: False is the target, True the draft.
    """

    row: int
    models: set[bool]


class PrefixStates:
    """Stores recurrent states after prefixes, by the node of the prefix cache that ends at their position.

    Args:
        target, draft: recurrent states of the models. None: the model has attention in every layer. Not both are None.
        unit: number of tokens of a node.
    """

    def __init__(self, target: StateCache | None, draft: StateCache | None, unit: int) -> None:
        self.unit = unit
        self._caches = {of: cache for of, cache in ((False, target), (True, draft)) if cache is not None}
        self._pools = {of: cache.kept for of, cache in self._caches.items() if cache.kept is not None}
        count = min(pool.count for pool in self._pools.values())
        self._free = list(range(count - 1, 0, -1))
        self._kept: OrderedDict[Hashable, StoredState] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Number of prefixes with stored states."""
        return len(self._kept)

    def recurrent(self, *, draft: bool) -> bool:
        """True if the model has recurrent states."""
        return draft in self._pools

    def resumable(self, nodes: Sequence[Hashable], *, draft: bool) -> int:
        """Returns the number of first positions of a path of nodes that a model need not compute.

        For a model with recurrent states it is the position of the last stored state; for others all positions.
        """
        if not self.recurrent(draft=draft):
            return len(nodes) * self.unit
        found = (place for place in range(len(nodes), 0, -1) if draft in self._of(nodes[place - 1]))
        return next(found, 0) * self.unit

    def _of(self, key: Hashable) -> set[bool]:
        return self._kept[key].models if key in self._kept else set()

    def load(self, nodes: Sequence[Hashable], length: int, row: Tensor, *, draft: bool) -> None:
        """Copies the stored state after `length` positions to a row of the model.

        Args:
            nodes: path of nodes that the row shares.
            length: result of `resumable` for these nodes.
            row: int64 [1], index of the row's recurrent states.
            draft: True for the draft, False for the target.
        """
        if not length or not self.recurrent(draft=draft):
            return
        key = nodes[length // self.unit - 1]
        self._kept.move_to_end(key)
        self._pools[draft].load(self._kept[key].row, self._caches[draft], row, length)

    def capture_after(self, length: int, *, draft: bool) -> None:
        """Makes the model's next passes copy their state after `length` positions, for a later `save`.

        With a length of 0 they copy none.
        """
        if self.recurrent(draft=draft):
            self._pools[draft].at.fill_(length)

    def save(self, key: Hashable, *, draft: bool) -> None:
        """Stores the state that the model's passes have copied, see `capture_after`, under `key`."""
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
        """Moves stored states from `key` to `node`. Drops them if `node` is None or already has states."""
        if key in self._kept and node is not None and node not in self._kept:
            self._kept[node] = self._kept.pop(key)
        self.forget(key)

    def forget(self, key: Hashable) -> None:
        """Drops the states stored under `key`, if any."""
        if key in self._kept:
            self._free.append(self._kept.pop(key).row)

    def clear(self) -> None:
        """Drops all stored states."""
        for key in list(self._kept):
            self.forget(key)
