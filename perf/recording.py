"""What a profiler recorded, whichever it was: host calls, work of the GPU, and named ranges, in microseconds."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver")
RANGES = ("user_annotation", "nvtx")
Span = tuple[float, float]


class Event(NamedTuple):
    """One call of the CUDA API, one piece of the GPU's work, or one range.

    Attributes:
        name: as the profiler has it. kind: "call", "range", or what the GPU did: one of ON_GPU.
        start, end: microseconds.
        correlation: the same in a call and the work that it launched; None where there is none.
    """

    name: str
    kind: str
    start: float
    end: float
    correlation: int | None = None

    @property
    def span(self) -> Span:
        """Start and end."""
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded of some consecutive steps, each list in order of start.

    Attributes:
        calls: of the CUDA runtime and driver. work: kernels, copies and fills. ranges: NVTX ranges or annotations.
        read_by: the profiler and what its figures are worth, in words.
    """

    calls: list[Event]
    work: list[Event]
    ranges: list[Event]
    read_by: str = field(default="torch.profiler (CUPTI)")


def of_chrome(events: Iterable[dict[str, Any]]) -> Recording:
    """Reads the "traceEvents" of a Chrome trace as torch.profiler writes it."""
    found = Recording([], [], [])
    for event in events:
        category = str(event.get("cat", "")).lower()
        correlation = (event.get("args") or {}).get("correlation")
        if category in ON_HOST:
            into, kind = found.calls, "call"
        elif category in ON_GPU:
            into, kind = found.work, category
        elif category in RANGES:
            into, kind = found.ranges, "range"
        else:
            continue
        start = float(event["ts"])
        into.append(Event(str(event.get("name", "")), kind, start, start + float(event.get("dur", 0)), correlation))
    for events_of in (found.calls, found.work, found.ranges):
        events_of.sort(key=lambda event: event.start)
    return found


def merge(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans as one each, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def idle(busy: list[Span], start: float, end: float) -> float:
    """Time in start..end that no span of the merged list covers; 0 if they overlap."""
    first = max(0, bisect.bisect_left(busy, (start, start)) - 1)  # the one before may reach into it
    covered = 0.0
    for begin, stop in busy[first:]:
        if begin >= end:
            break
        covered += max(0.0, min(end, stop) - max(start, begin))
    return max(0.0, end - start - covered)
