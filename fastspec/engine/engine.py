"""The engine: models, device buffers and KV cache pages of a generator. It launches and captures decode steps."""

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
from fastspec.engine.threads import Threads, step_clock
from fastspec.graphs.keys import PromptKey, StepKey
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
EARLY = 2  # number of steps whose kernels `Engine.compile` begins first
_MEANS = 3  # number of mean times that `Engine.timed` returns


def _as_measured(seconds: float | None) -> float | None:
    """Returns the measured time unchanged: the default of `Engine.share_seconds`, for a process without other ranks."""
    return seconds


@dataclass(slots=True, eq=False)
class Engine:
    """Models, device buffers and KV cache pages of a generator.

    A scheduler launches decode steps and prefill passes through this object.

    Attributes:
        modules: models, proposer and work areas of a decode step.
        state: the device buffers of all batch slots.
        pages: the table of KV cache pages on the host. Target and draft use the same table.
        runner: launches decode steps, or replays their CUDA graphs.
        ring: buffers to which decode steps write their results.
        shapes: makes the shapes of decode steps and prefill passes.
        sizes: sizes of prefill passes.
        prefix: the prefix cache. None: every prompt is prefilled completely.
        prefix_states: recurrent states after prefixes of prompts. None: the models have no recurrent states, or there
            is no prefix cache.
        mean_weight: mean number of elements of the target's matrices. None: torch's number of threads is not changed.
        share_seconds: function that returns rank 0's value of a measured time, so that all ranks decide equally.
        threads: chooses the number of CPU threads of a step. None before `choose_threads`, and if torch's number is
            not changed.
        sharing: (index of this rank, number of ranks). All ranks run on one machine and capture the same steps.
        texts: the proposer that looks up draft tokens in texts of several requests. None: there is none.
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

        It sets device, stream and number of CPU threads, and disables gradients. The caller's torch settings have no
        effect inside.
        """
        threads = self.threads.now if self.threads else None
        with shielded(self.state.lengths.device, threads), torch.inference_mode(), self.runner.on_stream():
            yield

    def captured_shape(self, rows: int, shape: StepShape) -> StepShape:
        """Returns the shape with which to launch a decode step that needs `shape`.

        It is `shape` itself, unless only the same step for the longest sequences is captured as a CUDA graph. Both
        shapes give the same bits.

        Args:
            rows: number of batch slots that the step covers.
            shape: the shape that the step needs.
        """
        wide = replace(shape, num_blocks=blocks(self.shapes.max_positions), first_block=0)
        return wide if not self.ready(rows, shape) and self.ready(rows, wide) else shape

    def launch(self, rows: int, shape: StepShape) -> int:
        """Queues one decode step over the first `rows` batch slots. Returns the number of the step in `ring`."""
        key, start = StepKey(rows, shape), time.perf_counter()
        sequence = self.ring.count(lambda: self.runner.run(key, self._body(rows, shape)))
        if self.threads:  # on the CPU the step has finished by now
            self.threads.took((rows, shape.num_drafts, shape.sampler), time.perf_counter() - start)
        return sequence

    def ready(self, rows: int, shape: StepShape) -> bool:
        """True if a decode step over the first `rows` batch slots needs no CUDA graph capture before its launch.

        Always True if the engine does not use CUDA graphs.
        """
        return self.runner.ready(StepKey(rows, shape))

    def capture(self, rows: int, shape: StepShape) -> None:
        """Captures a decode step over the first `rows` batch slots as a CUDA graph, so that it can be launched."""
        self.runner.capture(StepKey(rows, shape), self._body(rows, shape), lambda: self.idle(rows))

    def capture_again(self, keys: Iterable[Hashable]) -> None:
        """Captures decode steps and prefill passes whose CUDA graphs were deleted.

        Args:
            keys: keys of the graphs, from `Runner.release`.
        """
        known = list(keys)
        with self.on_device():
            for key in known:
                if isinstance(key, StepKey):
                    self.capture(key.rows, key.shape)
            if any(isinstance(key, PromptKey) for key in known):
                self.prompts.capture()

    def compile(
        self,
        steps: Iterable[tuple[int, StepShape]],
        *,
        prompts: bool,
        compilers: Executor | None = None,
        behind: Iterable[tuple[int, StepShape]] = (),
    ) -> None:
        """Compiles the kernels of decode steps, and of prefill passes, in parallel, before the first launch.

        Args:
            steps: (number of batch slots, shape) of each step.
            prompts: True to compile the kernels of prefill passes, too.
            compilers: executor of processes that run Triton's compiler. None: threads compile.
            behind: (number of batch slots, shape) of further steps, whose kernels are compiled in the background. Only
                a launch that needs such a kernel waits for it. The first two of these steps are begun before `steps`,
                because the kernels of sampled steps take longest. Ignored if threads compile.
        """
        ops, others = self.modules.ops, list(behind)
        with ops.compiling(compilers), self.idle(self.state.batch):
            for rows, shape in others[:EARLY]:  # the first step's kernels compile while the second is queued
                with ops.compiling_behind(early=True) as uncached:
                    if uncached is not None:
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

        If the kernels of the first and the last step are compiled already, the other steps are assumed to be compiled
        and are skipped. Checking all of them would take the host half a second.

        Args:
            steps: (number of batch slots, shape) of each step.
            uncached: function that returns True if a kernel was met that is not compiled yet.
        """
        for rows, shape in (steps[0], steps[-1]):
            if not uncached():
                self._body(rows, shape)()
        for rows, shape in steps if uncached() else ():
            self._body(rows, shape)()

    def move(self, source: int, place: int) -> None:
        """Moves the request in batch slot `source` to the free slot `place`, with its KV cache pages and buffers."""
        self.pages.move(source, place)
        self.state.move(source, place)
        if self.modules.features is not None:
            self.modules.features[place].copy_(self.modules.features[source])
        if self.modules.prompt_ends is not None:
            self.modules.prompt_ends.copy(place, self.modules.prompt_ends, source)

    @property
    def clock(self) -> Callable[[], float]:
        """Clock by which decode steps are timed, see `step_clock`."""
        return step_clock(self.state.lengths.device.type, self.sharing[1])

    def choose_threads(self) -> None:
        """Chooses the number of CPU threads of a decode step, by timing a step over one sequence without draft tokens.

        Does nothing if the number is chosen already, or if torch's number is not to be changed.
        """
        if self.mean_weight is None or self.threads is not None:
            return

        def seconds(count: int) -> float:
            with self.on_device(), using_threads(count):
                # by the clock of all time: threads that wait for a busy core are slow
                return self.seconds(1, self.shapes.typical(0, GREEDY, None), clock=time.perf_counter)

        self.threads = Threads.of(torch.get_num_threads(), self.mean_weight, seconds)

    def seconds(self, rows: int, shape: StepShape, repeats: int = 3, clock: Callable[[], float] | None = None) -> float:
        """Measures the time of a decode step while no request runs. Waits for the device.

        Args:
            rows: number of batch slots that the step covers.
            shape: shape of the step.
            repeats: number of steps that are timed.
            clock: clock that times them. None: `clock` of this object.

        Returns:
            The smallest of several mean times, in seconds.
        """
        with self.idle(rows):
            return min(self.timed(StepKey(rows, shape), self._body(rows, shape), repeats, clock))

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
        """Measures the time of a decode step in seconds, see `seconds`. All ranks get the same number.

        Args:
            rows: number of batch slots that the step covers.
            k: number of draft tokens per sequence.
            sampler, top_logprobs, processed: see StepShape.
            lengths: largest and smallest number of tokens of a sequence.
            repeats: number of steps that are timed.
        """
        shape = self.shapes.typical(k, sampler, top_logprobs, *lengths, processed=processed)
        taken = self.share_seconds(self.seconds(rows, shape, repeats))
        assert taken is not None, "it was measured"
        return taken

    def timed(
        self, key: Hashable, body: Callable[[], None], repeats: int, clock: Callable[[], float] | None = None
    ) -> list[float]:
        """Measures runs of `body`, after one run that is not counted.

        Args:
            key: key under which `body` is captured as a CUDA graph.
            body: function that launches a decode step, or a part of one.
            repeats: number of measured runs.
            clock: see `seconds`.

        Returns:
            Three times of one run in seconds. Each is the mean over a third of the runs.
        """
        self.runner.run(key, body)
        self.ring.resync()
        means, now = [], clock or self.clock
        for _ in range(_MEANS):
            start = now()
            for _ in range(repeats // _MEANS):
                self.runner.run(key, body)
            self.ring.resync()
            means.append((now() - start) * _MEANS / repeats)
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
        """Returns (number of batch slots, shape) of the decode steps that are still to be captured as CUDA graphs.

        These are the steps that up to `max_rows` requests at once may need. For `ks`, `sampler`, `top_logprobs`,
        `longest` and `shortest` (tokens of a sequence), `grammars` and `processed` see `StepShapes.kinds`. The largest
        steps come first, because all graphs share one memory pool.
        """
        sizes, kinds = reversed(self.shapes.buckets(max_rows)), tuple(grammars)
        shapes = self.shapes.kinds(ks, sampler, top_logprobs, longest, shortest, kinds, processed=processed)
        if self.prompts.takes_whole(max(longest - 1, _SHORTEST_PROMPT)):
            plain = self.shapes.step(0, sampler, top_logprobs, longest, shortest, processed=processed)
            shapes += [plain.for_first_tokens(grammars=kind is not None) for kind in kinds if kind != MIXED_DRAFTS]
        return [(rows, shape) for rows in sizes for shape in shapes if not self.runner.ready(StepKey(rows, shape))]

    def _body(self, rows: int, shape: StepShape) -> Callable[[], None]:
        """Returns a function that launches the operations of a decode step over the first `rows` batch slots.

        Views of buffers are made inside that function, because the replay of a CUDA graph needs no views.
        """

        def body() -> None:
            view = self.state.rows(0, rows)
            step(self.modules, view, shape, PhiloxDraws(view.seeds))

        return body

    @contextmanager
    def idle(self, rows: int) -> Iterator[None]:
        """Context in which the first `rows` batch slots are idle, so steps over them change only the ring of results.

        At its end the host's count of steps is set to the device's count.
        """
        try:
            with self.state.rows(0, rows).all_idle():
                yield
        finally:
            self.ring.resync()
