"""The engine: models, state and pages of a generator, and the launch and capture of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
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

_SHORTEST_PROMPT = 2  # tokens of the shortest prompt that has a prefill pass
_EARLY = 2  # number of steps whose kernels `Engine.compile` begins first
_MEANS = 3  # number of mean times that `Engine.timed` returns


def _as_measured(seconds: float | None) -> float | None:
    """Returns the time unchanged, because there are no other ranks."""
    return seconds


@dataclass(slots=True, eq=False)
class Engine:
    """Models, device buffers and pages of a generator. A scheduler launches steps and prefill passes on it.

    Attributes:
        modules: models, proposer and work areas of a step.
        state: the device buffers.
        pages: the page table on the host, for the caches of target and draft.
        runner: launches steps, or replays captured ones.
        ring: buffers to which steps write their results.
        shapes: makes the shapes of steps.
        sizes: sizes of prefill passes.
        prefix: the prefix cache. None: every prompt is prefilled completely.
        prefix_states: recurrent states after prefixes. None: the models have none, or there is no prefix cache.
        mean_weight: mean number of elements of the target's matrices. None: torch's number of threads is not changed.
        share_seconds: returns rank 0's value of a measured time, so that all ranks decide equally.
        threads: chooses the number of CPU threads of a step. None until `choose_threads`, and on other devices.
        sharing: (index of this rank, number of ranks). Ranks share the machine and capture the same steps.
        texts: the proposer that looks up drafts in texts of several requests. None: there is none.
        compilers: executor that may still compile the kernels of `behind`, see `compile`. None: there is none.
        prompts: launches prefill passes.
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
    compilers: Executor | None = None
    prompts: PromptPasses = field(init=False)

    def __post_init__(self) -> None:
        with self.on_device():
            self.prompts = PromptPasses.allocate(self.modules, self.state, self.runner, self.sizes, self.shapes)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which work is queued on the device.

        It sets device, stream and number of CPU threads, disables gradients, and replaces the caller's torch settings.
        """
        threads = self.threads.now if self.threads else None
        with shielded(self.state.lengths.device, threads), torch.inference_mode(), self.runner.on_stream():
            yield

    def captured_shape(self, rows: int, shape: StepShape) -> StepShape:
        """Returns the shape with which to launch a step that needs `shape`.

        It is `shape` itself, unless only the corresponding shape for the longest rows is captured. Both give the same
        bits.
        """
        wide = replace(shape, num_blocks=blocks(self.shapes.max_positions), first_block=0)
        return wide if not self.ready(rows, shape) and self.ready(rows, wide) else shape

    def launch(self, rows: int, shape: StepShape) -> int:
        """Queues one step over the first `rows` rows. Returns its sequence number in the ring."""
        key, start = StepKey(rows, shape), time.perf_counter()
        sequence = self.ring.count(lambda: self.runner.run(key, self._body(rows, shape)))
        if self.threads:  # on the CPU the step has finished by now
            self.threads.took((rows, shape.num_drafts, shape.sampler), time.perf_counter() - start)
        return sequence

    def ready(self, rows: int, shape: StepShape) -> bool:
        """True if a step over the first `rows` rows needs no CUDA graph capture before its launch.

        It is always true if steps are not captured.
        """
        return self.runner.ready(StepKey(rows, shape))

    def capture(self, rows: int, shape: StepShape) -> None:
        """Captures a step over the first `rows` rows as a CUDA graph, so that it can be launched."""
        self.runner.capture(StepKey(rows, shape), self._body(rows, shape), lambda: self.idle(rows))

    def compile(
        self,
        steps: Iterable[tuple[int, StepShape]],
        *,
        prompts: bool,
        compilers: Executor | None = None,
        behind: Iterable[tuple[int, StepShape]] = (),
    ) -> None:
        """Compiles the kernels of steps, and of prefill passes, in parallel. Called before any of them is launched.

        Args:
            steps: (rows, shape) of each step.
            prompts: True to compile the kernels of prefill passes, too.
            compilers: executor of processes that run Triton's compiler. None: threads compile.
            behind: (rows, shape) of further steps, whose kernels are compiled in the background. Only a launch that
                needs such a kernel waits for it. Kernels of the first _EARLY of these steps are begun before all
                others, because kernels of sampled steps take longest. Ignored if threads compile.
        """
        ops, others = self.modules.ops, list(behind)
        with ops.compiling(compilers), self.idle(self.state.batch):
            with ops.compiling_behind(early=True) if others else nullcontext() as uncached:
                for rows, shape in others[:_EARLY] if uncached is not None else ():
                    self._body(rows, shape)()
            for rows, shape in steps:
                self._body(rows, shape)()
            for body in self.prompts.bodies() if prompts else ():
                body()
            with ops.compiling_behind() if others else nullcontext() as uncached:
                if uncached is not None:
                    self.compilers = compilers
                    self._begin(others, uncached)

    def _begin(self, steps: list[tuple[int, StepShape]], uncached: Callable[[], bool]) -> None:
        """Queues the kernels of `steps` for compilation in the background, within `compiling_behind()`.

        If the kernels of the first and of the last step are compiled already, so are the others. These are then
        skipped, because checking all of them would take the host half a second.

        Args:
            steps: (rows, shape) of each step.
            uncached: True if a kernel was met that is not compiled yet.
        """
        for rows, shape in (steps[0], steps[-1]):
            if not uncached():
                self._body(rows, shape)()
        for rows, shape in steps if uncached() else ():
            self._body(rows, shape)()

    def move(self, source: int, place: int) -> None:
        """Moves row `source` to the free row `place`, with its pages and all buffers."""
        self.pages.move(source, place)
        self.state.move(source, place)
        if self.modules.features is not None:
            self.modules.features[place].copy_(self.modules.features[source])
        if self.modules.prompt_ends is not None:
            self.modules.prompt_ends.copy(place, self.modules.prompt_ends, source)

    def choose_threads(self) -> None:
        """Chooses the number of CPU threads of a step, by the time of a step of one row without drafts.

        Later calls do nothing.
        """
        if self.mean_weight is None or self.threads is not None:
            return

        def seconds(count: int) -> float:
            with self.on_device(), using_threads(count):
                return self.seconds(1, self.shapes.typical(0, GREEDY, None))

        self.threads = Threads.of(torch.get_num_threads(), self.mean_weight, seconds)

    def seconds(self, rows: int, shape: StepShape, repeats: int = 3) -> float:
        """Measures a step of this shape while no row runs, and waits for the device.

        Args:
            rows, shape: rows of the launch, and shape of the step.
            repeats: number of steps that are timed.

        Returns:
            The smallest of several mean times, in seconds.
        """
        with self.idle(rows):
            return min(self.timed(StepKey(rows, shape), self._body(rows, shape), repeats))

    def step_seconds(
        self,
        rows: int,
        k: int,
        sampler: str,
        top_logprobs: int | None = None,
        lengths: tuple[int, int] = (0, 0),
        repeats: int = 3,
        *,
        processed: bool = False,
    ) -> float:
        """Measures a step of a call, see `seconds`. All ranks get the same number.

        Args:
            rows: rows of the launch.
            k, sampler, top_logprobs, processed: see StepShape.
            lengths: largest and smallest number of tokens of a row.
            repeats: number of steps that are timed.
        """
        shape = self.shapes.typical(k, sampler, top_logprobs, *lengths, processed=processed)
        taken = self.share_seconds(self.seconds(rows, shape, repeats))
        assert taken is not None, "it was measured"
        return taken

    def timed(self, key: Hashable, body: Callable[[], None], repeats: int) -> list[float]:
        """Measures runs of `body`, after one run that is not counted.

        Args:
            key: key under which `body` is captured.
            body: a step, or a part of one.
            repeats: number of measured runs.

        Returns:
            _MEANS times of one run in seconds. Each is the mean of repeats / _MEANS runs.
        """
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
        """Waits for all queued work. Buffers may be freed afterwards."""
        with self.on_device():
            self.ring.resync()

    def close(self) -> None:
        """Waits for all queued work on the device. Cancels compilations that have not begun."""
        self.finish()
        if self.compilers is not None:
            self.compilers.shutdown(cancel_futures=True)

    def missing(
        self,
        max_rows: int,
        ks: Iterable[int],
        sampler: str,
        top_logprobs: int | None,
        longest: int = 0,
        shortest: int = 0,
        grammars: Iterable[str | None] = (None,),
        *,
        processed: bool = False,
    ) -> list[tuple[int, StepShape]]:
        """Returns (rows, shape) of the steps that up to `max_rows` rows may need, and that are not captured yet.

        For other arguments see `StepShapes.kinds`. The largest steps come first, because all graphs share one memory
        pool.
        """
        sizes, kinds = reversed(self.shapes.buckets(max_rows)), tuple(grammars)
        shapes = self.shapes.kinds(ks, sampler, top_logprobs, longest, shortest, kinds, processed=processed)
        if self.prompts.takes_whole(max(longest - 1, _SHORTEST_PROMPT)):
            plain = self.shapes.step(0, sampler, top_logprobs, longest, shortest, processed=processed)
            shapes += [plain.for_first_tokens(grammars=kind is not None) for kind in kinds if kind != MIXED_DRAFTS]
        return [(rows, shape) for rows in sizes for shape in shapes if not self.runner.ready(StepKey(rows, shape))]

    def _body(self, rows: int, shape: StepShape) -> Callable[[], None]:
        """Returns a function that launches the operations of a step over the first `rows` rows.

        The function itself makes the views of buffers, because a graph replay needs none.
        """

        def body() -> None:
            view = self.state.rows(0, rows)
            step(self.modules, view, shape, PhiloxDraws(view.seeds))

        return body

    @contextmanager
    def idle(self, rows: int) -> Iterator[None]:
        """Context in which the first `rows` rows are idle, so steps over them change only the ring of results.

        At its end the host's count of steps is set to the device's.
        """
        try:
            with self.state.rows(0, rows).all_idle():
                yield
        finally:
            self.ring.resync()
