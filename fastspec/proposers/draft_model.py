"""Proposers with a draft model. It makes k draft tokens in k passes, or in one pass over mask tokens.

Target and draft model use the same page table: a sequence has the same page numbers in both KV caches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.errors import UnsupportedModel
from fastspec.kernels.ops import Ops
from fastspec.models.interface import CausalModel, is_recurrent
from fastspec.proposers.interface import ProposerBase
from fastspec.sampling.verify import Draws
from fastspec.shapes import GREEDY, ForwardBatch, StepShape, keep_draft_probs, purpose_of
from fastspec.state import DecodeState


class DraftModel(ProposerBase):
    """Drafts with a causal model.

    The first pass of a step feeds a sequence's last two tokens. If all draft tokens of the previous step were accepted,
    the draft model has not read the last of them, so its K/V are missing. Feeding two tokens in every step computes
    these K/V without a check. A model with recurrent states first goes back to its state before these two tokens.

    Args:
        model: the draft model. Its KV cache has the page size and the number of pages of the page table.
        ops: ops for everything outside the model.
        shared_vocab: limit of token ids. Target ids below it may be drafted, and are fed to the draft model. All other
            tokens are fed as id 0. With `vocab_map` it is the size of the target's vocabulary. Without `vocab_map`, ids
            below it mean the same in both models.
        max_length: the draft model's context in tokens. A longer sequence continues without draft tokens.
        mark: function that returns a context which names a pass in a profiler.
        work: result of `ops.sampled_work`.
        vocab_map: map between the token ids of draft and target. None: both models have the same ids.
    """

    in_pages = True

    def __init__(
        self,
        model: CausalModel,
        ops: Ops,
        shared_vocab: int,
        max_length: int,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        work: Any = None,
        vocab_map: VocabMap | None = None,
    ) -> None:
        self.model = model
        self.ops = ops
        self.max_length = max_length
        self.shared_vocab = shared_vocab
        self._mark = mark
        self._work = work
        self._recurrent = is_recurrent(model)
        self._map = vocab_map

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        return "the draft model" if self._map is None else "the draft model, which has another tokenizer"

    def propose(
        self, state: DecodeState, shape: StepShape, draws: Draws, lookup: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Makes k draft tokens for each running sequence; see `Proposer.propose`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            lookup: (draft tokens int64 [B, k], counts int64 [B]) of a lookup. The first `counts` draft tokens of each
                sequence are taken from it, and the model continues after them. None: the model makes all draft tokens.
        """
        may_feed = (state.draft_limits > 0)[:, None] if self._recurrent else None
        for j in range(shape.num_drafts):
            with self._mark(f"draft[{j}]"):
                rows = self._inputs(state, shape, j, may_feed)
                self._draw(state, shape, draws, self.model.hidden(rows)[:, -1:], j)
                if lookup is not None:
                    overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)

    def _inputs(self, state: DecodeState, shape: StepShape, j: int, may_feed: Tensor | None = None) -> ForwardBatch:
        """Returns the input of the pass that makes draft token j.

        For j = 0 it is the last two tokens of each sequence, else the previous draft token. If the draft tokens of a
        sequence will be ignored, the model may not have read all its tokens. The pass then writes wrong K/V, which
        `catch_up` rewrites before they are read. Wrong recurrent states could not be corrected.

        Args:
            state, shape: see `Proposer.propose`.
            j: index of the draft token, from 0.
            may_feed: bool [B, 1], True for sequences whose recurrent states may change. None: the model has no
                recurrent states.
        """
        # draft j is read at position lengths + j - 2, which must be in the draft's context
        first = {"first": -2, "queries": 2, "draft_counts": state.draft_counts, "num_drafts": shape.num_drafts}
        ids, positions, write_mask = self.ops.feed_rows(
            state.tokens,
            state.lengths,
            state.finish,
            state.draft_tokens,
            limit=self.max_length,
            vocab=self.shared_vocab,
            id_map=None if self._map is None else self._map.to_draft,
            **({"first": j - 1, "queries": 1} if j else first),
        )
        if may_feed is not None:
            write_mask = write_mask & may_feed
        return shape.forward_batch(ids, positions, write_mask, state.block_table, state.state_rows)

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Feeds up to `chunk` tokens per running sequence that the model has not read yet; see `Proposer.catch_up`.

        The last `reads_back` tokens of the sequence are left out, because `propose` feeds them.
        """
        positions = state.draft_lengths[:, None] + torch.arange(chunk, device=state.lengths.device)
        known = (state.lengths - self.reads_back).clamp(max=self.max_length)
        write_mask = state.running[:, None] & (positions < known[:, None])
        ids = state.tokens.gather(1, positions.clamp(max=state.tokens.shape[1] - 1))
        ids = torch.where(ids < self.shared_vocab, ids, 0)
        ids = ids if self._map is None else self._map.to_draft[ids]
        positions = torch.where(write_mask, positions, 0)
        self.model.hidden(shape.forward_batch(ids, positions, write_mask, state.block_table, state.state_rows))
        state.draft_lengths.add_(write_mask.sum(dim=1))

    def _draw(self, state: DecodeState, shape: StepShape, draws: Draws, hidden: Tensor, j: int) -> None:
        """Draws draft token j of every sequence. Writes the token and its distribution to `state`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            hidden: [B, 1, hidden], hidden states of the draft model.
            j: index of the draft token, from 0.
        """
        if shape.sampler == GREEDY:
            limit, ids = drafted_ids(self.shared_vocab, self._map)
            self.model.argmax(hidden[:, 0], limit, shape.tiling, out=state.draft_tokens[:, j], ids=ids)
            return
        logits = self.model.logits(hidden, shape.tiling)
        logits = logits[..., : self.shared_vocab] if self._map is None else self._map.in_target_ids(logits)
        sample(self.ops, state, shape, draws, logits, j, self._work)


class ParallelDraft(DraftModel):
    """Drafts with a causal model that was trained to predict at mask tokens (PARD, arXiv 2504.18583).

    One pass reads the tokens of a sequence that the model has not read, then k - 1 mask tokens. The last token gives
    draft token 0, and mask j gives draft token j. So the distribution of a draft token depends only on the text. With
    penalties it also depends on the draft tokens before it. The K/V of masks differ from those of the draft tokens, so
    the next step feeds accepted tokens again.

    Args:
        model, *options: see `DraftModel`.
        mask_id: the model's id of the mask token.
        max_drafts: largest number of draft tokens of any step.

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
        """Makes k draft tokens for each running sequence; see `DraftModel.propose`."""
        k = shape.num_drafts
        with self._mark("block"):
            rows, first = self._block(state, shape)
            hidden = self.model.hidden(rows)
        at = first + torch.arange(k, device=first.device)
        x = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        torch.clamp(self.max_length + 1 - state.lengths, 0, k, out=state.draft_counts)
        if shape.sampler == GREEDY:
            pick_block(self.model.argmax, state, shape, x, lookup, *drafted_ids(self.shared_vocab, self._map))
            return
        for j, logits in enumerate(self._logits(x, shape)):
            sample(self.ops, state, shape, draws, logits, j, self._work)
            if lookup is not None:
                overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)

    def _block(self, state: DecodeState, shape: StepShape) -> tuple[ForwardBatch, Tensor]:
        """Returns the input of the pass: the unread tokens of each sequence, and mask tokens after them.

        Sequences have different numbers of unread tokens, at most `reads_back`. Padding after the masks writes no K/V.

        Returns:
            The batch; and int64 [B, 1], the index in it of each sequence's last token.
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
        """Returns the logits of each draft token, fp32 [B, 1, target ids], from hidden states x [B, k, hidden]."""
        logits = self.model.logits(x, shape.tiling)
        logits = logits[..., : self.shared_vocab] if self._map is None else self._map.in_target_ids(logits)
        return [logits[:, j : j + 1].contiguous() for j in range(shape.num_drafts)]


@dataclass(frozen=True, slots=True)
class VocabMap:
    """Map between the token ids of target and draft, in both directions.

    Attributes:
        to_draft: int64 [target ids], for each target id the draft id that is fed instead; 0 if there is none.
        places: int64 [draft ids], for each draft id the target id with the same text; the number of target ids if there
            is none.
    """

    to_draft: Tensor
    places: Tensor

    @classmethod
    def of(cls, target_ids: Tensor, target_vocab: int, to_draft: Tensor | None = None) -> VocabMap:
        """Makes the map.

        Args:
            target_ids: int64 [draft ids], the target id with the same text; -1 if there is none.
            target_vocab: number of target ids.
            to_draft: see the attribute. None: the draft id with the same text, or 0 if there is none.

        Raises:
            ValueError: two draft ids have one target id, or a target id is not below target_vocab.
        """
        known = target_ids >= 0
        if target_ids[known].unique().numel() < int(known.sum()) or bool((target_ids >= target_vocab).any()):
            raise ValueError(f"a vocabulary map must name different target ids below {target_vocab}, or -1 for none")
        places = torch.where(known, target_ids, target_vocab)
        if to_draft is None:
            to_draft = torch.zeros(target_vocab, dtype=torch.int64, device=target_ids.device)
            to_draft[target_ids[known]] = torch.arange(len(places), device=target_ids.device)[known]
        return cls(to_draft, places)

    def in_target_ids(self, logits: Tensor) -> Tensor:
        """Converts logits [..., draft ids] to [..., target ids]. Ids that the draft lacks get -inf."""
        wide = logits.new_full((*logits.shape[:-1], len(self.to_draft) + 1), -torch.inf)
        return wide.index_copy_(-1, self.places, logits)[..., :-1]


def drafted_ids(vocab: int, vocab_map: VocabMap | None) -> tuple[int, Tensor | None]:
    """Returns `limit` and `ids` of `CausalModel.argmax` for draft tokens that are ids of the target.

    Args:
        vocab: number of ids that may be drafted if there is no map.
        vocab_map: map between the ids of target and draft. None: both have the same ids.
    """
    return (vocab, None) if vocab_map is None else (len(vocab_map.to_draft), vocab_map.places)


def pick_block(
    argmax: Callable[..., None],
    state: DecodeState,
    shape: StepShape,
    x: Tensor,
    lookup: tuple[Tensor, Tensor] | None,
    limit: int,
    ids: Tensor | None,
) -> None:
    """Writes the most probable tokens as the k draft tokens of every sequence, for greedy sampling.

    Args:
        argmax: see `CausalModel.argmax`.
        state, shape: see `Proposer.propose`.
        x: [B, k, hidden], hidden states for the draft tokens.
        lookup: see `DraftModel.propose`.
        limit, ids: see `CausalModel.argmax`.
    """
    k = shape.num_drafts
    # zeros: while kernels are only compiled, no ids are written, but ids are used as indices
    picks = torch.zeros(x.shape[0] * k, dtype=torch.int64, device=x.device)
    argmax(x.reshape(-1, x.shape[-1]), limit, shape.tiling, out=picks, ids=ids)
    drafts = picks.view(-1, k)
    if lookup is not None:
        drafts = torch.where(torch.arange(k, device=x.device) < lookup[1][:, None], lookup[0], drafts)
    state.draft_tokens[:, :k] = drafts


def sample(ops: Ops, state: DecodeState, shape: StepShape, draws: Draws, logits: Tensor, j: int, work: Any) -> None:
    """Draws draft token j of every sequence from logits. Writes the token and its distribution to `state`.

    Args:
        ops: implementation of the kernels.
        state, shape, draws: see `Proposer.propose`.
        logits: fp32 [B, 1, target ids].
        j: index of the draft token, from 0.
        work: result of `ops.sampled_work`.
    """
    keep = keep_draft_probs(shape)
    ops.sampled_draw(logits, state, j, work, purpose=purpose_of(shape), keep_draft_probs=keep, draws=draws)


def overwrite_draft(state: DecodeState, shape: StepShape, token: Tensor, in_rows: Tensor, j: int) -> None:
    """Replaces draft token j of some sequences. The new token gets probability 1 in their draft distribution.

    Args:
        state, shape: see `Proposer.propose`.
        token: int64 [B], the new token of each sequence.
        in_rows: bool [B], True for sequences whose draft token is replaced.
        j: index of the draft token, from 0.
    """
    state.draft_tokens[:, j] = torch.where(in_rows, token, state.draft_tokens[:, j])
    if keep_draft_probs(shape):
        probs = state.draft_probs[:, j]
        probs.copy_(torch.where(in_rows[:, None], torch.zeros_like(probs).scatter(1, token[:, None], 1.0), probs))
