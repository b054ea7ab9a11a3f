"""Proposers with the MTP (multi-token prediction) layers of the target's own checkpoint: one layer, or several."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.ops import Ops
from fastspec.models.heads.passes import Mtp
from fastspec.proposers.chain import ChainDrafts
from fastspec.proposers.draft_model import overwrite_draft
from fastspec.proposers.learned import LearnedDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import NO_LIMIT, ForwardBatch, StepShape
from fastspec.state import DecodeState


class MtpDrafts(ChainDrafts):
    """Drafts with the one MTP layer of the target's own checkpoint; see `ChainDrafts`."""

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        ids = f", which drafts {self.model.vocab_size} of {self._target.vocab_size} ids" if self._map else ""
        return f"the checkpoint's own {self.model.head.found}{ids}"


class MtpLayersDrafts(LearnedDrafts[Mtp]):
    """Drafts with several MTP layers of the target's own checkpoint.

    MTP layer j makes draft token j. The last layer also makes all later draft tokens.

    At position i layer j reads token i + 1 + j. At the n newest positions of a sequence, n = `computed_again`, some of
    these tokens are draft tokens. So a step computes every layer at these positions twice. It first computes them with
    the draft tokens, while drafting. At the end of the step it computes them with the emitted tokens.

    At the end of every step and prefill pass, K and V of all layers are computed at all positions whose tokens are
    known. So drafting may pause and resume.

    Args:
        model, ops, vocab_map, mark, work: see `LearnedDrafts`.
    """

    def __init__(
        self,
        model: Mtp,
        ops: Ops,
        vocab_map: Tensor | None = None,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        work: Any = None,
    ) -> None:
        super().__init__(model, ops, vocab_map, mark, work)
        self.kept, self.computed_again = model.head.kept, model.head.computed_again
        self._layers = model.head.num_layers

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        ids = f", which draft {self.model.vocab_size} of {self._target.vocab_size} ids" if self._map else ""
        return f"the {self._layers} layers of the checkpoint's own {self.model.head.found}{ids}"

    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> None:
        """Writes K and V of all MTP layers at positions whose tokens are known; see `FeatureReader.take_features`."""
        x, tokens = self.model.condense(features, rows.tiling).contiguous(), state.tokens
        for layer in range(self._layers):
            at = rows.positions + (1 + layer)
            known = rows.write_mask & (at < state.lengths[:, None])
            ids = tokens.gather(1, at.clamp_max(tokens.shape[1] - 1)) if layer else rows.ids
            fed = replace(rows, ids=ids.clamp(0, self._target.vocab_size - 1), write_mask=known)
            if layer + 1 < self._layers:
                x = self.model.drafted(x, fed, layer)
            else:
                self.model.absorb(x, fed, layer)

    def propose(
        self,
        state: DecodeState,
        shape: StepShape,
        draws: Draws,
        lookup: tuple[Tensor, Tensor] | None = None,
        *,
        features: Tensor,
    ) -> None:
        """Makes k draft tokens for each running sequence of at least two tokens; see `Proposer.propose`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            lookup: see `DraftModel.propose`.
            features: [B, n, 1, hidden], the target's hidden states at the n = `computed_again` newest positions of each
                sequence.
        """
        k, model = shape.num_drafts, self.model
        known = self._begin(state, k)[:, None]
        x = model.condense(features, shape.tiling)
        for j in range(k):
            layer = min(j, self._layers - 1)
            if j >= self._layers:
                x = model.feature(x[:, -1:])
            with self._mark(f"draft[{j}]"):
                x = model.drafted(x.contiguous(), self._inputs(state, shape, j, x.shape[1], known), layer)
                last = x[:, -1:].contiguous()
                self._draw(state, shape, draws, last, j, model.output(layer))
                if lookup is not None:
                    overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)

    def _inputs(self, state: DecodeState, shape: StepShape, j: int, count: int, known: Tensor) -> ForwardBatch:
        """Returns the input of the pass that makes draft token j: newest positions, and the tokens to read there.

        The last position is lengths - 2 for the first draft token of each MTP layer. It is one position later for each
        further draft token of the last layer.

        Args:
            state, shape: see `propose`.
            j: index of the draft token, from 0.
            count: number of positions per sequence.
            known: bool [B, 1], True for running sequences that draft.
        """
        ids, _, _ = self.ops.feed_rows(
            state.tokens,
            state.lengths,
            state.finish,
            state.draft_tokens,
            first=j - count,
            queries=count,
            limit=NO_LIMIT,
            vocab=self._target.vocab_size,
        )
        newest = state.lengths - 2 + max(0, j + 1 - self._layers)
        positions = newest[:, None] + torch.arange(1 - count, 1, device=newest.device)
        mask = known & (positions >= 0)
        rows = shape.forward_batch(ids, positions.clamp_min(0), mask, state.block_table)
        return replace(rows, first_block=0)  # the older positions may be in an earlier block than those of the step
