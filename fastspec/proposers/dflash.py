"""Proposer with a DFlash head: makes all drafts of a step in one pass over a block of masks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.ops import Ops
from fastspec.models.heads.passes import DFlash
from fastspec.proposers.draft_model import overwrite_draft
from fastspec.proposers.learned import LearnedDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import GREEDY, NO_LIMIT, ForwardBatch, StepShape
from fastspec.state import DecodeState


class DFlashDrafts(LearnedDrafts[DFlash]):
    """Drafts with a DFlash head (arXiv 2602.06036).

    At the end of every step and prefill pass, K and V of accepted tokens are computed from the target's hidden states.
    This is done after steps without drafts, too. So the head's cache is always up to date, and drafting may pause and
    resume.

    A block has the last token and one mask per draft of the step, as in vLLM. The publishers' own code always runs the
    whole block. Its rows also see masks after those of the drafts, so with fewer drafts it may give other tokens.

    All drafts are drawn before any is fed to the head. So a draft's distribution depends only on the text before the
    block and, in a row with penalties, on the drafts before it.

    Args:
        model, ops, vocab_map, mark, work: see `LearnedDrafts`.
    """

    def __init__(
        self,
        model: DFlash,
        ops: Ops,
        vocab_map: Tensor | None = None,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        work: Any = None,
    ) -> None:
        (reading,) = model.head.readings  # there is only one reading
        super().__init__(model, ops, reading, vocab_map, mark, work)

    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> None:
        """Writes keys and values of the positions. Returns nothing to store. See `FeatureReader`."""
        self.model.store_context(features, rows)

    def propose(
        self,
        state: DecodeState,
        shape: StepShape,
        draws: Draws,
        lookup: tuple[Tensor, Tensor] | None = None,
        **features: Tensor,
    ) -> None:
        """Makes k drafts per running row; see `Proposer.propose`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            lookup: see `DraftModel.propose`.
            features: empty, because nothing is stored between steps.
        """
        k, head = shape.num_drafts, self.model.head
        with self._mark("block"):
            x = self.model.block(self._block(state, shape))[:, head.rows(k) - k :]
        state.draft_counts.fill_(k)
        if shape.sampler == GREEDY:
            self._pick(state, shape, x, lookup)
            return
        logits = self.model.logits(x.contiguous(), shape.tiling)
        for j in range(k):
            self._sample(state, shape, draws, logits[:, j : j + 1].contiguous(), j)
            if lookup is not None:
                overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)

    def _block(self, state: DecodeState, shape: StepShape) -> ForwardBatch:
        """Returns the last token of each row with masks after it, as a batch."""
        state.draft_tokens[:, : shape.num_drafts] = self.model.head.mask_id
        ids, positions, write_mask = self.ops.feed_rows(
            state.tokens,
            state.lengths,
            state.finish,
            state.draft_tokens,
            first=-1,
            queries=self.model.head.rows(shape.num_drafts),
            limit=NO_LIMIT,
            vocab=self._target.vocab_size,
        )
        return shape.forward_batch(ids, positions, write_mask, state.block_table)

    def _pick(self, state: DecodeState, shape: StepShape, x: Tensor, lookup: tuple[Tensor, Tensor] | None) -> None:
        """Writes the most probable token of each position as its draft, from hidden states [B, k, hidden]."""
        k, model = shape.num_drafts, self.model
        # zeros: while kernels are only compiled, no ids are written, but ids are used as indices
        picks = torch.zeros(x.shape[0] * k, dtype=torch.int64, device=x.device)
        model.argmax(x.reshape(-1, x.shape[-1]), model.vocab_size, shape.tiling, out=picks)
        drafts = self._target_ids(picks).view(-1, k)
        if lookup is not None:
            drafts = torch.where(torch.arange(k, device=x.device) < lookup[1][:, None], lookup[0], drafts)
        state.draft_tokens[:, :k] = drafts
