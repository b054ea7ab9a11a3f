"""Passes over prompts: they feed a prompt's tokens through extra rows, the prefill slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.engine.pass_sizes import PassSizes
from fastspec.engine.scores import PromptScores
from fastspec.engine.step_shapes import StepShapes
from fastspec.graphs.keys import PromptKey
from fastspec.graphs.runner import Runner
from fastspec.shapes import GREEDY
from fastspec.state import BUFFERS, IDLE, RUNNING, DecodeState
from fastspec.step import PromptEnd, StepModules, prefill

# tokens of a prefill pass: a larger one keeps the device busy for longer than its launches take
_LARGEST_CAPTURED = 1024


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlot:
    """Buffers of one row or of several, and the positions up to which their prompts are prefilled.

    Attributes:
        state: the buffers of the slot's rows. K/V of each lie in the pages of the row that it stands for.
        start: int64 [rows], the positions of the target's next pass.
        features: [1, ..], its row of `StepModules.features`; None where nothing is kept.
        prompt_ends: its rows of `StepModules.prompt_ends`; None where there are none.
    """

    state: DecodeState
    start: Tensor
    features: Tensor | None = None
    prompt_ends: PromptEnd | None = None

    @classmethod
    def allocate(
        cls, state: DecodeState, features: Tensor | None = None, rows: int = 1, prompt_ends: PromptEnd | None = None
    ) -> PrefillSlot:
        """An idle slot with room for any `rows` rows of `state` and of `prompt_ends`, and one of `features` [B, ..].

        Of several rows only what passes over prompts read has memory of its own.
        """
        one = state.one_row()
        if rows > 1:
            wide = {name: getattr(one, name) for name in BUFFERS}
            wide = {name: each.expand(rows, *each.shape[1:]) for name, each in wide.items()}
            own = [name for name, each in BUFFERS.items() if each.prefill or name == "emitted"]
            one = DecodeState(**{**wide, **{name: wide[name].clone() for name in own}})
        own_features = None if features is None else torch.zeros_like(features[:1])
        own_ends = None if prompt_ends is None else prompt_ends.like(rows)
        return cls(one, torch.zeros_like(one.lengths), own_features, own_ends)

    def enter(self, state: DecodeState, row: int, start: int, *, running: bool = True, place: int = 0) -> None:
        """Row `place` of the slot stands for row `row` of `state` from now on; passes begin at position `start`.

        A row whose prompt is not prefilled yet idles (`running` is False); the slot runs all the same.
        """
        for name, each in BUFFERS.items():
            if each.prefill:
                getattr(self.state, name)[place].copy_(getattr(state, name)[row])
        if not running:
            self.state.finish[place].fill_(RUNNING)
        self.start[place].fill_(start)

    def leave(self, state: DecodeState, row: int, place: int = 0) -> None:
        """Copies back what passes of a draft changed; the slot's row is idle then."""
        state.draft_lengths[row].copy_(self.state.draft_lengths[place])
        self.state.finish[place].fill_(IDLE)


@dataclass(frozen=True, slots=True, eq=False)
class PromptPasses:
    """Launches passes over prompts, or captures and replays them.

    Attributes:
        modules: models and proposer.
        state: the device buffers of the rows.
        runner: launches passes, or replays what it captured.
        sizes: sizes of the passes.
        shapes: shapes of the passes.
        slots: the prefill slots, by the number of prompts that share a pass.
    """

    modules: StepModules
    state: DecodeState
    runner: Runner
    sizes: PassSizes
    shapes: StepShapes
    slots: Mapping[int, PrefillSlot]

    @classmethod
    def allocate(
        cls, modules: StepModules, state: DecodeState, runner: Runner, sizes: PassSizes, shapes: StepShapes
    ) -> PromptPasses:
        """Allocates the slots that passes of these sizes need, on the current stream."""
        numbers = {1, *map(sizes.prompts_per_pass, sizes.chunks)}
        slots = {n: PrefillSlot.allocate(state, modules.features, n, modules.prompt_ends) for n in numbers}
        return cls(modules, state, runner, sizes, shapes, slots)

    def takes_whole(self, prompt: int) -> bool:
        """True if a prompt of so many tokens is prefilled whole, so that its first token comes from the last pass."""
        return self.modules.prompt_ends is not None and prompt > self.modules.prompt_ends.threshold

    @property
    def reads_prompts(self) -> bool:
        """True if the proposer reads prompts in passes of its own, for example a draft model."""
        return self.modules.proposer is not None and self.modules.proposer.max_length > 0

    @property
    def _readers(self) -> tuple[bool, ...]:
        """Models with passes over prompts: False for the target, True for the draft."""
        return (False, True) if self.reads_prompts else (False,)

    def capture(self) -> None:
        """Captures the passes over prompts that are replayed."""
        for chunk in (chunk for chunk in reversed(self.sizes.chunks) if chunk <= _LARGEST_CAPTURED):
            for draft, rows in itertools.product(
                self._readers, sorted({1, self.sizes.prompts_per_pass(chunk)}, reverse=True)
            ):
                key, body = PromptKey(chunk, draft, rows), self.body(chunk, chunk, draft=draft, rows=rows)
                self.runner.capture(key, body, self.slots[rows].state.all_idle)

    def bodies(self) -> list[Callable[[], None]]:
        """Returns one pass of each kind, for the compiler."""
        return [
            self.body(chunk, chunk, draft=draft, rows=rows)
            for chunk in self.sizes.chunks
            for draft, rows in itertools.product(self._readers, {1, self.sizes.prompts_per_pass(chunk)})
        ]

    def feed_row(
        self,
        row: int,
        start: int,
        chunks: Iterable[int],
        *,
        draft: bool,
        running: bool = True,
        first: bool = True,
        scores: PromptScores | None = None,
    ) -> None:
        """Queues passes over a row's tokens from position `start` on: of the target, or of the proposer.

        The first pass of a size is launched by the host; later ones are replayed.

        Args:
            row: of the state.
            start: position of the first token.
            chunks: sizes of the passes, one after the other.
            draft: passes of the proposer, not of the target.
            running: the row runs already; if it has ended meanwhile, nothing is written.
            first: no pass of this prompt has been queued yet.
            scores: takes log-probabilities of the prompt's tokens. Such passes are launched by the host.
        """
        slot = self.slots[1]
        slot.enter(self.state, row, start, running=running)
        kept = None if draft else slot.features
        if kept is not None and first:
            kept.zero_()  # those of the prompt that was in this slot before
        for chunk in chunks:
            start += chunk
            if scores is None or draft:
                self._run_pass(start, chunk, draft)
            else:
                hidden = self._feed(slot, start, chunk)
                scores.add(self.modules.target, hidden, start - chunk, self.shapes.tiling)
        if kept is not None and self.modules.features is not None:
            self.modules.features[row].copy_(kept[0])
        self._leave(slot, row, draft=draft)

    def feed_rows(self, starts: Mapping[int, int], chunk: int, *, draft: bool, running: bool = True) -> None:
        """Queues one pass over a chunk of each of several rows, as many as may share a pass at most.

        Args:
            starts: row of the state -> position of its first token.
            chunk: tokens of each row.
            draft, running: as of `feed_row`.
        """
        slot = self.slots[rows := self.sizes.prompts_per_pass(chunk) if len(starts) > 1 else 1]
        for place, (row, start) in enumerate(starts.items()):
            slot.enter(self.state, row, start, running=running, place=place)
        self._run_pass(max(starts.values()) + chunk, chunk, draft, rows)
        for place, row in enumerate(starts):
            self._leave(slot, row, place, draft=draft)

    def _leave(self, slot: PrefillSlot, row: int, place: int = 0, *, draft: bool) -> None:
        """A row leaves a slot, and takes along what the target's last pass left for `first_token_step`."""
        if slot.prompt_ends is not None and self.modules.prompt_ends is not None and not draft:
            self.modules.prompt_ends.copy(row, slot.prompt_ends, place)
        slot.leave(self.state, row, place)

    def _run_pass(self, upto: int, chunk: int, draft: bool, rows: int = 1) -> None:
        """Replays such a pass, or launches and then captures it."""
        key, body = PromptKey(chunk, draft, rows), self.body(upto, chunk, draft=draft, rows=rows)
        if self.runner.static and chunk > _LARGEST_CAPTURED:
            body()
        elif self.runner.ready(key):
            self.runner.run(key, body)
        else:
            body()
            self.runner.capture(key, body, self.slots[rows].state.all_idle, warm=True)

    def body(self, upto: int, chunk: int, *, draft: bool, rows: int = 1) -> Callable[[], None]:
        """A pass over the next `chunk` tokens of each row of a slot, which end before position `upto`."""
        shape, slot, proposer = self.shapes.chunk(upto, chunk, GREEDY), self.slots[rows], self.modules.proposer

        def feed() -> None:
            self._feed(slot, upto, chunk)

        if not draft:
            return feed
        assert proposer is not None, "there is something to feed"
        return lambda: proposer.catch_up(slot.state, shape, chunk)

    def _feed(self, slot: PrefillSlot, upto: int, chunk: int) -> Tensor:
        """Launches a pass of the target over the next `chunk` tokens of a slot; returns its hidden states."""
        shape = self.shapes.chunk(upto, chunk, GREEDY)
        hidden = prefill(self.modules, slot.state, shape, slot.start, chunk, slot.features, slot.prompt_ends)
        slot.start.add_(chunk)
        return hidden
