"""Proposers whose head drafts one token a pass; each pass reads the hidden state that the pass before it left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from fastspec.kernels.ops import Ops
from fastspec.models.heads.spec import HeadSpec
from fastspec.proposers.draft_model import overwrite_draft
from fastspec.proposers.learned import LearnedDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import GREEDY, ForwardBatch, StepShape, Tiling
from fastspec.state import DecodeState


class ChainHead(Protocol):
    """Passes of a head that can read its own hidden states (g) in place of the target's: `Eagle3` and `Mtp`."""

    @property
    def head(self) -> HeadSpec:
        """Sizes and arithmetic of the head."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that it drafts."""

    def condense(self, features: Tensor, tiling: Tiling) -> Tensor:
        """g [B, Q, hidden], made of the target's hidden states [B, Q, layers, target's hidden]."""

    def absorb(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes K and V of g at the positions of `rows`, whose ids are the next tokens (i + 1 at position i).

        Returns what `resumed` goes on from, [B, Q, *head.kept].
        """

    def drafted(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes K and V as `absorb`; returns what `logits`, `argmax` and `feature` read, [B, Q, hidden]."""

    def resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """Continues from the result of `absorb` at these positions to the result of `drafted`; ignores `rows.ids`."""

    def feature(self, x: Tensor) -> Tensor:
        """g of the next position, made of what `drafted` returned."""

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """fp32 logits [..., vocab_size] of what `drafted` returned."""

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor) -> None:
        """Writes the argmax of what `drafted` returned, as `CausalModel.argmax`."""


class ChainDrafts(LearnedDrafts[ChainHead]):
    """Drafts with a head, each draft from the one before it.

    At the end of every step, also of plain ones, and in every pass over a prompt, it computes K and V of its layers
    from the target's hidden states, at all committed positions. They replace those that drafting has left there, which
    came from the head's own hidden states. So its cache is never behind, and drafting may pause and go on.

    Args:
        model, ops, vocab_map, mark, work: as for `LearnedDrafts`.
        readings: which hidden states of the target it reads, as boundaries; see `HeadSpec`. The first until one is
            chosen.
        sample: ids of a text on which they may be tried.
    """

    def __init__(
        self,
        model: ChainHead,
        ops: Ops,
        readings: tuple[tuple[int, ...], ...],
        sample: tuple[int, ...] = (),
        vocab_map: Tensor | None = None,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        work: Any = None,
    ) -> None:
        super().__init__(model, ops, readings[0], vocab_map, mark, work)
        self.kept = model.head.kept
        self.readings, self.sample = readings, sample

    def read(self, reading: tuple[int, ...]) -> None:
        """Reads these hidden states from now on; leaves no other reading to choose."""
        super().read(reading)
        self.readings = (reading,)

    def first_drafts(self, features: Tensor, rows: ForwardBatch) -> Tensor:
        """Returns the first draft after every place of rows [B, Q], for `choose_reading`: int64 [B, Q], target ids."""
        x = self.model.drafted(self.model.condense(features, rows.tiling), rows)
        flat = x.view(-1, 1, x.shape[-1])
        ids = self.model.logits(flat, rows.tiling).argmax(-1).view(rows.ids.shape)
        return self._target_ids(ids)

    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        """Reads hidden states; returns the entries from which the first draft after each position starts."""
        return self.model.absorb(self.model.condense(features, rows.tiling), rows)

    def propose(
        self,
        state: DecodeState,
        shape: StepShape,
        draws: Draws,
        lookup: tuple[Tensor, Tensor] | None = None,
        *,
        features: Tensor,
    ) -> None:
        """Drafts k tokens per running row that holds at least one position; see `Proposer.propose`.

        Args:
            state, shape, draws: as there.
            lookup: as in `DraftModel.propose`.
            features: [B, *kept], what `take_features` left of each row's newest position: there the first draft needs
                no more than attention and what follows it.
        """
        k, model = shape.num_drafts, self.model
        known = state.lengths > 1
        torch.mul(known, k, out=state.draft_counts)
        known = (known & state.running)[:, None]
        places = torch.arange(-2, k - 2, device=known.device)[:, None] + state.lengths
        places = places.clamp_min_(0)[..., None]
        # zeros: while kernels are only compiled nothing is picked, and ids are looked up all the same
        picks = torch.zeros_like(places[..., 0])
        x = features[:, None]
        for j in range(k):
            with self._mark(f"draft[{j}]"):
                rows = self._inputs(state, shape, j, places[j], known)
                x = model.drafted(model.feature(x), rows) if j else model.resumed(x, rows)
                self._draw(state, shape, draws, x, j, picks[j])
                if lookup is not None:
                    overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)

    def _inputs(self, state: DecodeState, shape: StepShape, j: int, positions: Tensor, known: Tensor) -> ForwardBatch:
        """Position lengths - 2 + j of every row, and the draft that follows it; of the first position no token."""
        ids = state.draft_tokens[:, max(j - 1, 0)][:, None].contiguous()
        return shape.forward_batch(ids, positions, known, state.block_table)

    def _draw(self, state: DecodeState, shape: StepShape, draws: Draws, x: Tensor, j: int, picks: Tensor) -> None:
        """Draws draft j of every row from hidden states [B, 1, hidden]; records token and distribution.

        Args:
            picks: int64 [B], all 0: where to pick ids of the head.
        """
        model = self.model
        if shape.sampler != GREEDY:
            self._sample(state, shape, draws, model.logits(x, shape.tiling), j)
        elif self._map is None:
            model.argmax(x[:, 0], model.vocab_size, shape.tiling, out=state.draft_tokens[:, j])
        else:
            model.argmax(x[:, 0], model.vocab_size, shape.tiling, out=picks)
            torch.index_select(self._map.places, 0, picks, out=state.draft_tokens[:, j])
