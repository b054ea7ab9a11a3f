"""The proposer of an EAGLE-3 head: one pass a draft, each over one position and its own last feature."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.ops import Ops
from fastspec.models.heads.boundaries import as_layers, described
from fastspec.models.heads.eagle3 import Eagle3
from fastspec.proposers.draft_model import VocabMap, take
from fastspec.sampling.verify import Draws
from fastspec.shapes import GREEDY, ForwardBatch, StepShape, keep_draft_probs, purpose_of
from fastspec.state import DecodeState

NO_LIMIT = 2**31 - 1  # a row's own limit keeps it within the pages it has


class Eagle3Drafts:
    """Drafts with an EAGLE-3 head.

    At the end of every step, plain ones as well, and in every pass over a prompt, it takes in the target's hidden
    states: K and V of its layers, at the positions that count now. They take the place of those that drafting left
    there, from features of its own. So its cache is whole at any time, and drafts may stop and go on.

    Args:
        model: the head.
        ops: implementations of what is not the model's.
        readings: which hidden states of the target it reads, as boundaries; see `HeadSpec`. The first until one is
            chosen.
        sample: ids of a text on which they may be tried.
        vocab_map: int64 [head's ids], the target's id of each; None: they are the target's ids.
        mark: names a pass to a profiler while it is entered.
        work: from `ops.sampled_work`.
    """

    deterministic = False
    max_length = 0

    def __init__(
        self,
        model: Eagle3,
        ops: Ops,
        readings: tuple[tuple[int, ...], ...],
        sample: tuple[int, ...] = (),
        vocab_map: Tensor | None = None,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        work: Any = None,
    ) -> None:
        self.model, self.ops = model, ops
        self.kept = model.head.kept
        self.readings, self.sample = readings, sample
        self._target = model.head.target
        self._mark, self._work = mark, work
        self._map = None if vocab_map is None else VocabMap.of(vocab_map, self._target.vocab_size)
        self.features = self.layers_of(readings[0])

    def read(self, reading: tuple[int, ...]) -> None:
        """Reads these hidden states of the target from now on, and no others any more."""
        self.readings, self.features = (reading,), self.layers_of(reading)

    def layers_of(self, reading: tuple[int, ...]) -> tuple[int, ...]:
        """A reading as the target's layers, see `Proposer.features`."""
        return as_layers(reading, self._target.layers)

    def first_drafts(self, features: Tensor, rows: ForwardBatch) -> Tensor:
        """The first draft behind every place of rows [B, Q]: int64 [B, Q], in the target's ids; see `HasReadings`."""
        x = self.model.drafted(self.model.condense(features, rows.tiling), rows)
        flat = x.view(-1, 1, x.shape[-1])
        ids = self.model.logits(flat, rows.tiling).argmax(-1).view(rows.ids.shape)
        return ids if self._map is None else self._map.places[ids]

    def __str__(self) -> str:
        """For people."""
        drafted = self.model.vocab_size
        ids = f", drafts {drafted} of {self._target.vocab_size} ids" if self._map else ""
        return f"an {self.model.head.found} that reads boundaries {described(self.readings[0])} of the target{ids}"

    def take_features(self, state: DecodeState, shape: StepShape, features: Tensor, rows: ForwardBatch) -> Tensor:
        """As `FeatureReader.take_features`; g of every position is returned, that of the newest is kept."""
        g = self.model.condense(features, rows.tiling)
        self.model.absorb(g, rows)
        return g

    def propose(
        self,
        state: DecodeState,
        shape: StepShape,
        draws: Draws,
        given: tuple[Tensor, Tensor] | None = None,
        *,
        features: Tensor,
    ) -> None:
        """Drafts k tokens per running row that has one position at least behind it; see `Proposer.propose`.

        Args:
            state, shape, draws: as there.
            given: as `DraftModel.propose` has it.
            features: [B, hidden], what `take_features` left of each row's newest position.
        """
        state.draft_counts.copy_(torch.where(state.lengths > 1, shape.num_drafts, 0))
        g = features[:, None]
        for j in range(shape.num_drafts):
            with self._mark(f"draft[{j}]"):
                x = self.model.drafted(g, self._fed(state, shape, j))
                self._draw(state, shape, draws, x, j)
                if given is not None:
                    take(state, shape, given[0][:, j], j < given[1], j)
                g = self.model.feature(x)

    def _fed(self, state: DecodeState, shape: StepShape, j: int) -> ForwardBatch:
        """Position lengths - 2 + j of every row, and the token that follows it."""
        ids, positions, write_mask = self.ops.feed_rows(
            state.tokens,
            state.lengths,
            state.finish,
            state.draft_tokens,
            first=j - 1,
            queries=1,
            limit=NO_LIMIT,
            vocab=self._target.vocab_size,
        )
        known = write_mask & (state.lengths > 1)[:, None]
        return ForwardBatch(
            ids,
            (positions - 1).clamp_min(0),
            known,
            state.block_table,
            shape.num_blocks,
            shape.tiling,
            shape.first_block,
        )

    def _draw(self, state: DecodeState, shape: StepShape, draws: Draws, x: Tensor, j: int) -> None:
        """Draws draft j of every row from hidden states [B, 1, hidden]; records token and distribution."""
        model = self.model
        if shape.sampler == GREEDY:
            drafts = state.draft_tokens[:, j]
            model.argmax(x[:, 0], model.vocab_size, shape.tiling, out=drafts)
            if self._map is not None:
                drafts.copy_(self._map.places[drafts])
            return
        logits = model.logits(x, shape.tiling)
        self.ops.sampled_draw(
            logits if self._map is None else self._map.in_target_ids(logits),
            state,
            j,
            self._work,
            purpose=purpose_of(shape),
            keep_draft_probs=keep_draft_probs(shape),
            draws=draws,
        )

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """There is nothing left to take in."""
        return
