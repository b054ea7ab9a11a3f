"""Proposers whose head makes one draft token per pass. Each pass reads the hidden state of the previous pass."""

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
    """Interface of heads that can read their own hidden states instead of the target's: `Eagle3` and `Mtp`."""

    @property
    def head(self) -> HeadSpec:
        """Spec of the head: its layers, its tensors, and the target layers that it reads."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the head can draft."""

    def condense(self, features: Tensor, tiling: Tiling) -> Tensor:
        """Computes the head's input g, [B, Q, hidden], from hidden states of the target.

        Args:
            features: [B, Q, layers, target's hidden], hidden states of some layers of the target.
            tiling: tile shapes of the matrix product.
        """

    def absorb(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes the head's K and V at the positions of `rows`, without computing its output.

        Args:
            g: [B, Q, hidden], the head's input at these positions.
            rows: batch of Q positions per sequence. `rows.ids` are the tokens after these positions: token i + 1 at
                position i.

        Returns:
            [B, Q, *head.kept], intermediate results from which `resumed` computes the head's output.
        """

    def drafted(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes the head's K and V, and computes its output [B, Q, hidden].

        The output is the input of `logits`, `argmax` and `feature`. For arguments see `absorb`.
        """

    def resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """Returns the head's output, see `drafted`, without computing K and V again.

        Args:
            made: result of `absorb` at the positions of `rows`.
            rows: batch of positions. `rows.ids` are ignored.
        """

    def feature(self, x: Tensor) -> Tensor:
        """Returns the head's input g for the next position, [B, Q, hidden], from its output x, see `drafted`."""

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """Returns fp32 logits [..., vocab_size] for outputs [..., hidden] of `drafted`."""

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None = None) -> None:
        """Writes the id of the largest logit for each output of `drafted` to `out`; see `CausalModel.argmax`."""


class ChainDrafts(LearnedDrafts[ChainHead]):
    """Proposer with a head that makes each draft token from the previous one.

    At the end of every step and prefill pass, the head's K and V of committed tokens are computed from the target's
    hidden states. This is done after steps without draft tokens, too. K and V that were written while drafting came
    from the head's own hidden states. They are overwritten. So the head's KV cache is always up to date, and drafting
    may pause and resume.

    Args:
        model, ops, vocab_map, mark, work: see `LearnedDrafts`.
        sample: token ids of a text with which `choose_reading` compares the head's readings.

    Attributes:
        readings: possible choices of target layers whose hidden states the head reads, see `HeadSpec.readings`.
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
        """Selects the target layers whose hidden states the head reads, see `LearnedDrafts.read`.

        Afterwards `readings` has only this choice.
        """
        super().read(reading)
        self.readings = (reading,)

    def first_drafts(self, features: Tensor, rows: ForwardBatch) -> Tensor:
        """Returns the head's first draft token after every position, for `choose_reading`.

        Args:
            features: [B, Q, layers, hidden], hidden states of the target at the positions of `rows`.
            rows: batch of Q positions per sequence. `rows.ids` are the tokens after these positions.

        Returns:
            int64 [B, Q], ids of the target.
        """
        x = self.model.drafted(self.model.condense(features, rows.tiling), rows)
        flat = x.view(-1, 1, x.shape[-1])
        ids = self.model.logits(flat, rows.tiling).argmax(-1).view(rows.ids.shape)
        return self._target_ids(ids)

    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes the head's K and V at the positions of `rows`, see `FeatureReader.take_features`.

        Returns:
            The result of `ChainHead.absorb`. The first draft token after each position is computed from it.
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
        """Makes k draft tokens for each running sequence of at least two tokens; see `Proposer.propose`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            lookup: see `DraftModel.propose`.
            features: [B, *kept], result of `take_features` for the newest position of each sequence. The pass for the
                first draft token continues from it with the attention of the head's last layer.
        """
        k, model = shape.num_drafts, self.model
        known = self._begin(state, k)[:, None]
        places = torch.arange(-2, k - 2, device=known.device)[:, None] + state.lengths
        places = places.clamp_min_(0)[..., None]
        x = features[:, None]
        for j in range(k):
            with self._mark(f"draft[{j}]"):
                rows = self._inputs(state, shape, j, places[j], known)
                x = model.drafted(model.feature(x), rows) if j else model.resumed(x, rows)
                self._draw(state, shape, draws, x, j)
                if lookup is not None:
                    overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)

    def _inputs(self, state: DecodeState, shape: StepShape, j: int, positions: Tensor, known: Tensor) -> ForwardBatch:
        """Returns the input of the pass that makes draft token j: position lengths - 2 + j, and the token after it.

        The token after it is draft token j - 1. For j = 0 no token is needed.

        Args:
            state, shape: see `propose`.
            j: index of the draft token, from 0.
            positions: int64 [B, 1], the position lengths - 2 + j of each sequence.
            known: bool [B, 1], True for running sequences that draft.
        """
        ids = state.draft_tokens[:, max(j - 1, 0)][:, None].contiguous()
        return shape.forward_batch(ids, positions, known, state.block_table)


class AssistantDrafts(LearnedDrafts[Assistant]):
    """Drafts with an assistant (a head without its own KV cache), one pass per draft token.

    All passes of a step attend to K and V of the target.

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
        """Makes k draft tokens for each running sequence of at least two tokens; see `Proposer.propose`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            lookup: see `DraftModel.propose`.
            features: [B, target's hidden], the target's hidden state at the newest position of each sequence.
        """
        k, model = shape.num_drafts, self.model
        self._begin(state, k)
        places, ids = self._places(state, shape)
        h = features[:, None]
        for j in range(k):
            with self._mark(f"draft[{j}]"):
                x = model.drafted(h, ids, places)
                self._draw(state, shape, draws, x, j)
                if lookup is not None:
                    overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)
                ids, h = state.draft_tokens[:, j : j + 1], model.feature(x, shape.tiling)

    def _places(self, state: DecodeState, shape: StepShape) -> tuple[Places, Tensor]:
        """Returns (positions from which the assistant attends, last token of each sequence [B, 1])."""
        positions = (state.lengths[:, None] - 1).clamp_min(0)
        rows = shape.forward_batch(
            state.tokens.gather(1, positions), positions, state.running[:, None], state.block_table
        )
        return places_of(rows), rows.ids
