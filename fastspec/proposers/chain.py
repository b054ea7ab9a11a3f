"""Proposers whose head drafts one token per pass. Each pass reads the hidden state of the previous pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels.ops import Ops
from fastspec.models.assistant import Assistant, Places, places_of
from fastspec.models.heads.spec import HeadSpec
from fastspec.proposers.draft_model import overwrite_draft
from fastspec.proposers.learned import LearnedDrafts
from fastspec.sampling.verify import Draws
from fastspec.shapes import ForwardBatch, StepShape, Tiling
from fastspec.state import DecodeState


class ChainHead(Protocol):
    """Passes of a head that can read its own hidden states (g) instead of the target's: `Eagle3` and `Mtp`."""

    @property
    def head(self) -> HeadSpec:
        """Sizes and arithmetic of the head."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that it can draft."""

    def condense(self, features: Tensor, tiling: Tiling) -> Tensor:
        """Returns the head's input g [B, Q, hidden] for the target's hidden states [B, Q, layers, target's hidden]."""

    def absorb(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes the head's K and V at the positions of `rows`, without computing its output.

        Args:
            g: [B, Q, hidden], the head's input at these positions.
            rows: positions. `rows.ids` are the tokens after them: token i + 1 at position i.

        Returns:
            [B, Q, *head.kept], from which `resumed` computes the result of `drafted`.
        """

    def drafted(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes K and V as `absorb` does, and computes the head's output [B, Q, hidden].

        It is the input of `logits`, `argmax` and `feature`.
        """

    def resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """Returns the head's output, see `drafted`, from the result of `absorb` at these positions.

        `rows.ids` are ignored.
        """

    def feature(self, x: Tensor) -> Tensor:
        """Returns the head's input g at the next position, from its output x, see `drafted`."""

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """Returns fp32 logits [..., vocab_size] for outputs [..., hidden] of `drafted`."""

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor) -> None:
        """Writes the ids of the largest logits for outputs of `drafted`; see `CausalModel.argmax`."""


class ChainDrafts(LearnedDrafts[ChainHead]):
    """Proposer with a head that makes each draft from the previous one.

    At the end of every step and prefill pass, the head's K and V at all committed positions are computed from the
    target's hidden states. This is done after steps without drafts, too. These K and V replace those from drafting,
    which were computed from the head's own hidden states. So the head's cache is always up to date, and drafting may
    pause and resume.

    Args:
        model, ops, vocab_map, mark, work: see `LearnedDrafts`.
        sample: token ids of a text with which `choose_reading` compares the head's readings.

    Attributes:
        readings: sets of the target's hidden states that the head may read, see `HeadSpec.readings`.
    """

    def __init__(
        self,
        model: ChainHead,
        ops: Ops,
        vocab_map: Tensor | None = None,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        work: Any = None,
        *,
        sample: tuple[int, ...] = (),
    ) -> None:
        super().__init__(model, ops, vocab_map, mark, work)
        self.kept = model.head.kept
        self.readings, self.sample = model.head.readings, sample

    def read(self, reading: tuple[int, ...]) -> None:
        """Selects the hidden states of the target to read, see `LearnedDrafts.read`. The choice is final."""
        super().read(reading)
        self.readings = (reading,)

    def first_drafts(self, features: Tensor, rows: ForwardBatch) -> Tensor:
        """Returns the head's first draft after every position, int64 [B, Q] of target ids, for `choose_reading`.

        Args:
            features: [B, Q, layers, hidden], hidden states of the target at the positions of `rows`.
            rows: positions, with the tokens after them.
        """
        x = self.model.drafted(self.model.condense(features, rows.tiling), rows)
        flat = x.view(-1, 1, x.shape[-1])
        ids = self.model.logits(flat, rows.tiling).argmax(-1).view(rows.ids.shape)
        return self._target_ids(ids)

    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes the head's K and V at these positions, see `FeatureReader`.

        Returns:
            For each position the result of `ChainHead.absorb`, from which the first draft after it is computed.
        """
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
        """Makes k drafts for each running row with at least one position; see `Proposer.propose`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            lookup: see `DraftModel.propose`.
            features: [B, *kept], result of `take_features` for each row's newest position. From it the first draft
                needs only the attention of the last layer, and what follows it.
        """
        k, model = shape.num_drafts, self.model
        known = self._begin(state, k)[:, None]
        places = torch.arange(-2, k - 2, device=known.device)[:, None] + state.lengths
        places = places.clamp_min_(0)[..., None]
        # zeros: while kernels are only compiled, no ids are written, but ids are used as indices
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
        """Returns the input of the pass that makes draft j: position lengths - 2 + j and the token after it.

        That token is draft j - 1. For j = 0 no token is needed.

        Args:
            state, shape: see `propose`.
            j: number of the draft, from 0.
            positions: int64 [B, 1], these positions.
            known: bool [B, 1], True for running rows that draft.
        """
        ids = state.draft_tokens[:, max(j - 1, 0)][:, None].contiguous()
        return shape.forward_batch(ids, positions, known, state.block_table)


class AssistantDrafts(LearnedDrafts[Assistant]):
    """Drafts with an assistant, one pass per draft. It has no cache: all passes of a step read the target's keys.

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
        """Returns the positions from which the assistant attends, and each row's last token [B, 1]."""
        positions = (state.lengths[:, None] - 1).clamp_min(0)
        rows = shape.forward_batch(
            state.tokens.gather(1, positions), positions, state.running[:, None], state.block_table
        )
        return places_of(rows), rows.ids
