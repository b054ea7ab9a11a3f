"""Recurrent states after prefixes of prompts, stored for later prompts along with the pages of the prefix cache.

A prefix of any length can use stored K/V, because each position has its own K/V. A recurrent state belongs to one
position. So the states of a prompt are stored at two positions. One is after its last node that may be shared: a chat
continues there. The other is after the last node that it shares with earlier prompts: later prompts will branch off
there. The prefill of a prompt starts at the last position with a stored state. Pages after that position are still
shared: the prefill writes the same bits there again.

A state is copied when it is stored, and when a request begins from it. So no request ever uses the stored copy itself.
If there is no space, the least recently used state is dropped. A state is also dropped with the pages of its node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fastspec.kv_cache.states import StateCache


@dataclass(slots=True)
class StoredState:
    """Stored recurrent states after one prefix.

    Attributes:
        row: index of the entry with the states, in the `StatePool` of each model.
        models: models whose state is stored. False stands for the target, True for the draft.
    """

    row: int
    models: set[bool]


class PrefixStates:
    """Stores recurrent states after prefixes of prompts. A state's key is the prefix cache's last node of the prefix.

    Args:
        target, draft: recurrent states of the models. None: the model has no recurrent layers. One of them is not None.
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
        """True if the draft (`draft` True) or the target (`draft` False) has recurrent states."""
        return draft in self._pools

    def resumable(self, nodes: Sequence[Hashable], *, draft: bool) -> int:
        """Returns the number of positions, from 0 on, that a model need not compute again.

        For a model with recurrent states these positions end at the last stored state. For another model they are all
        positions of `nodes`.

        Args:
            nodes: path of nodes that a prompt shares.
            draft: True for the draft, False for the target.
        """
        if not self.recurrent(draft=draft):
            return len(nodes) * self.unit
        found = (place for place in range(len(nodes), 0, -1) if draft in self._of(nodes[place - 1]))
        return next(found, 0) * self.unit

    def _of(self, key: Hashable) -> set[bool]:
        return self._kept[key].models if key in self._kept else set()

    def load(self, nodes: Sequence[Hashable], length: int, row: Tensor, *, draft: bool) -> None:
        """Copies the stored state after `length` positions to a batch slot of the model. Does nothing for length 0.

        Args:
            nodes: path of nodes that the request shares.
            length: result of `resumable` for these nodes.
            row: int64 [1], index of the batch slot's recurrent states.
            draft: True for the draft, False for the target.
        """
        if not length or not self.recurrent(draft=draft):
            return
        key = nodes[length // self.unit - 1]
        self._kept.move_to_end(key)
        self._pools[draft].load(self._kept[key].row, self._caches[draft], row, length)

    def capture_after(self, length: int, *, draft: bool) -> None:
        """Makes the model's next prefill passes copy their recurrent state after `length` positions, for `save`.

        With a length of 0 the passes copy no state. `draft` is True for the draft, False for the target.
        """
        if self.recurrent(draft=draft):
            self._pools[draft].at.fill_(length)

    def save(self, key: Hashable, *, draft: bool) -> None:
        """Stores under `key` the state that a prefill pass of the model has copied, see `capture_after`.

        Drops the least recently used states if there is no space. `draft` is True for the draft, False for the target.
        """
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
        """Drops the states that are stored under `key`. Does nothing if there are none."""
        if key in self._kept:
            self._free.append(self._kept.pop(key).row)

    def clear(self) -> None:
        """Drops all stored states."""
        for key in list(self._kept):
            self.forget(key)
