"""The lane: one row apart through which prompts pass, so that what is launched does not depend on a prompt's row."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fastspec.state import IDLE, DecodeState

_OF_A_ROW = ("tokens", "lengths", "finish", "block_table", "draft_lengths")  # what a pass over a prompt reads


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlot:
    """Buffers of one row, and how far its prompt was fed.

    Attributes:
        row: a state of one row. Its K/V lies in the pages of the row that it stands for.
        start: int64 [1], the position of the target's next pass.
    """

    row: DecodeState
    start: Tensor

    @classmethod
    def beside(cls, state: DecodeState) -> PrefillSlot:
        """An idle lane with room for any row of `state`."""
        row = DecodeState(**{field.name: torch.zeros_like(getattr(state, field.name)[:1]) for field in fields(state)})
        row.lengths.fill_(1)
        row.finish.fill_(IDLE)
        return cls(row, torch.zeros_like(row.lengths))

    def enter(self, state: DecodeState, row: int, start: int) -> None:
        """The lane stands for row `row` of `state` from now on; passes begin at position `start`."""
        for name in _OF_A_ROW:
            getattr(self.row, name)[0].copy_(getattr(state, name)[row])
        self.start.fill_(start)

    def leave(self, state: DecodeState, row: int) -> None:
        """Gives back what passes of a draft changed, and idles."""
        state.draft_lengths[row].copy_(self.row.draft_lengths[0])
        self.row.finish.fill_(IDLE)
