"""Prefill slots: extra rows that prompts pass through, so that launches do not depend on a prompt's row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.state import BUFFERS, IDLE, RUNNING, DecodeState
from fastspec.step import PromptEnd


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlot:
    """Buffers of one row or of several, and the positions up to which their prompts are prefilled.

    Attributes:
        state: the buffers of the slot's rows. K/V of each lie in the pages of the row that it stands for.
        start: int64 [rows], the positions of the target's next pass.
        features: [1, ..], its row of `StepModules.features`; None where nothing is kept.
        prompt_ends: its rows of `StepModules.prompt_ends`; None where there are none.
    """

    state: DecodeState
    start: Tensor
    features: Tensor | None = None
    prompt_ends: PromptEnd | None = None

    @classmethod
    def allocate(
        cls, state: DecodeState, features: Tensor | None = None, rows: int = 1, prompt_ends: PromptEnd | None = None
    ) -> PrefillSlot:
        """An idle slot with room for any `rows` rows of `state` and of `prompt_ends`, and one of `features` [B, ..].

        Of several rows only what passes over prompts read has memory of its own.
        """
        one = state.one_row()
        if rows > 1:
            wide = {name: getattr(one, name) for name in BUFFERS}
            wide = {name: each.expand(rows, *each.shape[1:]) for name, each in wide.items()}
            own = [name for name, each in BUFFERS.items() if each.prefill or name == "emitted"]
            one = DecodeState(**{**wide, **{name: wide[name].clone() for name in own}})
        own_features = None if features is None else torch.zeros_like(features[:1])
        own_ends = None if prompt_ends is None else prompt_ends.like(rows)
        return cls(one, torch.zeros_like(one.lengths), own_features, own_ends)

    def enter(self, state: DecodeState, row: int, start: int, *, running: bool = True, place: int = 0) -> None:
        """Row `place` of the slot stands for row `row` of `state` from now on; passes begin at position `start`.

        A row whose prompt is not prefilled yet idles (`running` is False); the slot runs all the same.
        """
        for name, each in BUFFERS.items():
            if each.prefill:
                getattr(self.state, name)[place].copy_(getattr(state, name)[row])
        if not running:
            self.state.finish[place].fill_(RUNNING)
        self.start[place].fill_(start)

    def leave(self, state: DecodeState, row: int, place: int = 0) -> None:
        """Copies back what passes of a draft changed; the slot's row is idle then."""
        state.draft_lengths[row].copy_(self.state.draft_lengths[place])
        self.state.finish[place].fill_(IDLE)
