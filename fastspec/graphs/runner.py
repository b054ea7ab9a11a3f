"""Runners launch steps, or capture each kind of step once as a CUDA graph and replay it.

A step is a function over static buffers. A captured function must read and write only buffers that outlive the runner.
It may keep no new memory, and copy nothing back to the host.
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

STREAMS = 32  # CUDA streams of a device that torch hands out in turn
# the first run compiles and loads kernels and allocates the libraries' work areas; the second runs with them
WARM_UPS = 2


class Runner(Protocol):
    """Interface of objects that run steps: decode steps and prefill passes.

    Attributes:
        static: True if steps are captured as CUDA graphs and replayed. Then no shape may depend on sequence lengths.
        depth: number of steps that may be launched before the result of the first step is read.
    """

    static: bool
    depth: int

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Runs `body`, or replays the graph captured under `key`. Does not wait for the device.

        Raises:
            RuntimeError: nothing was captured under `key`.
        """

    def ready(self, key: Hashable) -> bool:
        """True if `run` would accept this key."""

    def capture(
        self,
        key: Hashable,
        body: Callable[[], None],
        idle: Callable[[], AbstractContextManager[None]],
        *,
        warm: bool = False,
    ) -> None:
        """Captures `body` under `key`.

        Args:
            key: everything on which `body` depends except the contents of its buffers. `keys.describe` names it in
                messages.
            body: function that launches the step's operations.
            idle: function that returns a context in which `body` changes no running request.
            warm: True if `body` has already run, so that its kernels are compiled and loaded.

        Raises:
            RuntimeError: the capture failed. The runner stays usable.
        """

    def use_variant(self, variant: Hashable) -> None:
        """Selects the set of graphs that `capture` and `run` use. Other sets are kept.

        Args:
            variant: any hashable name of the set. None: the default set.
        """

    def forget_variant(self, variant: Hashable) -> None:
        """Deletes a set of graphs that is not selected. None of these graphs may be queued on the device."""

    def release(self) -> list[Hashable]:
        """Deletes all graphs, because their buffers will get other addresses. Returns the keys of the selected set."""

    def on_stream(self) -> AbstractContextManager[object]:
        """Context in which work is queued on this runner's stream."""

    def wait_for_caller(self) -> None:
        """Makes later work on this runner's stream wait for the work on the caller's current stream."""

    def describe(self) -> str:
        """Describes the captured steps, for `explain`."""


class EagerRunner:
    """Runner without capture: the host launches every operation of every step.

    Args:
        device: device of the steps.
        depth: see Runner. By default a step is launched after the result of the previous step was read.
    """

    static = False

    def __init__(self, device: torch.device, depth: int = 1) -> None:
        self.depth = depth
        self._stream = _StreamLease(device, self) if device.type == "cuda" else None

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Calls `body`."""
        body()

    def ready(self, key: Hashable) -> bool:
        """Returns True, because nothing has to be captured."""
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
        """Does nothing."""

    def forget_variant(self, variant: Hashable) -> None:
        """Does nothing."""

    def release(self) -> list[Hashable]:
        """Returns no keys, because nothing is captured."""
        return []

    def on_stream(self) -> AbstractContextManager[object]:
        """Context of the runner's stream. Does nothing without CUDA."""
        return self._stream.current() if self._stream else nullcontext()

    def wait_for_caller(self) -> None:
        """Makes the runner's stream wait for the work on the caller's current stream. Does nothing without CUDA."""
        if self._stream:
            self._stream.wait_for_caller()

    def describe(self) -> str:
        """Describes the runner in one line."""
        return "none captured: every step runs eagerly"


@dataclass(frozen=True, slots=True)
class Captured:
    """CUDA graph of a step, with statistics of its capture.

    Attributes:
        graph: the CUDA graph.
        nodes: number of kernels, copies and fills.
        seconds: time of warm-up and capture.
        bytes: bytes by which the shared memory pool grew.
    """

    graph: torch.cuda.CUDAGraph
    nodes: int
    seconds: float
    bytes: int


class GraphRunner:
    """Captures steps as CUDA graphs and replays them. Running a step that was not captured is an error.

    All graphs share one memory pool. They run one after the other, and none reads what an earlier one wrote there.

    Args:
        device: the CUDA device.
        depth: see Runner.
        nvtx: True to mark captures and replays as NVTX ranges.
        warm_ups: number of runs of a step before its capture. One is enough if all kernels are from this package.
        warming: function that returns a context for these runs. In it a step may skip work that loads no new kernel.
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
        """Replays the graph of `key`, with one launch.

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
        """True if a graph was captured under `key`."""
        return key in self._graphs

    def capture(
        self,
        key: Hashable,
        body: Callable[[], None],
        idle: Callable[[], AbstractContextManager[None]],
        *,
        warm: bool = False,
    ) -> None:
        """Captures `body`, unless there is a graph of `key`."""
        if self.ready(key):
            return
        try:
            self._graphs[key] = self._capture(key, body, idle, 0 if warm else self._warm_ups)
        except RuntimeError as error:
            self._failures[key] = f"its capture failed: {error}"
            # after a failed capture, the stream and the memory pool may stay in capture mode
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
        """Selects the set of graphs of this name, see `Runner`. All sets share one memory pool."""
        self._graphs = self._variants.setdefault(variant, {})

    def forget_variant(self, variant: Hashable) -> None:
        """Deletes the set of graphs of this name. Does nothing if the set is selected."""
        if self._variants.get(variant) is not self._graphs:
            self._variants.pop(variant, None)

    def release(self) -> list[Hashable]:
        """Deletes the graphs of all sets, and their memory pool. Returns the keys of the selected set."""
        keys = list(self._graphs)
        for graphs in self._variants.values():
            graphs.clear()
        self._failures.clear()
        self._pool = torch.cuda.graph_pool_handle()
        return keys

    def on_stream(self) -> AbstractContextManager[object]:
        """Context of the stream on which graphs are captured and replayed."""
        return self._stream.current()

    def wait_for_caller(self) -> None:
        """Makes the runner's stream wait for the work on the caller's current stream."""
        self._stream.wait_for_caller()

    def describe(self) -> str:
        """Describes each graph in one line."""
        lines = [
            f"{describe(key)}: {captured.nodes} nodes, {captured.seconds * 1e3:.0f} ms to capture, "
            f"{captured.bytes / 2**20:.1f} MiB"
            for key, captured in self._graphs.items()
        ]
        lines += [f"{describe(key)}: not captured, {reason}" for key, reason in self._failures.items()]
        head = (
            f"{len(self._graphs)} captured, one per shape of a step or prompt pass; {self.depth} steps launched ahead"
        )
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
            gc.disable()  # a finaliser of garbage may make a CUDA call that fails during a capture
            try:
                # other threads may make CUDA calls during the capture
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                # read after capture_begin, because torch allocates its generator state there
                held = torch.cuda.memory_allocated(self._device)
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
    """CUDA stream of one runner. When the runner is freed, the next runner may use the stream.

    cuBLAS keeps a work area for each stream until the process ends, and captured graphs use it. So runners that exist
    at the same time must not share a stream. Streams are reused, because every new stream would leak 32 MiB.
    """

    def __init__(self, device: torch.device, owner: object) -> None:
        free = _free_streams(device)
        self._device = device
        self._stream = free.pop() if free else _new_stream(device)
        self._finalizer = weakref.finalize(owner, free.append, self._stream)

    @contextmanager
    def current(self) -> Any:
        """Makes device and stream current."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def wait_for_caller(self) -> None:
        """Makes the stream wait for the caller's current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def discard(self) -> None:
        """Prevents other runners from using this stream later."""
        self._finalizer.detach()


@cache
def _free_streams(device: torch.device) -> list[torch.cuda.Stream]:
    return []


@cache
def _taken_streams(device: torch.device) -> set[int]:
    """Returns the handles of all streams that runners have had, also of discarded ones."""
    return set()


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """Makes a stream that no runner has had.

    torch hands out its STREAMS streams of a device in turn. If runners have had all of them, they share streams.
    """
    taken = _taken_streams(device)
    for _ in range(STREAMS):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in taken:
            break
    taken.add(stream.cuda_stream)
    return stream


def _node_count(graph: torch.cuda.CUDAGraph) -> int:
    """Returns the number of nodes of a graph, by cuGraphGetNodes of the driver."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))
    if status:
        raise RuntimeError(f"cuGraphGetNodes failed with status {status}")
    return count.value
