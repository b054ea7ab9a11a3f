"""Proposers with a DFlash, DSpark or DFlash2 head. One pass over mask tokens makes all draft tokens of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels.ops import Ops
from fastspec.models.heads.passes import DFlash, DFlash2, DSpark
from fastspec.proposers.draft_model import overwrite_draft
from fastspec.proposers.learned import LearnedDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import GREEDY, NO_LIMIT, ForwardBatch, StepShape
from fastspec.state import DecodeState


class DFlashDrafts(LearnedDrafts[DFlash]):
    """Drafts with a DFlash head (arXiv 2602.06036).

    At the end of every step and prefill pass, the head's K and V of committed tokens are computed from the target's
    hidden states. This is done after steps without draft tokens, too. So the head's KV cache is always up to date, and
    drafting may pause and resume.

    The head's pass is over a block: a sequence's last token and one mask token per draft token, as in vLLM. The
    publishers' own code always runs a block of full size. Its draft tokens then also attend to the masks of draft
    tokens that are not used, so with fewer draft tokens it may give other ones.

    The head never reads draft tokens of the same step. So the distribution of a draft token depends only on the text
    before the block. With penalties it also depends on the draft tokens before it.

    Args:
        model, ops, vocab_map, mark, work: see `LearnedDrafts`.
    """

    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> None:
        """Writes the head's K and V at the positions of `rows`, see `FeatureReader.take_features`."""
        self.model.store_context(features, rows)

    def propose(
        self,
        state: DecodeState,
        shape: StepShape,
        draws: Draws,
        lookup: tuple[Tensor, Tensor] | None = None,
        **features: Tensor,
    ) -> None:
        """Makes k draft tokens for each running sequence; see `Proposer.propose`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            lookup: see `DraftModel.propose`.
            features: empty, because no hidden states are stored between steps.
        """
        x = self._hidden(state, shape)
        state.draft_counts.fill_(shape.num_drafts)
        self._draw_block(state, shape, draws, x, lookup)

    def _hidden(self, state: DecodeState, shape: StepShape) -> Tensor:
        """Runs the head over its block. Returns its hidden states for the k draft tokens, [B, k, hidden]."""
        with self._mark("block"):
            return self.model.block(self._block(state, shape))[
                :, self.model.head.rows(shape.num_drafts) - shape.num_drafts :
            ]

    def _block(self, state: DecodeState, shape: StepShape) -> ForwardBatch:
        """Returns the input of the head's pass: each sequence's last token, and mask tokens after it."""
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


class InOrder(DFlashDrafts):
    """Base class of DFlash-like proposers in which each draft token also depends on the previous draft token.

    The head runs once for all draft tokens. Then these are drawn one after the other, from logits that depend on the
    previous token. So the distribution of a draft token depends on the text and on all draft tokens before it.
    """

    def propose(
        self,
        state: DecodeState,
        shape: StepShape,
        draws: Draws,
        lookup: tuple[Tensor, Tensor] | None = None,
        **features: Tensor,
    ) -> None:
        """Makes k draft tokens for each running sequence; see `DFlashDrafts.propose`."""
        x = self._hidden(state, shape)
        state.draft_counts.fill_(shape.num_drafts)
        before = state.tokens.gather(1, (state.lengths[:, None] - 1).clamp_min(0))
        candidates_of = self._candidates_after(x.contiguous(), shape)
        for j in range(shape.num_drafts):
            logits, ids = candidates_of(j, before)
            if shape.sampler == GREEDY:
                best = logits[:, 0].argmax(-1, keepdim=True)
                state.draft_tokens[:, j] = self._target_ids(best if ids is None else ids.gather(1, best))[:, 0]
            else:
                self._sample(state, shape, draws, logits if ids is None else self._among_all(logits, ids), j)
            if lookup is not None:
                overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)
            before = state.draft_tokens[:, j : j + 1].clamp(0, self._target.vocab_size - 1)

    def _among_all(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Returns logits of all ids of the head, fp32 [B, 1, head's ids]. All other ids get -inf.

        Args:
            logits: fp32 [B, 1, n], logits of some ids.
            ids: int64 [B, n], the head's ids of these logits.
        """
        nothing = logits.new_full((len(logits), 1, self.model.vocab_size), -torch.inf)
        return nothing.scatter(-1, ids[:, None], logits)

    @abstractmethod
    def _candidates_after(self, x: Tensor, shape: StepShape) -> Callable[[int, Tensor], tuple[Tensor, Tensor | None]]:
        """Returns a function that computes the logits of draft token j.

        The arguments of that function are j (from 0), and the token before draft token j of each sequence, int64 [B,
        1]. It returns fp32 logits [B, 1, n] and the head's ids of these logits, int64 [B, n]. Other ids are not
        drafted. The ids are None if the logits are those of all ids of the head.

        Args:
            x: [B, k, hidden], the head's hidden states for all draft tokens.
            shape: shape of the step.
        """


class DSparkDrafts(InOrder):
    """Drafts with a DSpark head: logits from the block's hidden states, plus a term for the previous token.

    Args:
        model: the head.
        ops, vocab_map, mark, work: see `LearnedDrafts`.
    """

    def __init__(self, model: DSpark, ops: Ops, *options: Any) -> None:
        super().__init__(model, ops, *options)
        self._head = model

    @override
    def _candidates_after(self, x: Tensor, shape: StepShape) -> Callable[[int, Tensor], tuple[Tensor, Tensor | None]]:
        logits = self.model.logits(x, shape.tiling)
        return lambda j, before: (logits[:, j : j + 1] + self._head.after(before, shape.tiling), None)


class DFlash2Drafts(InOrder):
    """Drafts with a DFlash2 head: the most probable ids get new scores when the previous draft token is known.

    Args:
        model: the head.
        ops, vocab_map, mark, work: see `LearnedDrafts`.
    """

    def __init__(self, model: DFlash2, ops: Ops, *options: Any) -> None:
        super().__init__(model, ops, *options)
        self._head, self._count = model, model.candidates

    @override
    def _candidates_after(self, x: Tensor, shape: StepShape) -> Callable[[int, Tensor], tuple[Tensor, Tensor | None]]:
        best = self.model.logits(x, shape.tiling).topk(self._count, dim=-1)
        ids, projected = self._target_ids(best.indices), self._head.projected(x, shape.tiling)

        def candidates(j: int, before: Tensor) -> tuple[Tensor, Tensor]:
            scores = self._head.scored(projected[:, j : j + 1], before, ids[:, j])
            return best.values[:, j : j + 1] + scores, best.indices[:, j]

        return candidates
