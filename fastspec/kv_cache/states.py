"""Recurrent states of sequences, stored by position, so that nothing is copied when draft tokens are rejected.

A row (batch slot) has a ring buffer of states in each layer: the state after position p is in slot p % slots. A pass
over a row from position n on starts from the state after n - 1. It stores the state after each position; the last
`slots` states stay. So the length of the sequence selects the valid state, in the same way as the valid keys. With
slots = max_drafts + 1, the state after the last accepted token is always stored, for any number of rejected tokens.

The convolution of a layer reads the inputs of a few older positions. They are stored in a separate ring buffer.
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
        states: fp32 [layers, rows, slots, *state_shape] with slots = max_drafts + 1; see `StateRule`.
        inputs: [layers, rows, max_drafts + width, channels], inputs of the convolution at as many positions as one step
            reads and writes. So no CTA overwrites an input that another CTA still reads.
        kept: states after prefixes of prompts. None: they are not stored.
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
        """Allocates zeroed states.

        Args:
            rules: sizes and arithmetic of each recurrent layer.
            rows: number of batch slots.
            max_drafts: largest number of draft tokens of a step.
            dtype: dtype of the convolution's inputs.
            device: device of the states.
            kept: number of states of the `StatePool`, including one to which passes write. 0: there is no pool.

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
        at: int64 [1], number of positions after which prefill passes copy their state to entry 0. 0: they copy none.
        rows: the stored states. Each is in the layout of a row with max_drafts = 0.
    """

    at: Tensor
    rows: StateCache

    @classmethod
    def allocate(
        cls, rules: tuple[StateRule, ...], count: int, *, dtype: torch.dtype, device: torch.device
    ) -> StatePool:
        """Allocates memory for `count` states, including entry 0. For other arguments see `StateCache.allocate`."""
        rows = StateCache.allocate(rules, count, 0, dtype=dtype, device=device)
        return cls(torch.zeros(1, dtype=torch.int64, device=device), rows)

    @property
    def count(self) -> int:
        """Number of states, including entry 0."""
        return self.rows.states.shape[1]

    def of_layer(self, layer: int) -> KeptState:
        """Returns the memory to which a prefill pass copies the state of a layer."""
        return KeptState(self.at, self.rows.states[layer, 0, 0], self.rows.inputs[layer, 0])

    def save(self, row: int) -> None:
        """Copies entry 0, to which a pass has copied its state, to entry `row`."""
        for each in (self.rows.states, self.rows.inputs):
            each[:, row].copy_(each[:, 0])

    def load(self, row: int, cache: StateCache, place: Tensor, length: int) -> None:
        """Copies a stored state to a row of a cache.

        Args:
            row: entry of this pool.
            cache: states of the model's rows.
            place: int64 [1], index of the row in `cache`.
            length: number of positions after which it is the state.
        """
        slots, places, width = cache.states.shape[2], cache.inputs.shape[2], self.rows.inputs.shape[2]
        state = cache.states.select(2, (length - 1) % slots)
        state.index_copy_(1, place, self.rows.states[:, row, 0][:, None])
        for position in range(length - width + 1, length):
            given = self.rows.inputs[:, row, position % width][:, None]
            cache.inputs.select(2, position % places).index_copy_(1, place, given)


def row_bytes(rule: StateRule, max_drafts: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the states and convolution inputs of one row in one layer.

    Args:
        rule: rule of the layer.
        max_drafts: largest number of drafts of a step.
        dtype: dtype of the inputs.
    """
    states, inputs = _shapes(rule, max_drafts)
    return 4 * math.prod(states) + dtype.itemsize * math.prod(inputs)


def _shapes(rule: StateRule, max_drafts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the states and of the convolution's inputs of one row in one layer."""
    return (max_drafts + 1, *rule.state_shape), (max_drafts + 1 + rule.tail, rule.channels)
