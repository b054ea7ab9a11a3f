"""Recurrent states of rows, stored by position so that refused drafts need no copy to be undone.

A row has a ring buffer of states in each layer: the state after position p is in slot p % slots. A pass over a row from
position n on starts from the state after n - 1. It stores one state after each position; the last `slots` of them stay.
So a row's length selects the valid state, as it selects the valid keys. With slots = max_drafts + 1, the state after
the last accepted token is always there, for any number of refused drafts.

The convolution of a layer reads the inputs of a few older positions. Those have a ring buffer of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.kernels.reference.recurrent import KeptState
from fastspec.shapes import StateRule


@dataclass(frozen=True, slots=True)
class StateCache:
    """Recurrent states of one model.

    Attributes:
        states: fp32 [layers, rows, slots, *state_shape] with slots = max_drafts + 1; see `DeltaRule`, `ConvRule` and
            `MambaRule`.
        inputs: [layers, rows, max_drafts + width, channels], inputs of the convolution: as many as one step reads and
            writes. So no CTA writes to a place that another one still reads.
        kept: states after prefixes of prompts. None: not stored.
    """

    states: Tensor
    inputs: Tensor
    kept: StatePool | None = None

    @classmethod
    def allocate(
        cls,
        rules: tuple[StateRule, ...],
        rows: int,
        max_drafts: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kept: int = 0,
    ) -> StateCache:
        """Allocates zeroed states for layers with these rules, and steps with up to `max_drafts` drafts.

        With `kept` it also allocates a `StatePool` of that many states, one of which passes write to.

        Raises:
            ValueError: layers have states of several shapes.
        """
        if any(_shapes(rule, 0) != _shapes(rules[0], 0) for rule in rules):
            raise ValueError(f"layers with states of several shapes: {sorted(set(map(repr, rules)))}; wanted one shape")
        pool = StatePool.allocate(rules, kept, dtype=dtype, device=device) if kept else None
        states, inputs = _shapes(rules[0], max_drafts)
        made = torch.zeros(len(rules), rows, *states, dtype=torch.float32, device=device)
        return cls(made, torch.zeros(len(rules), rows, *inputs, dtype=dtype, device=device), pool)


@dataclass(frozen=True, slots=True)
class StatePool:
    """Memory for states after prefixes of prompts, see `PrefixStates`.

    Attributes:
        at: int64 [1], number of positions after which prefill passes copy their state to row 0; 0: no copy.
        rows: states in the layout of rows that never draft.
    """

    at: Tensor
    rows: StateCache

    @classmethod
    def allocate(
        cls, rules: tuple[StateRule, ...], count: int, *, dtype: torch.dtype, device: torch.device
    ) -> StatePool:
        """Allocates memory for `count` states, including row 0."""
        rows = StateCache.allocate(rules, count, 0, dtype=dtype, device=device)
        return cls(torch.zeros(1, dtype=torch.int64, device=device), rows)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.rows.states.shape[1]

    def of_layer(self, layer: int) -> KeptState:
        """Returns the memory to which a pass copies the state of a layer."""
        return KeptState(self.at, self.rows.states[layer, 0, 0], self.rows.inputs[layer, 0])

    def save(self, row: int) -> None:
        """Copies row 0, the state that a pass has left, to `row`."""
        for each in (self.rows.states, self.rows.inputs):
            each[:, row].copy_(each[:, 0])

    def load(self, row: int, cache: StateCache, place: Tensor, length: int) -> None:
        """Copies a stored state to a row of the cache, int64 [1], as its state after `length` positions."""
        slots, places, width = cache.states.shape[2], cache.inputs.shape[2], self.rows.inputs.shape[2]
        state = cache.states.select(2, (length - 1) % slots)
        state.index_copy_(1, place, self.rows.states[:, row, 0][:, None])
        for position in range(length - width + 1, length):
            given = self.rows.inputs[:, row, position % width][:, None]
            cache.inputs.select(2, position % places).index_copy_(1, place, given)


def row_bytes(rule: StateRule, max_drafts: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the states and inputs of one row in one layer, with inputs of `dtype`."""
    states, inputs = _shapes(rule, max_drafts)
    return 4 * math.prod(states) + dtype.itemsize * math.prod(inputs)


def _shapes(rule: StateRule, max_drafts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the states and of the inputs of one row in one layer."""
    return (max_drafts + 1, *rule.state_shape), (max_drafts + 1 + rule.tail, rule.channels)
