"""Recurrent states beside the K/V pages, kept so that drafts can be taken back without a copy.

A row has a ring of states in each layer: that behind position p lies in slot p % slots. A pass that feeds a row from
position n on starts from the state behind n - 1 and leaves one behind every position that it feeds, of which the last
`slots` stay. A row's length therefore says which of its states counts, as it says which of its keys do: after k drafts
of which some are refused, the state behind the last token that counts is still there for max_drafts + 1 slots.

The convolution before a state sees the inputs of a few older positions; those lie in a ring of their own, by position.
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
        inputs: [layers, rows, max_drafts + width, channels], inputs of the convolution: one more than are read and
            written in a step, so that none is written where others are still to be read.
    """

    states: Tensor
    inputs: Tensor

    @classmethod
    def allocate(
        cls, rules: tuple[DeltaRule, ...], rows: int, max_drafts: int, *, dtype: torch.dtype, device: torch.device
    ) -> StateCache:
        """Allocates zeroed states for these layers, which are all of one size, and steps of up to `max_drafts`."""
        states, inputs = _shapes(rules[0], max_drafts)
        made = torch.zeros(len(rules), rows, *states, dtype=torch.float32, device=device)
        return cls(made, torch.zeros(len(rules), rows, *inputs, dtype=dtype, device=device))


def row_bytes(rule: DeltaRule, max_drafts: int, dtype: torch.dtype) -> int:
    """Bytes of one row in one layer."""
    states, inputs = _shapes(rule, max_drafts)
    return 4 * math.prod(states) + dtype.itemsize * math.prod(inputs)


def _shapes(rule: DeltaRule, max_drafts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the states and of the inputs of one row in one layer."""
    states = max_drafts + 1, rule.value_heads, rule.value_dim, rule.key_dim
    return states, (max_drafts + 1 + rule.tail, rule.channels)
