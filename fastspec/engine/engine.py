"""The engine: models, state and pages of a generator, and how a step or a prefill pass is launched or captured."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from fastspec.engine.prefill_slot import PrefillSlot
from fastspec.engine.threads import Threads
from fastspec.graphs.keys import PromptKey, StepKey
from fastspec.graphs.results import ResultRing
from fastspec.graphs.runner import Runner
from fastspec.kv_cache.pages import PageTable
from fastspec.kv_cache.prefix import PrefixCache
from fastspec.kv_cache.prefix_states import PrefixStates
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.sampling.rules import REJECTION, Verification
from fastspec.shapes import (
    EARLY_BLOCKS,
    GREEDY,
    KEY_BLOCK,
    MIXED_DRAFTS,
    StepShape,
    Tiling,
    blocks,
    chunks_of,
    step_kinds,
)
from fastspec.state import DecodeState
from fastspec.step import StepModules, prefill, step
from fastspec.torch_settings import shielded, using_threads

_MEANS = 3  # taken of each time that is measured
# tokens of a prefill pass: a larger one keeps the device busy for longer than its launches take
_LARGEST_CAPTURED = 1024
_LEAST_ROOM = 1024  # positions that the smallest captured steps have room for
_ROOM_GROWTH = 4  # the next larger kind of captured steps has room for so many times the positions
_USUAL_LENGTH = 256  # tokens of a row, where a step is timed before there are rows


def _as_measured(seconds: float | None) -> float | None:
    """The time as it was measured: this process is alone."""
    return seconds


def grid_unit_of(chunks: tuple[int, ...], same_bits: tuple[int, ...] | None, exact: bool) -> int:
    """`Engine.grid_unit` of an engine with these fields."""
    return (same_bits or chunks[-1:])[0] if exact else 1


@dataclass(slots=True, eq=False)
class Engine:
    """What a scheduler runs on; lives as long as the generator.

    Attributes:
        modules: models, proposer and work areas of a step.
        state: the device buffers.
        pages: the host's page table over both caches.
        max_drafts: k at most.
        decode_tiling: shapes of a step's matrix products.
        chunks: how many prompt tokens one pass may feed, ascending.
        runner: launches steps, or replays what it captured.
        ring: where steps leave their results.
        verification: how drafts are judged.
        same_bits: sizes of prefill passes that leave the same bits, ascending; None: the largest of `chunks` alone.
        draft_chunks: sizes of a draft model's passes, which all leave the same bits; None: as the target's.
        prefix: the prefix cache; None: every prompt is prefilled whole.
        prefix_states: recurrent states after prefixes; None: there are none, or no prefix cache.
        prefill_budget: prompt tokens for which rows of other calls wait in each step; None: whole prompts.
        mean_weight: elements of one of the target's matrices, in the mean; None: threads stay as torch has them.
        share_seconds: replaces a time that a rank measured by rank 0's, so that all ranks decide alike.
        threads: how many work on a step, on the CPU; None until `choose_threads`, and on other devices.
        sharing: this rank, and how many ranks share the machine and capture the same.
        prefill_batch_tokens: tokens of one pass over several short prompts; 0: each prompt has passes of its own.
        slots: the prefill slots, by how many prompts share a pass.
    """

    modules: StepModules
    state: DecodeState
    pages: PageTable
    max_drafts: int
    decode_tiling: Tiling
    chunks: tuple[int, ...]
    runner: Runner
    ring: ResultRing
    verification: Verification = REJECTION
    same_bits: tuple[int, ...] | None = None
    draft_chunks: tuple[int, ...] | None = None
    prefix: PrefixCache | None = None
    prefix_states: PrefixStates | None = None
    prefill_budget: int | None = None
    mean_weight: float | None = None
    share_seconds: Callable[[float | None], float | None] = _as_measured
    threads: Threads | None = None
    sharing: tuple[int, int] = (0, 1)
    prefill_batch_tokens: int = 0
    slots: dict[int, PrefillSlot] = field(init=False)

    def __post_init__(self) -> None:
        with self.on_device():
            sizes = {1, *map(self.prefill_batch, self.chunks)}
            own = self.modules.features, self.modules.prompt_ends
            self.slots = {n: PrefillSlot.allocate(self.state, own[0], n, own[1]) for n in sizes}

    def prefill_batch(self, chunk: int) -> int:
        """Prompts that share a pass, each with a chunk of that size; 1: they do not."""
        rows = self.prefill_batch_tokens // chunk
        return rows if 1 < rows <= self.state.batch else 1

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context for work on the device: our device and stream, no gradients, none of the caller's settings."""
        threads = self.threads.now if self.threads else None
        with shielded(self.state.lengths.device, threads), torch.inference_mode(), self.runner.on_stream():
            yield

    def shape(self, k: int, sampler: str, top_logprobs: int | None, longest: int, shortest: int = 0) -> StepShape:
        """The shape of a step over rows of at most `longest` tokens and at least `shortest`."""
        positions = longest + k
        if self.runner.static:
            positions = self.room(positions)  # so that few kinds of launches serve all lengths
        lowest = shortest - 2  # a draft model is fed a row's last two tokens, so no position is below this one
        first = EARLY_BLOCKS if lowest >= EARLY_BLOCKS * KEY_BLOCK else 0
        return StepShape(k, sampler, blocks(positions), self.decode_tiling, top_logprobs, self.verification, first)

    def room(self, positions: int) -> int:
        """Positions of a row that a captured step has room for, where at least `positions` are needed.

        Not the most there may be: such a step would launch thousands of programs, most of them idle, and attention
        takes more launches a layer once there are positions after EARLY_BLOCKS.
        """
        room = _LEAST_ROOM
        while room < positions:
            room *= _ROOM_GROWTH
        return room if room + room // 8 < self._max_positions else self._max_positions  # not for a few less

    @property
    def _max_positions(self) -> int:
        """Positions that a step over the longest rows has."""
        return self.state.tokens.shape[1] + self.max_drafts

    def chunk_shape(self, upto: int, chunk: int, sampler: str) -> StepShape:
        """The shape of a pass over one chunk of one row that ends before position `upto`."""
        if self.runner.static:
            upto = self.state.tokens.shape[1]
        return StepShape(0, sampler, blocks(upto), Tiling(chunk, chunk))

    def captured_shape(self, rows: int, shape: StepShape) -> StepShape:
        """The shape itself, or with room for the longest rows where only that step is captured: the same bits."""
        wide = replace(shape, num_blocks=blocks(self._max_positions), first_block=0)
        return wide if not self.ready(rows, shape) and self.ready(rows, wide) else shape

    def bucket(self, rows: int) -> int:
        """Rows that a step runs over so as to reach the first `rows`: a power of two, or all there are."""
        return min(1 << (rows - 1).bit_length(), self.state.batch)

    def buckets(self, max_rows: int) -> list[int]:
        """The buckets of steps of up to `max_rows` rows, ascending."""
        return sorted({self.bucket(rows) for rows in range(1, max_rows + 1)})

    def typical_shape(
        self, k: int, sampler: str, top_logprobs: int | None, longest: int = 0, shortest: int = 0
    ) -> StepShape:
        """The shape of a call's step, for rows of `shortest` to `longest` tokens; uncaptured, for a usual length."""
        if not self.runner.static:
            longest, shortest = min(_USUAL_LENGTH, self.state.tokens.shape[1]), 0
        return self.shape(k, sampler, top_logprobs, longest, shortest)

    def launch(self, rows: int, shape: StepShape) -> int:
        """Queues one step over the first `rows` rows; returns its sequence number in the ring."""
        key, start = StepKey(rows, shape), time.perf_counter()
        sequence = self.ring.count(lambda: self.runner.run(key, self._body(rows, shape)))
        if self.threads:  # the CPU has done the step by now
            self.threads.took((rows, shape.num_drafts, shape.sampler), time.perf_counter() - start)
        return sequence

    def ready(self, rows: int, shape: StepShape) -> bool:
        """Whether such a step can be launched."""
        return self.runner.ready(StepKey(rows, shape))

    def capture(self, rows: int, shape: StepShape) -> None:
        """Makes the runner ready for such a step."""
        self.runner.capture(StepKey(rows, shape), self._body(rows, shape), lambda: self.idle(rows))

    def compile(
        self, steps: Iterable[tuple[int, StepShape]], *, prompts: bool, compilers: Executor | None = None
    ) -> None:
        """Compiles the kernels of these steps, and of the passes over prompts, in parallel and before any is needed.

        Args:
            steps: rows and shape of each. prompts: as well.
            compilers: run Triton's compiler; None: threads do.
        """
        with self.modules.ops.compiling(compilers), self.idle(self.state.batch):
            for rows, shape in steps:
                self._body(rows, shape)()
            for chunk in self.chunks if prompts else ():
                for draft, rows in itertools.product(self._readers, {1, self.prefill_batch(chunk)}):
                    self._pass(chunk, chunk, draft, rows)()

    def capture_prompts(self) -> None:
        """Captures the passes over prompts that are replayed."""
        for chunk in (chunk for chunk in reversed(self.chunks) if chunk <= _LARGEST_CAPTURED):
            for draft, rows in itertools.product(self._readers, sorted({1, self.prefill_batch(chunk)}, reverse=True)):
                key, body = PromptKey(chunk, draft, rows), self._pass(chunk, chunk, draft, rows)
                self.runner.capture(key, body, self.slots[rows].state.all_idle)

    @property
    def exact(self) -> bool:
        """Whether a row's bits are promised to depend on that row alone."""
        return self.decode_tiling.rows is not None

    @property
    def grid_unit(self) -> int:
        """Prefill may start only at positions that are a multiple of this."""
        return grid_unit_of(self.chunks, self.same_bits, self.exact)

    def passes(self, stop: int, start: int = 0, max_tokens: int | None = None, *, draft: bool = False) -> list[int]:
        """Sizes of the target's or the draft's passes over the tokens at positions start..stop-1, see `chunks_of`."""
        own, same = self.draft_chunks if draft else None, self.same_bits or self.chunks[-1:]
        sizes, same = (own or self.chunks, own or same) if self.exact else (self.chunks, self.chunks)
        return chunks_of(sizes, stop, start, same, self.grid_unit, max_tokens)

    def prefill_row(
        self, row: int, start: int, chunks: Iterable[int], *, draft: bool, running: bool = True, first: bool = True
    ) -> None:
        """Queues passes over a row's tokens from position `start` on: of the target, or of what drafts.

        The first pass of a size is launched by the host; later ones are replayed.

        Args:
            row: of the state.
            start: position of the first token.
            chunks: sizes of the passes, one after the other.
            draft: passes of the proposer, not of the target.
            running: the row runs already; if it has ended meanwhile, nothing is written.
            first: no pass of this prompt has been queued yet.
        """
        slot = self.slots[1]
        slot.enter(self.state, row, start, running=running)
        kept = None if draft else slot.features
        if kept is not None and first:
            kept.zero_()  # those of the prompt that was in this slot before
        for chunk in chunks:
            start += chunk
            self._run_pass(start, chunk, draft)
        if kept is not None and self.modules.features is not None:
            self.modules.features[row].copy_(kept[0])
        self._leave(slot, row, draft=draft)

    def prefill_rows(self, starts: Mapping[int, int], chunk: int, *, draft: bool, running: bool = True) -> None:
        """Queues one pass over a chunk of each of several rows, as many as may share a pass at most.

        Args:
            starts: row of the state -> position of its first token.
            chunk: tokens of each row.
            draft, running: as of `prefill_row`.
        """
        slot = self.slots[rows := self.prefill_batch(chunk) if len(starts) > 1 else 1]
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
        key, body = PromptKey(chunk, draft, rows), self._pass(upto, chunk, draft, rows)
        if self.runner.static and chunk > _LARGEST_CAPTURED:
            body()
        elif self.runner.ready(key):
            self.runner.run(key, body)
        else:
            body()
            self.runner.capture(key, body, self.slots[rows].state.all_idle, warm=True)

    def move(self, source: int, place: int) -> None:
        """Row `source` goes on as row `place`, in its pages and all buffers."""
        self.pages.move(source, place)
        self.state.move(source, place)
        if self.modules.features is not None:
            self.modules.features[place].copy_(self.modules.features[source])
        if self.modules.prompt_ends is not None:
            self.modules.prompt_ends.copy(place, self.modules.prompt_ends, source)

    def prefills_whole(self, prompt: int) -> bool:
        """Whether a prompt of so many tokens is prefilled whole, so that its first token comes from the last pass."""
        return self.modules.prompt_ends is not None and prompt > self.modules.prompt_ends.threshold

    @property
    def reads_prompts(self) -> bool:
        """Whether what drafts reads prompts by passes of its own, as a draft model does."""
        return self.modules.proposer is not None and self.modules.proposer.max_length > 0

    @property
    def _readers(self) -> tuple[bool, ...]:
        """Which models have passes over prompts: False for the target, True for the draft."""
        return (False, True) if self.reads_prompts else (False,)

    def _pass(self, upto: int, chunk: int, draft: bool, rows: int = 1) -> Callable[[], None]:
        """A pass over the next `chunk` tokens of each row of a slot, which end before position `upto`."""
        shape, slot, proposer = self.chunk_shape(upto, chunk, GREEDY), self.slots[rows], self.modules.proposer

        def feed() -> None:
            prefill(self.modules, slot.state, shape, slot.start, chunk, slot.features, slot.prompt_ends)
            slot.start.add_(chunk)

        if not draft:
            return feed
        assert proposer is not None, "there is something to feed"
        return lambda: proposer.catch_up(slot.state, shape, chunk)

    def choose_threads(self) -> None:
        """Chooses once how many threads work on a step on the CPU, by what a plain pass over one row takes."""
        if self.mean_weight is None or self.threads is not None:
            return

        def seconds(count: int) -> float:
            with self.on_device(), using_threads(count):
                return self.seconds(1, self.typical_shape(0, GREEDY, None))

        self.threads = Threads.of(torch.get_num_threads(), self.mean_weight, seconds)

    def seconds(self, rows: int, shape: StepShape, repeats: int = 3) -> float:
        """The shortest time of such a step in which no row runs, in seconds; waits for the device."""
        with self.idle(rows):
            return min(self.timed(StepKey(rows, shape), self._body(rows, shape), repeats))

    def timed(self, key: Hashable, body: Callable[[], None], repeats: int) -> list[float]:
        """Seconds of one run: a few means, each over several runs, after one run that does not count."""
        self.runner.run(key, body)
        self.ring.resync()
        means = []
        for _ in range(_MEANS):
            start = time.perf_counter()
            for _ in range(repeats // _MEANS):
                self.runner.run(key, body)
            self.ring.resync()
            means.append((time.perf_counter() - start) * _MEANS / repeats)
        return means

    def finish(self) -> None:
        """Waits for everything that is queued: buffers may go afterwards."""
        with self.on_device():
            self.ring.resync()

    def missing(
        self,
        max_rows: int,
        ks: Iterable[int],
        sampler: str,
        top_logprobs: int | None,
        longest: int = 0,
        shortest: int = 0,
        grammars: Iterable[str | None] = (None,),
    ) -> list[tuple[int, StepShape]]:
        """The steps that up to `max_rows` rows of such lengths may come to and that are still to be captured.

        Largest first: their graphs share one pool.
        """
        sizes, kinds = reversed(self.buckets(max_rows)), tuple(grammars)
        call = sampler, top_logprobs, longest, shortest
        shapes = [replace(self.shape(k, *call), grammars=kind) for k, kind in step_kinds(ks, kinds)]
        if self.prefills_whole(longest - 1):
            plain = self.shape(0, *call)
            shapes += [plain.for_first_tokens(grammars=kind is not None) for kind in kinds if kind != MIXED_DRAFTS]
        return [(rows, shape) for rows in sizes for shape in shapes if not self.runner.ready(StepKey(rows, shape))]

    def _body(self, rows: int, shape: StepShape) -> Callable[[], None]:
        """The step, for a runner to launch; its views are made when it is called, because a replay needs none."""

        def body() -> None:
            view = self.state.rows(0, rows)
            step(self.modules, view, shape, PhiloxDraws(view.seeds))

        return body

    @contextmanager
    def idle(self, rows: int) -> Iterator[None]:
        """A context in which steps change nothing but the ring, whose count is taken over afterwards."""
        try:
            with self.state.rows(0, rows).all_idle():
                yield
        finally:
            self.ring.resync()
