"""Proposer with a PARD draft model: makes all drafts of a step in one pass, at masks after the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.errors import UnsupportedModel
from fastspec.models.interface import CausalModel
from fastspec.proposers.draft_model import DraftModel, overwrite_draft, sample
from fastspec.sampling.verify import Draws
from fastspec.shapes import GREEDY, ForwardBatch, StepShape
from fastspec.state import DecodeState


class ParallelDraft(DraftModel):
    """Drafts with a causal model that was trained to predict at masks (PARD, arXiv 2504.18583).

    One pass has a row's tokens that the model has not read, then k - 1 masks. The last token gives draft 0, and mask j
    gives draft j. So a draft's distribution depends only on the text and, in a row with penalties, on the drafts before
    it. K/V of the masks are no K/V of the text: the next step feeds accepted drafts again.

    Args:
        model, *options: see `DraftModel`.
        mask_id: the model's id of a mask.
        max_drafts: largest k of any step.

    Raises:
        UnsupportedModel: the model has recurrent states, which masks would change.
    """

    feeds_drafts = False

    def __init__(self, model: CausalModel, *options: Any, mask_id: int, max_drafts: int) -> None:
        super().__init__(model, *options)
        if self._recurrent:
            raise UnsupportedModel(
                "the draft has a pard_token and recurrent states, which masks would change; wanted attention in all "
                "layers: take another draft, or delete pard_token from its config.json to draft token by token"
            )
        self.mask_id, self.reads_back = mask_id, max_drafts + 1

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        return f"{super().__str__()}, all drafts in one pass (PARD)"

    @override
    def propose(
        self, state: DecodeState, shape: StepShape, draws: Draws, lookup: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Makes k drafts per running row; see `DraftModel.propose`."""
        k = shape.num_drafts
        with self._mark("block"):
            rows, first = self._block(state, shape)
            hidden = self.model.hidden(rows)
        at = first + torch.arange(k, device=first.device)
        x = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        torch.clamp(self.max_length + 1 - state.lengths, 0, k, out=state.draft_counts)
        for j, logits in enumerate(self._logits(x, shape)):
            if shape.sampler == GREEDY:
                state.draft_tokens[:, j] = logits[:, 0].argmax(dim=-1)
            else:
                sample(self.ops, state, shape, draws, logits, j, self._work)
            if lookup is not None:
                overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)

    def _block(self, state: DecodeState, shape: StepShape) -> tuple[ForwardBatch, Tensor]:
        """Returns each row's unread tokens and the masks after them as a batch, and the place of its last token [B, 1].

        Rows have different numbers of unread tokens, at most `reads_back`; what comes after the masks is not written.
        """
        lengths, k = state.lengths[:, None], shape.num_drafts
        start = torch.maximum(state.draft_lengths[:, None], lengths - self.reads_back).clamp_min(0)
        places = torch.arange(self.reads_back + k - 1, device=lengths.device)
        positions = start + places
        ids = state.tokens.gather(1, positions.clamp(max=state.tokens.shape[1] - 1))
        ids = torch.where((ids >= 0) & (ids < self.shared_vocab), ids, 0)
        ids = ids if self._map is None else self._map.to_draft[ids]
        ids = torch.where(positions < lengths, ids, self.mask_id)
        write_mask = state.running[:, None] & (positions < torch.clamp(lengths + k - 1, max=self.max_length))
        batch = shape.forward_batch(ids, positions, write_mask, state.block_table, state.state_rows)
        return batch, (lengths - 1 - start).clamp_min(0)

    def _logits(self, x: Tensor, shape: StepShape) -> list[Tensor]:
        """Returns logits of each draft, fp32 [B, 1, target ids] each, from hidden states [B, k, hidden]."""
        logits = self.model.logits(x, shape.tiling)
        logits = logits[..., : self.shared_vocab] if self._map is None else self._map.in_target_ids(logits)
        return [logits[:, j : j + 1].contiguous() for j in range(shape.num_drafts)]
