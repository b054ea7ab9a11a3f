"""Base class of proposers with a learned head."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fastspec.kernels.ops import Ops
from fastspec.models.heads.spec import HeadSpec, as_layers, described
from fastspec.proposers.draft_model import VocabMap, drafted_ids, overwrite_draft, pick_block, sample
from fastspec.proposers.interface import ProposerBase
from fastspec.sampling.verify import Draws
from fastspec.shapes import GREEDY, StepShape, Tiling
from fastspec.state import DecodeState


class HeadModel(Protocol):
    """Interface of a learned head that is common to all kinds of heads."""

    @property
    def head(self) -> HeadSpec:
        """Spec of the head: its layers, its tensors, and the target layers that it reads."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the head can draft."""

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """Returns fp32 logits [..., vocab_size] for the head's output [..., hidden]."""

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor, ids: Tensor | None = None) -> None:
        """Writes the id of the largest logit for each hidden state to `out`; see `CausalModel.argmax`."""


Model = TypeVar("Model", bound=HeadModel)


class LearnedDrafts(ProposerBase, Generic[Model]):
    """Proposer with a learned head.

    It reads hidden states of the target in the pass that computes them. So the head's KV cache is always up to date.

    Args:
        model: the head. The first of its `readings` is used.
        ops: ops for everything outside the model.
        vocab_map: int64 [head's ids], the target's id for each id of the head. None: the head has the target's ids.
        mark: function that returns a context which names a pass in a profiler.
        work: result of `ops.sampled_work`.

    Attributes:
        reading: places in the target whose hidden states the head reads, as boundaries between layers. Boundary b is
            after the first b layers.
    """

    features: tuple[int, ...] = ()
    in_pages = True
    article = "a"  # article before the head's name

    def __init__(
        self,
        model: Model,
        ops: Ops,
        vocab_map: Tensor | None = None,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
        work: Any = None,
    ) -> None:
        self.model, self.ops = model, ops
        self._target = model.head.target
        self.read(model.head.readings[0])
        self._mark, self._work = mark, work
        self._map = None if vocab_map is None else VocabMap.of(vocab_map, self._target.vocab_size)

    def read(self, reading: tuple[int, ...]) -> None:
        """Selects the hidden states of the target that the head reads.

        Args:
            reading: boundaries between the target's layers. Boundary b is after the first b layers.
        """
        self.reading, self.features = reading, self.layers_of(reading)

    def layers_of(self, reading: tuple[int, ...]) -> tuple[int, ...]:
        """Converts boundaries between the target's layers to the layer numbers of `Proposer.features`.

        Args:
            reading: the boundaries. Boundary b is after the first b layers.
        """
        return as_layers(reading, self._target.layers)

    def __str__(self) -> str:
        """Describes the proposer in a few words, for messages and `explain()`."""
        ids = f", drafts {self.model.vocab_size} of {self._target.vocab_size} ids" if self._map else ""
        boundaries = f"boundaries {described(self.reading)} of the target"
        return f"{self.article} {self.model.head.found} that reads {boundaries}{ids}"

    def _begin(self, state: DecodeState, k: int) -> Tensor:
        """Sets the number of draft tokens to k for sequences of at least two tokens, and to 0 for others.

        Returns:
            bool [B], True for running sequences that draft.
        """
        known = state.lengths > 1
        torch.mul(known, k, out=state.draft_counts)
        return known & state.running

    def catch_up(self, state: DecodeState, shape: StepShape, chunk: int) -> None:
        """Does nothing, because hidden states are read as soon as they are computed."""

    def _target_ids(self, drafted: Tensor) -> Tensor:
        """Converts drafted ids of the head to ids of the target."""
        return drafted if self._map is None else self._map.places[drafted]

    def _sample(self, state: DecodeState, shape: StepShape, draws: Draws, logits: Tensor, j: int) -> None:
        """Draws draft token j of every sequence. Writes the token and its distribution to `state`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            logits: [B, 1, head's ids].
            j: index of the draft token, from 0.
        """
        logits = logits if self._map is None else self._map.in_target_ids(logits)
        sample(self.ops, state, shape, draws, logits, j, self._work)

    def _draw(
        self,
        state: DecodeState,
        shape: StepShape,
        draws: Draws,
        x: Tensor,
        j: int,
        model: Model | None = None,
    ) -> None:
        """Draws draft token j of every sequence from the head's output. Writes token and distribution to `state`.

        Args:
            state, shape, draws: see `Proposer.propose`.
            x: [B, 1, hidden], output of the head.
            j: index of the draft token, from 0.
            model: computes the logits. None: the head.
        """
        model = model or self.model
        if shape.sampler != GREEDY:
            self._sample(state, shape, draws, model.logits(x, shape.tiling), j)
            return
        limit, ids = drafted_ids(self.model.vocab_size, self._map)
        model.argmax(x[:, 0], limit, shape.tiling, out=state.draft_tokens[:, j], ids=ids)

    def _draw_block(
        self, state: DecodeState, shape: StepShape, draws: Draws, x: Tensor, lookup: tuple[Tensor, Tensor] | None
    ) -> None:
        """Draws all k draft tokens of every sequence from the head's output x [B, k, hidden].

        For `lookup` see `DraftModel.propose`, for other arguments `Proposer.propose`.
        """
        if shape.sampler == GREEDY:
            pick_block(self.model.argmax, state, shape, x, lookup, *drafted_ids(self.model.vocab_size, self._map))
            return
        logits = self.model.logits(x.contiguous(), shape.tiling)
        for j in range(shape.num_drafts):
            self._sample(state, shape, draws, logits[:, j : j + 1].contiguous(), j)
            if lookup is not None:
                overwrite_draft(state, shape, lookup[0][:, j], j < lookup[1], j)
