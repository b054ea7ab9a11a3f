"""The engine: models, state and pages of a generator, and how a step or a prefill pass is launched or captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from fastspec.engine.pass_sizes import PassSizes
from fastspec.engine.prompt_passes import PromptPasses
from fastspec.engine.step_shapes import StepShapes
from fastspec.engine.threads import Threads
from fastspec.graphs.keys import StepKey
from fastspec.graphs.results import ResultRing
from fastspec.graphs.runner import Runner
from fastspec.kv_cache.pages import PageTable
from fastspec.kv_cache.prefix import PrefixCache
from fastspec.kv_cache.prefix_states import PrefixStates
from fastspec.proposers.suffix import Suffix
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.shapes import (
    GREEDY,
    MIXED_DRAFTS,
    StepShape,
    blocks,
)
from fastspec.state import DecodeState
from fastspec.step import StepModules, step
from fastspec.torch_settings import shielded, using_threads

_MEANS = 3  # taken of each time that is measured


def _as_measured(seconds: float | None) -> float | None:
    """The time as it was measured: this process is alone."""
    return seconds


@dataclass(slots=True, eq=False)
class Engine:
    """Models, device buffers and pages of a generator. A scheduler launches steps and passes on it.

    Attributes:
        modules: models, proposer and work areas of a step.
        state: the device buffers.
        pages: the host's page table over both caches.
        runner: launches steps, or replays what it captured.
        ring: the buffers to which steps write their results.
        shapes: shapes of steps.
        sizes: sizes of passes over prompts.
        prefix: the prefix cache; None: every prompt is prefilled whole.
        prefix_states: recurrent states after prefixes; None: there are none, or no prefix cache.
        mean_weight: mean number of elements of the target's matrices; None: threads stay as torch has them.
        share_seconds: replaces a time that a rank measured by rank 0's, so that all ranks decide alike.
        threads: number of threads that work on a step on the CPU; None until `choose_threads`, and on other devices.
        sharing: this rank, and how many ranks share the machine and capture the same.
        texts: the lookup in texts that several requests share; None: there is none.
        prompts: launches passes over prompts.
    """

    modules: StepModules
    state: DecodeState
    pages: PageTable
    runner: Runner
    ring: ResultRing
    shapes: StepShapes
    sizes: PassSizes
    prefix: PrefixCache | None = None
    prefix_states: PrefixStates | None = None
    mean_weight: float | None = None
    share_seconds: Callable[[float | None], float | None] = _as_measured
    threads: Threads | None = None
    sharing: tuple[int, int] = (0, 1)
    texts: Suffix | None = None
    prompts: PromptPasses = field(init=False)

    def __post_init__(self) -> None:
        with self.on_device():
            self.prompts = PromptPasses.allocate(self.modules, self.state, self.runner, self.sizes, self.shapes)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context for work on the device: our device and stream, no gradients, none of the caller's settings."""
        threads = self.threads.now if self.threads else None
        with shielded(self.state.lengths.device, threads), torch.inference_mode(), self.runner.on_stream():
            yield

    def captured_shape(self, rows: int, shape: StepShape) -> StepShape:
        """The shape itself, or with room for the longest rows where only that step is captured: the same bits."""
        wide = replace(shape, num_blocks=blocks(self.shapes.max_positions), first_block=0)
        return wide if not self.ready(rows, shape) and self.ready(rows, wide) else shape

    def launch(self, rows: int, shape: StepShape) -> int:
        """Queues one step over the first `rows` rows; returns its sequence number in the ring."""
        key, start = StepKey(rows, shape), time.perf_counter()
        sequence = self.ring.count(lambda: self.runner.run(key, self._body(rows, shape)))
        if self.threads:  # the CPU has done the step by now
            self.threads.took((rows, shape.num_drafts, shape.sampler), time.perf_counter() - start)
        return sequence

    def ready(self, rows: int, shape: StepShape) -> bool:
        """True if such a step can be launched."""
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
            for body in self.prompts.bodies() if prompts else ():
                body()

    def move(self, source: int, place: int) -> None:
        """Row `source` goes on as row `place`, in its pages and all buffers."""
        self.pages.move(source, place)
        self.state.move(source, place)
        if self.modules.features is not None:
            self.modules.features[place].copy_(self.modules.features[source])
        if self.modules.prompt_ends is not None:
            self.modules.prompt_ends.copy(place, self.modules.prompt_ends, source)

    def choose_threads(self) -> None:
        """Chooses once how many threads work on a step on the CPU, by what a plain pass over one row takes."""
        if self.mean_weight is None or self.threads is not None:
            return

        def seconds(count: int) -> float:
            with self.on_device(), using_threads(count):
                return self.seconds(1, self.shapes.typical(0, GREEDY, None))

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
        sizes, kinds = reversed(self.shapes.buckets(max_rows)), tuple(grammars)
        shapes = self.shapes.kinds(ks, sampler, top_logprobs, longest, shortest, kinds)
        if self.prompts.takes_whole(longest - 1):
            plain = self.shapes.step(0, sampler, top_logprobs, longest, shortest)
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
