"""The prefill slot: one extra row that prompts pass through, so that launches do not depend on a prompt's row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.state import BUFFERS, IDLE, RUNNING, DecodeState


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlot:
    """Buffers of one row, and the position up to which its prompt was passed.

    Attributes:
        row: a state of one row. Its K/V lies in the pages of the row that it stands for.
        start: int64 [1], the position of the target's next pass.
        features: [1, ..], its row of `StepModules.features`; None where nothing is kept.
    """

    row: DecodeState
    start: Tensor
    features: Tensor | None = None

    @classmethod
    def beside(cls, state: DecodeState, features: Tensor | None = None) -> PrefillSlot:
        """An idle slot with room for any row of `state`, and of `features` [B, ..]."""
        row = state.one_row()
        return cls(row, torch.zeros_like(row.lengths), None if features is None else torch.zeros_like(features[:1]))

    def enter(self, state: DecodeState, row: int, start: int, *, running: bool = True) -> None:
        """The slot stands for row `row` of `state` from now on; passes begin at position `start`.

        A row whose prompt is not in yet idles (`running` is False); the slot runs all the same.
        """
        for name, each in BUFFERS.items():
            if each.prefill:
                getattr(self.row, name)[0].copy_(getattr(state, name)[row])
        if not running:
            self.row.finish.fill_(RUNNING)
        self.start.fill_(start)

    def leave(self, state: DecodeState, row: int) -> None:
        """Gives back what passes of a draft changed, and idles."""
        state.draft_lengths[row].copy_(self.row.draft_lengths[0])
        self.row.finish.fill_(IDLE)
