"""The one timer. CUDA work is timed by events around replays of a captured graph; on a CPU by the wall clock.

Every figure is a median with its interquartile range, after samples beyond 1.5 interquartile ranges of the
quartiles are dropped. `how` says what was timed, so that a CPU's smoke figures are never taken for a GPU's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

OUTLIER = 1.5  # interquartile ranges beyond the quartiles, as in a box plot
SHORTEST_GRAPH = 1e-3  # seconds: below, the gaps between replays and the events' own resolution would show
MOST_CALLS = 2048  # of one graph, so that capturing it stays quick
COLD_SHARE = 5  # copies of the weights together take this many times the L2 cache
NOISE_FLOOR = 0.03  # two timings closer than this are called equal however small their spread

Function = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call.

    Attributes:
        median, minimum, spread: seconds; spread is the interquartile range of the samples kept.
        count: samples kept. dropped: outliers.
        how: "graph" (replays of a captured graph), "events" (launches from the host) or "wall" (a CPU).
        device: "cuda" or "cpu".
    """

    median: float
    minimum: float
    spread: float
    count: int
    dropped: int
    how: str
    device: str

    @property
    def us(self) -> float:
        """Median in microseconds."""
        return self.median * 1e6

    @property
    def ms(self) -> float:
        """Median in milliseconds."""
        return self.median * 1e3

    def gb_s(self, nbytes: int) -> float:
        """Bytes moved per second, in GB/s."""
        return nbytes / self.median / 1e9

    def row(self) -> dict[str, Any]:
        """Fields of a record."""
        return {
            "us": round(self.us, 3),
            "us_min": round(self.minimum * 1e6, 3),
            "us_iqr": round(self.spread * 1e6, 3),
            "samples": self.count,
            "outliers": self.dropped,
            "timed_by": self.how,
            "device": self.device,
        }


def summarise(samples: Sequence[float], how: str, device: str) -> Timing:
    """Median, minimum and interquartile range of samples in seconds, outliers dropped.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("no samples to summarise")
    low, high = _quartiles(samples)
    reach = OUTLIER * (high - low)
    kept = [sample for sample in samples if low - reach <= sample <= high + reach]
    first, third = _quartiles(kept)
    return Timing(statistics.median(kept), min(kept), third - first, len(kept), len(samples) - len(kept), how, device)


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


class _Wall:
    """Timed calls on a CPU."""

    how, device = "wall", "cpu"

    def __init__(self, functions: Sequence[Function], calls: int | None, warmup: int) -> None:
        self._functions, self._calls = functions, calls or 1
        for _ in range(warmup):
            for function in functions:
                function()

    def samples(self, repeats: int) -> list[float]:
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(self._calls):
                for function in self._functions:
                    function()
            taken.append((time.perf_counter() - start) / self._calls / len(self._functions))
        return taken


class _Graph:
    """Timed replays of one graph that holds several calls."""

    how, device = "graph", "cuda"

    def __init__(self, functions: Sequence[Function], calls: int | None, warmup: int) -> None:
        self._functions = functions
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(max(warmup, 1)):  # compiles kernels, loads them, takes the libraries' work areas
                for function in functions:
                    function()
            self._stream.synchronize()
            self._calls = calls or self._enough()
            self._graph = self._capture(self._calls)
            self._graph.replay()
            self._stream.synchronize()

    def _capture(self, calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for _ in range(calls):
                for function in self._functions:
                    function()
        return graph

    def _enough(self) -> int:
        """Calls that make the graph long enough for events."""
        graph = self._capture(1)
        graph.replay()
        once = min(self._replay(graph) for _ in range(3))
        return max(1, min(math.ceil(SHORTEST_GRAPH / max(once, 1e-6)), MOST_CALLS // len(self._functions)))

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def samples(self, repeats: int) -> list[float]:
        pairs = [(_event(), _event()) for _ in range(repeats)]
        with torch.cuda.stream(self._stream):
            for start, end in pairs:  # queued without waiting: the host is ahead, and its launches do not show
                start.record()
                self._graph.replay()
                end.record()
            self._stream.synchronize()
        per_call = 1e3 * self._calls * len(self._functions)
        return [float(start.elapsed_time(end)) / per_call for start, end in pairs]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def on_cuda(device: torch.device | str | None) -> bool:
    """Whether to time on CUDA; None means where there is one."""
    return torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"


def _sampler(
    functions: Function | Sequence[Function], calls: int | None, warmup: int, device: torch.device | str | None
) -> _Graph | _Wall:
    listed = [functions] if callable(functions) else list(functions)
    return (_Graph if on_cuda(device) else _Wall)(listed, calls, warmup)


def graph_time(
    functions: Function | Sequence[Function],
    *,
    repeats: int = 30,
    warmup: int = 2,
    calls: int | None = None,
    device: torch.device | str | None = None,
) -> Timing:
    """Time of one call, from replays of a captured graph.

    Args:
        functions: what to time, or several that take turns (copies over different weights, so that caches are
            cold). They are called several times before anything is timed, and must be capturable.
        repeats: timed replays. warmup: rounds before the capture.
        calls: rounds within one graph. Default: as many as make it last a millisecond.
        device: "cuda", "cpu", or None for CUDA where there is one. On a CPU calls are timed by the wall clock.
    """
    sampler = _sampler(functions, calls, warmup, device)
    return summarise(sampler.samples(repeats), sampler.how, sampler.device)


def copies_for(nbytes: int, device: torch.device | str | None = None) -> int:
    """Copies of weights of `nbytes` that, taking turns, leave none of them in the L2 cache."""
    return max(1, math.ceil(COLD_SHARE * l2_bytes(device) / nbytes))


def l2_bytes(device: torch.device | str | None = None) -> int:
    """Size of the L2 cache; on a CPU 1 MiB, which stands for nothing."""
    if not on_cuda(device):
        return 2**20
    return int(torch.cuda.get_device_properties(torch.device(device or "cuda")).L2_cache_size)


def event_time(
    function: Function,
    *,
    repeats: int = 30,
    warmup: int = 2,
    device: torch.device | str | None = None,
) -> Timing:
    """Time of one call launched from the host, for what cannot be captured. Calls below 20 us show their launch."""
    if not on_cuda(device):
        return graph_time(function, repeats=repeats, warmup=warmup, device="cpu")
    for _ in range(warmup):
        function()
    pairs = [(_event(), _event()) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return summarise([float(start.elapsed_time(end)) / 1e3 for start, end in pairs], "events", "cuda")


def read_ceiling(*, nbytes: int | None = None, repeats: int = 20, device: torch.device | str | None = None) -> float:
    """GB/s at which this machine reads memory: the largest of a few GiB of random int32.

    Args:
        nbytes: size read. Default: 4 GiB on CUDA, 64 MiB on a CPU.
    """
    where = "cuda" if on_cuda(device) else "cpu"
    size = nbytes or (4 * 2**30 if where == "cuda" else 2**26)
    data = torch.empty(size // 4, dtype=torch.int32, device=where).random_()
    return graph_time(lambda: data.amax(), repeats=repeats, calls=1, device=where).gb_s(data.nbytes)
