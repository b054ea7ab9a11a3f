"""Runners: a step is a callable over static buffers; a runner launches it, or replays what it captured of it.

Knows no model and no state: it gets callables. A captured callable must read and write buffers that outlive the
runner, allocate nothing it needs later, and read nothing back to the host.
"""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from fastspec.graphs.failures import device_failed
from fastspec.graphs.keys import describe

WARM_UPS = 2  # the first compiles and loads kernels and takes the libraries' work areas; the second finds them there


class Runner(Protocol):
    """Runs steps.

    Attributes:
        static: whether steps are replayed, so that nothing in their launch may depend on lengths.
        depth: steps that may be launched before the results of the first are read.
    """

    static: bool
    depth: int

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Runs `body` once, or what was captured of it under `key`, without waiting for it.

        Raises:
            RuntimeError: nothing was captured under `key`.
        """

    def ready(self, key: Hashable) -> bool:
        """True if a step of that key can run."""

    def capture(
        self,
        key: Hashable,
        body: Callable[[], None],
        idle: Callable[[], AbstractContextManager[None]],
        *,
        warm: bool = False,
    ) -> None:
        """Makes `key` ready to run.

        Args:
            key: what `body` depends on besides the contents of its buffers; `keys.describe` names it in messages.
            body: the step.
            idle: a context in which running `body` changes nothing that counts.
            warm: `body` has run here already, so that its kernels are compiled and loaded.

        Raises:
            RuntimeError: the capture failed; the runner stays usable.
        """

    def use_variant(self, variant: Hashable) -> None:
        """From now on captures and runs the steps of this variant; None is the first one. Graphs of others stay."""

    def forget_variant(self, variant: Hashable) -> None:
        """Drops the graphs of a variant that is not in use; none of its steps may be queued."""

    def on_stream(self) -> AbstractContextManager[object]:
        """A context in which work is queued on this runner's stream."""

    def wait_for_caller(self) -> None:
        """Lets what is queued from now on wait for what the caller has queued on its current stream."""

    def describe(self) -> str:
        """Describes the captured steps."""


class EagerRunner:
    """The host launches every operation of every step.

    Args:
        device: where.
        depth: as in Runner; by default a step is launched when the one before it was read.
    """

    static = False

    def __init__(self, device: torch.device, depth: int = 1) -> None:
        self.depth = depth
        self._stream = _StreamLease(device, self) if device.type == "cuda" else None

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Calls `body`."""
        body()

    def ready(self, key: Hashable) -> bool:
        """True: nothing has to be captured."""
        return True

    def capture(
        self,
        key: Hashable,
        body: Callable[[], None],
        idle: Callable[[], AbstractContextManager[None]],
        *,
        warm: bool = False,
    ) -> None:
        """Does nothing."""

    def use_variant(self, variant: Hashable) -> None:
        """Does nothing: steps are launched as they are now."""

    def forget_variant(self, variant: Hashable) -> None:
        """Does nothing."""

    def on_stream(self) -> AbstractContextManager[object]:
        """A context of the runner's stream; off CUDA of nothing."""
        return self._stream.current() if self._stream else nullcontext()

    def wait_for_caller(self) -> None:
        """On CUDA, lets the runner's stream wait for the caller's."""
        if self._stream:
            self._stream.wait_for_caller()

    def describe(self) -> str:
        """The runner in one line."""
        return "none captured: every step runs eagerly"


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph and what it took.

    Attributes:
        graph: to replay.
        nodes: kernels, copies and fills in it.
        seconds: warm-up and capture.
        bytes: the shared pool grew by this.
    """

    graph: torch.cuda.CUDAGraph
    nodes: int
    seconds: float
    bytes: int


class GraphRunner:
    """Captures steps as CUDA graphs and replays them; a step that was not captured is an error.

    All graphs share one memory pool: they run one after the other, and none reads what an earlier one left there.

    Args:
        device: where to capture.
        depth: as in Runner.
        nvtx: mark captures and replays as NVTX ranges.
        warm_ups: runs of a step before it is captured; one is enough for kernels of this package.
        warming: a context for these runs, in which a step may leave out what loads nothing.
    """

    static = True

    def __init__(
        self,
        device: torch.device,
        *,
        depth: int = 2,
        nvtx: bool = False,
        warm_ups: int = WARM_UPS,
        warming: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._device = device
        self._warm_ups, self._warming = warm_ups, warming
        self.depth = depth
        self._nvtx = nvtx
        self._graphs: dict[Hashable, Captured] = {}
        self._variants: dict[Hashable, dict[Hashable, Captured]] = {None: self._graphs}
        self._failures: dict[Hashable, str] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _StreamLease(device, self)

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Replays the graph of `key`: one launch.

        Raises:
            RuntimeError: nothing was captured under `key`, or the device has failed.
        """
        captured = self._graphs.get(key)
        if captured is None:
            raise RuntimeError(
                f"no CUDA graph for the step ({describe(key)}): {self._failures.get(key, 'it was never captured')}. "
                "warmup() captures it; graphs=False launches every operation from the host instead"
            )
        try:
            with torch.cuda.nvtx.range(f"step: {describe(key)}") if self._nvtx else nullcontext():
                captured.graph.replay()
        except RuntimeError as error:
            raise device_failed(error) from error

    def ready(self, key: Hashable) -> bool:
        """True if a step of that key was captured."""
        return key in self._graphs

    def capture(
        self,
        key: Hashable,
        body: Callable[[], None],
        idle: Callable[[], AbstractContextManager[None]],
        *,
        warm: bool = False,
    ) -> None:
        """Captures `body`, unless `key` is there already."""
        if self.ready(key):
            return
        try:
            self._graphs[key] = self._capture(key, body, idle, 0 if warm else self._warm_ups)
        except RuntimeError as error:
            self._failures[key] = f"its capture failed: {error}"
            # a stream whose capture failed may stay in that state, and the pool with it
            torch.cuda.synchronize(self._device)
            self._stream.discard()
            self._stream = _StreamLease(self._device, self)
            self._pool = torch.cuda.graph_pool_handle()
            raise RuntimeError(
                f"the step ({describe(key)}) could not be captured as a CUDA graph: {error}; if it must run all the "
                "same, graphs=False launches every operation from the host"
            ) from error
        self._failures.pop(key, None)

    def use_variant(self, variant: Hashable) -> None:
        """The variant's graphs; all share one pool."""
        self._graphs = self._variants.setdefault(variant, {})

    def forget_variant(self, variant: Hashable) -> None:
        """Drops the variant's graphs."""
        if self._variants.get(variant) is not self._graphs:
            self._variants.pop(variant, None)

    def on_stream(self) -> AbstractContextManager[object]:
        """The stream of captures and replays."""
        return self._stream.current()

    def wait_for_caller(self) -> None:
        """Lets the runner's stream wait for the caller's."""
        self._stream.wait_for_caller()

    def describe(self) -> str:
        """A line for each graph."""
        lines = [
            f"{describe(key)}: {captured.nodes} nodes, {captured.seconds * 1e3:.0f} ms to capture, "
            f"{captured.bytes / 2**20:.1f} MiB"
            for key, captured in self._graphs.items()
        ]
        lines += [f"{describe(key)}: not captured, {reason}" for key, reason in self._failures.items()]
        head = f"{len(self._graphs)} captured, one per kind of step or prompt pass; {self.depth} steps launched ahead"
        return "\n           ".join([head, *lines])

    def _capture(
        self, key: Hashable, body: Callable[[], None], idle: Callable[[], AbstractContextManager[None]], warm_ups: int
    ) -> Captured:
        start = time.perf_counter()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with idle(), self.on_stream():
            with self._warming():
                for _ in range(warm_ups):
                    body()
            torch.cuda.current_stream(self._device).synchronize()
            collecting = gc.isenabled()
            gc.disable()  # what others left to the collector may, as it goes, call what a capture forbids
            try:
                # other threads may go on calling CUDA meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                held = torch.cuda.memory_allocated(self._device)  # with the generator's state, which is torch's own
                with torch.cuda.nvtx.range(f"capture: {describe(key)}") if self._nvtx else nullcontext():
                    body()
            finally:
                if collecting:
                    gc.enable()
                graph.capture_end()
            kept = torch.cuda.memory_allocated(self._device) - held
            if kept > 0:
                raise RuntimeError(
                    f"it keeps {kept} bytes that it allocated; a captured step may only keep what it writes to buffers "
                    "that were there before"
                )
            graph.instantiate()
        grown = torch.cuda.memory_reserved(self._device) - before
        return Captured(graph, _node_count(graph), time.perf_counter() - start, grown)


class _StreamLease:
    """One stream, for one runner as long as it lives.

    cuBLAS keeps a work area per stream until the process ends, and captured graphs go on using it: runners that
    live at the same time must not share a stream, and a new stream per runner would lose 32 MiB with each. So
    streams are handed out, and taken back when their runner goes.
    """

    def __init__(self, device: torch.device, owner: object) -> None:
        free = _free_streams(device)
        self._device = device
        self._stream = free.pop() if free else torch.cuda.Stream(device)
        self._finalizer = weakref.finalize(owner, free.append, self._stream)

    @contextmanager
    def current(self) -> Any:
        """Makes device and stream the current ones, whatever the caller's are."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def wait_for_caller(self) -> None:
        """Lets the stream wait for the caller's."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def discard(self) -> None:
        """Never hands this stream out again."""
        self._finalizer.detach()


@cache
def _free_streams(device: torch.device) -> list[torch.cuda.Stream]:
    return []


def _node_count(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a kept graph, by the driver's cuGraphGetNodes."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))
    if status:
        raise RuntimeError(f"cuGraphGetNodes failed with status {status}")
    return count.value
