"""Runners: a step is a callable over static buffers; a runner launches it, or captures it once and replays it.

Knows no model and no state: it gets callables. A captured callable must read and write buffers that outlive the
runner, allocate nothing it needs later, and read nothing back to the host.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

_WARM_UPS = 2  # the first compiles and loads kernels and takes the libraries' work areas; the second finds them there


class Runner(Protocol):
    """Runs a step.

    Attributes:
        static: whether a step is recorded, so that nothing in its launch may depend on lengths.
    """

    static: bool

    def run(self, key: Hashable, body: Callable[[], None], idle: Callable[[], AbstractContextManager[None]]) -> None:
        """Runs `body` once.

        Args:
            key: what `body` depends on besides the contents of its buffers.
            body: the step.
            idle: a context in which running `body` changes nothing that counts.
        """

    def describe(self) -> str:
        """What was captured, in words."""


class EagerRunner:
    """The host launches every operation of every step."""

    static = False

    def run(self, key: Hashable, body: Callable[[], None], idle: Callable[[], AbstractContextManager[None]]) -> None:
        """Calls body."""
        body()

    def describe(self) -> str:
        """One line."""
        return "none captured: every step runs eagerly"


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph and what it took.

    Attributes:
        graph: to replay.
        seconds: warm-up and capture.
        bytes: the shared pool grew by this.
    """

    graph: torch.cuda.CUDAGraph
    seconds: float
    bytes: int


class _StreamPool:
    """Streams to capture on, handed out to one runner at a time and taken back when it goes.

    cuBLAS keeps a work area per stream until the process ends, and captured graphs go on using it: runners that
    live at the same time must not share a stream, and a new stream per runner would lose 32 MiB with each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Stream] = []

    def take(self, owner: object) -> tuple[torch.cuda.Stream, Callable[[], object]]:
        """A stream for as long as `owner` lives, and what to call if it must not be used again."""
        stream = self._free.pop() if self._free else torch.cuda.Stream(self._device)
        return stream, weakref.finalize(owner, self._free.append, stream).detach


@cache
def _streams(device: torch.device) -> _StreamPool:
    return _StreamPool(device)


class GraphRunner:
    """Captures a step when its key is first met, then replays it.

    All graphs share one memory pool: they run one after the other, and none reads what an earlier one left there.

    Args:
        device: where to capture.
    """

    static = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream, self._discard_stream = _streams(device).take(self)

    def run(self, key: Hashable, body: Callable[[], None], idle: Callable[[], AbstractContextManager[None]]) -> None:
        """Replays the graph of `key`, after capturing it when it is new."""
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(body, idle)
            except RuntimeError as error:
                # a stream whose capture failed may stay in that state, and the pool with it
                self._discard_stream()
                self._stream, self._discard_stream = _streams(self._device).take(self)
                self._pool = torch.cuda.graph_pool_handle()
                raise RuntimeError(
                    f"the step ({key}) could not be captured as a CUDA graph: {error}; if it must run all the same, "
                    "graphs=False launches every operation from the host"
                ) from error
        self._graphs[key].graph.replay()

    def describe(self) -> str:
        """A line a graph."""
        if not self._graphs:
            return "none captured yet: each is, when its step first runs"
        lines = [
            f"{key}: {captured.seconds * 1e3:.0f} ms to capture, {captured.bytes / 2**20:.1f} MiB"
            for key, captured in self._graphs.items()
        ]
        return f"{len(lines)} captured, one per kind of step\n           " + "\n           ".join(lines)

    def _capture(self, body: Callable[[], None], idle: Callable[[], AbstractContextManager[None]]) -> Captured:
        start = time.perf_counter()
        before = torch.cuda.memory_reserved(self._device)
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        with idle():
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    body()
                self._stream.synchronize()
                try:
                    # other threads may go on calling CUDA meanwhile
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    body()
                finally:
                    graph.capture_end()
            current.wait_stream(self._stream)
        grown = torch.cuda.memory_reserved(self._device) - before
        return Captured(graph, time.perf_counter() - start, grown)
