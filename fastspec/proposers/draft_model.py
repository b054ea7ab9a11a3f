"""The draft-model proposer: k passes of a small model over its own pages of the shared page table."""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec import sampling
from fastspec.kv_cache.cache import PassRows, slots_of
from fastspec.models.base import CausalModel
from fastspec.proposers.base import FILTERED, GREEDY, StepShape
from fastspec.state import DecodeState
from fastspec.verify import Draws


class DraftModel:
    """Drafts with a causal model.

    The first pass of a step feeds a row's last two tokens: after full acceptance the last draft was never fed
    to the draft itself, and feeding two always fills that hole without asking whether it is there.

    Args:
        model: the draft; its cache has the page geometry of the shared table.
        page_size: positions per page.
        shared_vocab: ids below this mean the same to draft and target; no other id is drafted, and a token
            that only the target knows is shown to the draft as id 0.
        max_length: the draft's context in tokens; a row that has outgrown it goes on without drafts.
    """

    def __init__(self, model: CausalModel, page_size: int, shared_vocab: int, max_length: int) -> None:
        self.model = model
        self.max_length = max_length
        self.page_size = page_size
        self.shared_vocab = shared_vocab

    def propose(self, state: DecodeState, shape: StepShape, draws: Draws) -> None:
        """Drafts k tokens per running row; see `Proposer.propose`."""
        offsets = torch.arange(-2, 0, device=state.lengths.device)
        positions = state.lengths[:, None] + offsets  # [B, 2]: the last two tokens
        tokens = state.tokens.gather(1, positions.clamp(0, state.tokens.shape[1] - 1))
        # draft j is read off position lengths + j - 2, the last of which must lie in the draft's context
        counts = (self.max_length + 1 - state.lengths).clamp(0, shape.num_drafts)
        state.draft_counts.copy_(counts)
        drafting = (state.running & (counts > 0))[:, None]
        writes = drafting & (positions >= 0)  # a one-token prompt has no token before its last
        for j in range(shape.num_drafts):
            rows = self._rows(state, shape, tokens, positions, writes)
            hidden = self.model.hidden(rows)[:, -1:]
            logits = self.model.logits(hidden, shape.tiling)[..., : self.shared_vocab]
            tokens = self._draw(state, shape, draws, logits, j)[:, None]
            positions = positions[:, -1:] + 1
            writes = drafting & (positions < self.max_length)

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Feeds up to `chunk` committed tokens per running row, all but the last two; see `Proposer.catch_up`."""
        positions = state.draft_lengths[:, None] + torch.arange(chunk, device=state.lengths.device)
        known = (state.lengths - 2).clamp(max=self.max_length)
        writes = state.running[:, None] & (positions < known[:, None])
        tokens = state.tokens.gather(1, positions.clamp(max=state.tokens.shape[1] - 1))
        positions = torch.where(writes, positions, 0)
        self.model.hidden(self._rows(state, shape, tokens, positions, writes))
        state.draft_lengths.add_(writes.sum(dim=1))

    def _draw(self, state: DecodeState, shape: StepShape, draws: Draws, logits: Tensor, j: int) -> Tensor:
        """Draws draft j of every row from logits [B, 1, shared]; records token and law."""
        if shape.sampler == GREEDY:
            token = logits[:, 0].argmax(dim=-1)
        else:
            probs = sampling.law(logits, state.sampler, filtered=shape.sampler == FILTERED)[:, 0]
            token = draws.pick(probs, state.lengths + j, sampling.DRAFT)
            state.draft_probs[:, j, : self.shared_vocab] = probs
        state.draft_tokens[:, j] = token
        return token

    def _rows(
        self, state: DecodeState, shape: StepShape, tokens: Tensor, positions: Tensor, writes: Tensor
    ) -> PassRows:
        return PassRows(
            tokens=torch.where(tokens < self.shared_vocab, tokens, 0),
            positions=positions.clamp_min(0),
            slots=slots_of(state.block_table, positions.clamp_min(0), self.page_size, writes),
            block_table=state.block_table,
            num_blocks=shape.num_blocks,
            tiling=shape.tiling,
        )
