"""Prefill passes: models read prompts through separate buffers, the prefill slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.engine.pass_sizes import PassSizes
from fastspec.engine.scores import PromptScores
from fastspec.engine.step_shapes import StepShapes
from fastspec.graphs.keys import PromptKey
from fastspec.graphs.runner import Runner
from fastspec.shapes import GREEDY
from fastspec.state import BUFFERS, IDLE, RUNNING, DecodeState, send
from fastspec.step import PromptEnd, StepModules, prefill


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlot:
    """Buffers of the rows of a prefill pass. They are separate from the buffers of the batch slots.

    Attributes:
        state: buffers of the rows. K and V are written to the KV cache pages of the requests whose prompts are fed.
        start: int64 [rows], first position of the target's next pass.
        features: [1, ..], hidden states for the proposer, to be copied to `StepModules.features`. None: the proposer
            keeps none.
        prompt_ends: last hidden states of prompts, to be copied to `StepModules.prompt_ends`. None: they are not kept.
    """

    state: DecodeState
    start: Tensor
    features: Tensor | None = None
    prompt_ends: PromptEnd | None = None

    @classmethod
    def allocate(
        cls, state: DecodeState, features: Tensor | None = None, rows: int = 1, prompt_ends: PromptEnd | None = None
    ) -> PrefillSlot:
        """Allocates an idle prefill slot of `rows` rows.

        With several rows, only the buffers that prefill passes use have separate memory for each row.

        Args:
            state: buffers of the batch slots. The new buffers have the same widths.
            features: [B, ..], `StepModules.features`. The slot gets a buffer for one row. None: no buffer.
            rows: number of rows of the slot.
            prompt_ends: `StepModules.prompt_ends`. The slot gets buffers for its rows. None: no buffers.
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

    def enter(self, state: DecodeState, row: int, start: int, *, running: bool = True) -> None:
        """Copies batch slot `row` of `state` to this prefill slot's only row, so that passes can feed its tokens.

        Args:
            state: buffers of the batch slots.
            row: index of the batch slot.
            start: first position of the passes.
            running: False if the batch slot is marked as idle, because its prompt is still being prefilled. The row of
                the prefill slot is then marked as running.
        """
        for name, each in BUFFERS.items():
            if each.prefill:
                getattr(self.state, name)[0].copy_(getattr(state, name)[row])
        if not running:
            self.state.finish.fill_(RUNNING)
        self.start.fill_(start)

    def enter_blocks(self, state: DecodeState, rows: Tensor, starts: Tensor, *, running: bool = True) -> None:
        """Copies batch slots of `state` to rows of this prefill slot: one row for each block of tokens.

        The first rows are used. The other rows of the prefill slot become idle.

        Args:
            state: buffers of the batch slots.
            rows: int64 [blocks], index of the batch slot to which each block belongs. A batch slot may have several
                blocks.
            starts: int64 [blocks], first position of each block, for target and draft.
            running: see `enter`.
        """
        blocks = len(rows)
        for name, each in BUFFERS.items():
            if each.prefill:
                torch.index_select(getattr(state, name), 0, rows, out=getattr(self.state, name)[:blocks])
        if not running:
            self.state.finish[:blocks].fill_(RUNNING)
        self.state.finish[blocks:].fill_(IDLE)
        self.start[:blocks].copy_(starts)
        self.state.draft_lengths[:blocks].copy_(starts)

    def leave(self, state: DecodeState, row: int) -> None:
        """Copies the number of tokens that the draft has read to batch slot `row` of `state`.

        Afterwards this prefill slot is idle.
        """
        state.draft_lengths[row].copy_(self.state.draft_lengths[0])
        self.state.finish.fill_(IDLE)

    def first(self, rows: int) -> PrefillSlot:
        """Returns a prefill slot with views of the first `rows` rows, and without features."""
        ends = self.prompt_ends and self.prompt_ends.first(rows)
        return PrefillSlot(self.state.rows(0, rows), self.start[:rows], None, ends)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of one prompt, to be fed in a prefill pass over several prompts.

    Attributes:
        row: index of the prompt's batch slot.
        start: position of the first of these tokens.
        tokens: number of tokens.
    """

    row: int
    start: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptPasses:
    """Launches prefill passes, or captures and replays them as CUDA graphs.

    Attributes:
        modules: models and proposer.
        state: the device buffers of all batch slots.
        runner: launches passes, or replays their CUDA graphs.
        sizes: sizes of the passes.
        shapes: makes the shapes of the passes.
        slots: number of rows -> prefill slot. Passes over one prompt use 1 row. Passes over several prompts use one
            row for each block of tokens.
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
        """Allocates the prefill slots for passes of these sizes, on the current stream."""
        slots = {1: PrefillSlot.allocate(state, modules.features, prompt_ends=modules.prompt_ends)}
        if sizes.shared:  # one shared pass runs at a time, so passes of all sizes use the same memory
            largest = PrefillSlot.allocate(state, None, sizes.shared[-1], modules.prompt_ends)
            slots |= {blocks: largest.first(blocks) for blocks in sizes.shared}
        return cls(modules, state, runner, sizes, shapes, slots)

    def takes_whole(self, prompt: int) -> bool:
        """True if prefill passes feed all tokens of a prompt of `prompt` tokens, including the last token.

        The first new token is then computed from the last prefill pass.
        """
        return self.modules.prompt_ends is not None and prompt > self.modules.prompt_ends.threshold

    @property
    def reads_prompts(self) -> bool:
        """True if the proposer has its own prefill passes, for example those of a draft model."""
        return self.modules.proposer is not None and self.modules.proposer.max_length > 0

    @property
    def _readers(self) -> tuple[bool, ...]:
        """Values of the argument `draft` for which there are prefill passes: False is the target, True the draft."""
        return (False, True) if self.reads_prompts else (False,)

    @property
    def _passes(self) -> list[tuple[int, int]]:
        """Sizes (tokens per row, number of rows) that prefill passes may have."""
        return [(chunk, 1) for chunk in self.sizes.chunks] + [(self.sizes.block, rows) for rows in self.sizes.shared]

    def capture(self) -> None:
        """Captures prefill passes as CUDA graphs, the largest first; see `PassSizes.captured`."""
        for chunk, rows in sorted(self._passes, key=lambda sizes: -sizes[0] * sizes[1]):
            for draft in self._readers:
                if self.sizes.captured(chunk * rows):
                    key, body = PromptKey(chunk, draft, rows), self.body(chunk, chunk, draft=draft, rows=rows)
                    self.runner.capture(key, body, self.slots[rows].state.all_idle)

    def bodies(self) -> list[Callable[[], None]]:
        """Returns one function for each size of pass, which launches it, so that its kernels can be compiled."""
        return [
            self.body(chunk, chunk, draft=draft, rows=rows) for chunk, rows in self._passes for draft in self._readers
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
        """Queues prefill passes over tokens of one request.

        The first pass of each size is launched without a CUDA graph and then captured. Later passes are replayed.

        Args:
            row: index of the request's batch slot.
            start: position of the first token to feed.
            chunks: numbers of tokens of the passes, in order.
            draft: True for passes of the proposer, False for passes of the target.
            running: True if the request already decodes. If it has ended meanwhile, the passes write nothing.
            first: True if no pass of this prompt was queued before.
            scores: collects log-probabilities of the prompt's tokens. Such passes are not captured. None: they are not
                needed.
        """
        slot = self.slots[1]
        slot.enter(self.state, row, start, running=running)
        kept = None if draft else slot.features
        if kept is not None and first:
            kept.zero_()  # clears the features of the slot's previous prompt
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

    def feed_rows(self, parts: Sequence[PromptPart], *, draft: bool, running: bool = True) -> None:
        """Queues one prefill pass over tokens of several requests.

        Each request gets the same bits as from passes over its tokens alone. The tokens are cut into blocks. Each block
        is one row of the pass, with the positions of its tokens and the block table of its request. All K/V of a layer
        are written before its attention reads them.

        Args:
            parts: tokens to feed: at most one part per request, and at most `sizes.most_blocks` blocks together.
            draft, running: see `feed_row`.
        """
        block, lasts, lines = self.sizes.block, list[int](), list[tuple[int, int]]()
        for part in parts:
            lines += [(part.row, start) for start in range(part.start, part.start + part.tokens, block)]
            lasts.append(len(lines) - 1)
        slot = self.slots[rows := self.sizes.shared_blocks(len(lines), draft=draft)]
        numbers = [row for row, _ in lines] + [start for _, start in lines] + [part.row for part in parts] + lasts
        sent = send(numbers, torch.int64, self.state.lengths.device)
        owners, starts, own, last = sent.split([len(lines), len(lines), len(parts), len(parts)])
        slot.enter_blocks(self.state, owners, starts, running=running)
        self._run_pass(max(part.start + part.tokens for part in parts), block, draft, rows)
        if draft:
            self.state.draft_lengths.index_copy_(0, own, slot.state.draft_lengths[last])
        elif slot.prompt_ends is not None and self.modules.prompt_ends is not None:
            self.modules.prompt_ends.copy_rows(own, slot.prompt_ends, last)
        slot.state.finish.fill_(IDLE)

    def _leave(self, slot: PrefillSlot, row: int, *, draft: bool) -> None:
        """Copies results of prefill passes from a prefill slot to batch slot `row`, and makes the prefill slot idle.

        After passes of the target, the results include its last hidden state, for `first_token_step`.
        """
        if slot.prompt_ends is not None and self.modules.prompt_ends is not None and not draft:
            self.modules.prompt_ends.copy(row, slot.prompt_ends, 0)
        slot.leave(self.state, row)

    def _run_pass(self, upto: int, chunk: int, draft: bool, rows: int = 1) -> None:
        """Replays a prefill pass if it is captured. Otherwise launches it, and captures it if it is to be captured.

        For arguments see `body`.
        """
        key, body = PromptKey(chunk, draft, rows), self.body(upto, chunk, draft=draft, rows=rows)
        if self.runner.static and not self.sizes.captured(chunk * rows):
            body()
        elif self.runner.ready(key):
            self.runner.run(key, body)
        else:
            body()
            self.runner.capture(key, body, self.slots[rows].state.all_idle, warm=True)

    def body(self, upto: int, chunk: int, *, draft: bool, rows: int = 1) -> Callable[[], None]:
        """Returns a function that launches a prefill pass over the next `chunk` tokens of each row of a prefill slot.

        Args:
            upto: upper limit (exclusive) of the positions of these tokens.
            chunk: number of tokens per row.
            draft: True for a pass of the proposer, False for a pass of the target.
            rows: number of rows, which is the key of the prefill slot in `slots`.
        """
        shape, slot, proposer = self.shapes.chunk(upto, chunk, GREEDY), self.slots[rows], self.modules.proposer

        def feed() -> None:
            self._feed(slot, upto, chunk)

        if not draft:
            return feed
        assert proposer is not None, "there is something to feed"
        return lambda: proposer.catch_up(slot.state, shape, chunk)

    def _feed(self, slot: PrefillSlot, upto: int, chunk: int) -> Tensor:
        """Launches a prefill pass of the target over the next `chunk` tokens of each row of a prefill slot.

        Args:
            slot: the prefill slot.
            upto: upper limit (exclusive) of the positions of these tokens.
            chunk: number of tokens per row.

        Returns:
            The last hidden states [rows, chunk, hidden].
        """
        shape = self.shapes.chunk(upto, chunk, GREEDY)
        hidden = prefill(self.modules, slot.state, shape, slot.start, chunk, slot.features, slot.prompt_ends)
        slot.start.add_(chunk)
        return hidden
