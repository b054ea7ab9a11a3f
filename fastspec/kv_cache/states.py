"""Recurrent states beside the K/V pages, kept so that refused drafts can be undone without a copy.

A row has a ring buffer of states in each layer: the state after position p lies in slot p % slots. A pass over a row
from position n on starts from the state after n - 1, and stores one after each position; the last `slots` of them stay.
So a row's length decides which state counts, as it decides which keys do: with slots = max_drafts + 1, the state after
the last accepted token is always there, however many drafts of a step are refused.

The convolution of a layer reads the inputs of a few older positions; those have a ring buffer of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.shapes import DeltaRule


@dataclass(frozen=True, slots=True)
class StateCache:
    """The recurrent states of one model.

    Attributes:
        states: fp32 [layers, rows, slots, value_heads, value_dim, key_dim], slots being max_drafts + 1.
        inputs: [layers, rows, max_drafts + width, channels], inputs of the convolution: as many as are read and
            written in one step, so no place is written that other programs still read.
    """

    states: Tensor
    inputs: Tensor

    @classmethod
    def allocate(
        cls, rules: tuple[DeltaRule, ...], rows: int, max_drafts: int, *, dtype: torch.dtype, device: torch.device
    ) -> StateCache:
        """Allocates zeroed states for layers of these rules, all equal, and steps with up to `max_drafts` drafts."""
        states, inputs = _shapes(rules[0], max_drafts)
        made = torch.zeros(len(rules), rows, *states, dtype=torch.float32, device=device)
        return cls(made, torch.zeros(len(rules), rows, *inputs, dtype=dtype, device=device))


def row_bytes(rule: DeltaRule, max_drafts: int, dtype: torch.dtype) -> int:
    """Bytes of the states and inputs of one row in one layer, with inputs of `dtype`."""
    states, inputs = _shapes(rule, max_drafts)
    return 4 * math.prod(states) + dtype.itemsize * math.prod(inputs)


def _shapes(rule: DeltaRule, max_drafts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the states and of the inputs of one row in one layer."""
    states = max_drafts + 1, rule.value_heads, rule.value_dim, rule.key_dim
    return states, (max_drafts + 1 + rule.tail, rule.channels)
