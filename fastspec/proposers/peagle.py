"""Proposer with a P-EAGLE head: makes all drafts of a step in one pass over a position and masks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels.ops import Ops
from fastspec.models.heads.passes import PEagle
from fastspec.proposers.chain import ChainDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import NO_LIMIT, ForwardBatch, StepShape
from fastspec.state import DecodeState


class PEagleDrafts(ChainDrafts):
    """Drafts with a P-EAGLE head. It reads hidden states like an EAGLE-3 head, see `ChainDrafts`.

    All drafts are drawn before any is fed to the head. So a draft's distribution depends only on the text and, in a row
    with penalties, on the drafts before it.

    Args:
        model, ops, readings, sample, vocab_map, mark, work: see `ChainDrafts`.
    """

    def __init__(
        self,
        model: PEagle,
        ops: Ops,
        readings: tuple[tuple[int, ...], ...],
        sample: tuple[int, ...] = (),
        vocab_map: Tensor | None = None,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        work: Any = None,
    ) -> None:
        super().__init__(model, ops, readings, sample, vocab_map, mark, work)
        self._head = model

    @override
    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        g = self.model.condense(features, rows.tiling)
        self.model.absorb(g, rows)
        return g

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
            features: [B, hidden], g of each row's newest position.
        """
        known = state.lengths > 1
        torch.mul(known, shape.num_drafts, out=state.draft_counts)
        with self._mark("block"):
            x = self._head.block(features[:, None], self._block(state, shape, known & state.running))
        self._draw_block(state, shape, draws, x, lookup)

    def _block(self, state: DecodeState, shape: StepShape, known: Tensor) -> ForwardBatch:
        """Returns positions lengths - 2 .. lengths + k - 3 of each row, with its last token and masks."""
        k = shape.num_drafts
        state.draft_tokens[:, :k] = self._head.head.mask_id
        ids, positions, _ = self.ops.feed_rows(
            state.tokens,
            state.lengths,
            state.finish,
            state.draft_tokens,
            first=-1,
            queries=k,
            limit=NO_LIMIT,
            vocab=self._target.vocab_size,
        )
        mask = known[:, None].expand_as(positions).contiguous()
        return shape.forward_batch(ids, (positions - 1).clamp_min(0), mask, state.block_table)
