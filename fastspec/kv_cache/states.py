"""Recurrent states of sequences, stored by position, so that nothing is copied when draft tokens are rejected.

A row (batch slot) has a ring buffer of states in each layer. The state after position p is in entry p % slots of the
buffer. A forward pass whose first token in the row is at position n starts from the state after position n - 1. It
stores the state after each of its positions, so the buffer has the states after the last `slots` positions. The length
of the sequence selects the state to start from, in the same way as it selects the valid keys. With slots = max_drafts +
1, the buffer still has the state after the last accepted token, for any number of rejected tokens.

The convolution of a layer also reads inputs at a few earlier positions. They are stored in a separate ring buffer.
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
    """Recurrent states of one model, for all batch slots.

    Attributes:
        states: fp32 [recurrent layers, batch slots, max_drafts + 1, *state_shape], ring buffers of states. For
            state_shape see `StateRule`.
        inputs: [recurrent layers, batch slots, max_drafts + width, channels], ring buffers of inputs of the
            convolution. They have room for all positions that one decode step reads and writes. So no CTA overwrites
            an input that another CTA still reads. width: number of inputs that one output of the convolution reads.
        kept: states after prefixes of prompts, for the prefix cache. None: they are not stored.
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
            kept: number of entries of the `StatePool`, including entry 0, to which passes write. 0: there is no pool.

        Raises:
            ValueError: the layers do not all have states of the same shape.
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
        at: int64 [1], length n of a prefix. A prefill pass copies its state after the first n positions of its
            sequence to entry 0. 0: prefill passes copy no state.
        rows: the entries of the pool, stored like batch slots with max_drafts = 0.
    """

    at: Tensor
    rows: StateCache

    @classmethod
    def allocate(
        cls, rules: tuple[StateRule, ...], count: int, *, dtype: torch.dtype, device: torch.device
    ) -> StatePool:
        """Allocates memory for `count` entries, including entry 0. For other arguments see `StateCache.allocate`."""
        rows = StateCache.allocate(rules, count, 0, dtype=dtype, device=device)
        return cls(torch.zeros(1, dtype=torch.int64, device=device), rows)

    @property
    def count(self) -> int:
        """Number of entries, including entry 0."""
        return self.rows.states.shape[1]

    def of_layer(self, layer: int) -> KeptState:
        """Returns one layer's memory of entry 0, to which prefill passes copy the layer's state."""
        return KeptState(self.at, self.rows.states[layer, 0, 0], self.rows.inputs[layer, 0])

    def save(self, row: int) -> None:
        """Copies entry 0 to entry `row`. A prefill pass has written entry 0 before."""
        for each in (self.rows.states, self.rows.inputs):
            each[:, row].copy_(each[:, 0])

    def load(self, row: int, cache: StateCache, place: Tensor, length: int) -> None:
        """Copies an entry of this pool to a batch slot.

        Args:
            row: index of the entry.
            cache: the model's states, which are written.
            place: int64 [1], index of the batch slot.
            length: number of positions of the prefix that the entry belongs to.
        """
        slots, places, width = cache.states.shape[2], cache.inputs.shape[2], self.rows.inputs.shape[2]
        state = cache.states.select(2, (length - 1) % slots)
        state.index_copy_(1, place, self.rows.states[:, row, 0][:, None])
        for position in range(length - width + 1, length):
            given = self.rows.inputs[:, row, position % width][:, None]
            cache.inputs.select(2, position % places).index_copy_(1, place, given)


def row_bytes(rule: StateRule, max_drafts: int, dtype: torch.dtype) -> int:
    """Returns the bytes of the states and convolution inputs of one batch slot in one layer.

    Args:
        rule: sizes and arithmetic of the layer.
        max_drafts: largest number of draft tokens of a step.
        dtype: dtype of the convolution's inputs. States are fp32.
    """
    states, inputs = _shapes(rule, max_drafts)
    return 4 * math.prod(states) + dtype.itemsize * math.prod(inputs)


def _shapes(rule: StateRule, max_drafts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (shape of the states, shape of the convolution's inputs) for one batch slot in one layer."""
    return (max_drafts + 1, *rule.state_shape), (max_drafts + 1 + rule.tail, rule.channels)
