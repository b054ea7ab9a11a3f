"""Proposer with an assistant of Gemma 4, which reads the keys and values of its target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels.ops import Ops
from fastspec.models.heads.assistant import Assistant, Places, places_of
from fastspec.proposers.draft_model import overwrite_draft
from fastspec.proposers.learned import LearnedDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import ForwardBatch, StepShape
from fastspec.state import DecodeState


class AssistantDrafts(LearnedDrafts[Assistant]):
    """Drafts with an assistant, one pass a draft. It has no cache: all drafts of a step read the same keys.

    Args:
        model: the assistant.
        ops, vocab_map, mark, work: see `LearnedDrafts`.
    """

    article = "an"

    def __init__(self, model: Assistant, ops: Ops, *options: Any) -> None:
        super().__init__(model, ops, *options)
        self.kept = model.head.kept

    @override
    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        return features[:, :, 0]

    def propose(
        self,
        state: DecodeState,
        shape: StepShape,
        draws: Draws,
        lookup: tuple[Tensor, Tensor] | None = None,
        *,
        features: Tensor,
    ) -> None:
        """Makes k drafts for each running row with at least one position; see `Proposer.propose`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            lookup: see `DraftModel.propose`.
            features: [B, target's hidden], the hidden state at each row's newest position.
        """
        k, model = shape.num_drafts, self.model
        self._begin(state, k)
        places, ids = self._places(state, shape)
        picks = torch.zeros(k, state.batch, dtype=torch.int64, device=ids.device)
        h = features[:, None]
        for j in range(k):
            with self._mark(f"draft[{j}]"):
                x = model.drafted(h, ids, places)
                self._draw(state, shape, draws, x, j, picks[j])
                if lookup is not None:
                    overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)
                ids, h = state.draft_tokens[:, j : j + 1], model.feature(x, shape.tiling)

    def _places(self, state: DecodeState, shape: StepShape) -> tuple[Places, Tensor]:
        """Returns the places of drafts, and each row's last token [B, 1]."""
        positions = (state.lengths[:, None] - 1).clamp_min(0)
        rows = shape.forward_batch(
            state.tokens.gather(1, positions), positions, state.running[:, None], state.block_table
        )
        return places_of(rows), rows.ids
