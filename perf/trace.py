"""What a profiler's trace says about steps: launches, synchronisations, copies, and how long the GPU waits."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from perf.records import Row

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver")
_GRAPH, _KERNEL = ("GraphLaunch",), ("LaunchKernel", "LaunchCooperative")
_SYNC = ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize", "CtxSynchronize")
_COPY = ("Memcpy",)

Span = tuple[float, float]


def analyse(events: Iterable[dict[str, Any]], steps: int) -> Row:
    """Reads a Chrome trace of `steps` consecutive steps.

    Args:
        events: its "traceEvents": times in microseconds, `cat` and `args` as torch.profiler writes them.
        steps: made while it was recorded.

    Returns:
        Host calls per step by kind; of the graph launched most often (the step) the median span of a launch, its
        kernels, the time within it that no kernel ran, and the time between two launches that the GPU did nothing.
        Without GPU events only what there is: no graph, no gaps.

    Raises:
        ValueError: steps is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}, wanted at least 1")
    calls: Counter[str] = Counter()
    launched: dict[int, float] = {}
    work: dict[int, list[Span]] = defaultdict(list)
    kinds: Counter[str] = Counter()
    for event in events:
        category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
        correlation = (event.get("args") or {}).get("correlation")
        if category in ON_HOST:
            calls[_kind(name)] += 1
            if _matches(name, _GRAPH) and correlation is not None:
                launched[correlation] = float(event["ts"])
        elif category in ON_GPU:
            kinds[category] += 1
            work[-1 if correlation is None else correlation].append((event["ts"], event["ts"] + event.get("dur", 0)))
    row: Row = {f"{kind}_per_step": round(calls[kind] / steps, 3) for kind in ("graph", "launch", "sync", "copy")}
    row["gpu_copies_per_step"] = round((kinds["gpu_memcpy"] + kinds["gpu_memset"]) / steps, 3)
    row["traced_steps"] = steps
    return row | _gaps(launched, work)


def _kind(name: str) -> str:
    for kind, parts in (("graph", _GRAPH), ("launch", _KERNEL), ("sync", _SYNC), ("copy", _COPY)):
        if _matches(name, parts):
            return kind
    return "other"


def _matches(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)


def _gaps(launched: dict[int, float], work: dict[int, list[Span]]) -> Row:
    """Spans and idle times around launches of the commonest graph, told from others by its number of kernels."""
    sizes = Counter(len(work[launch]) for launch in launched if work.get(launch))
    if not sizes:
        return {"graph_kernels": None, "step_us": None, "idle_within_us": None, "idle_between_us": None}
    size = sizes.most_common(1)[0][0]
    steps = sorted(_extent(work[launch]) for launch in launched if len(work.get(launch, ())) == size)
    busy = merge(span for spans in work.values() for span in spans)
    between = [_idle(busy, before[1], after[0]) for before, after in itertools.pairwise(steps)]
    within = [_idle(busy, start, end) for start, end in steps]
    return {
        "graph_kernels": size,
        "step_us": round(statistics.median(end - start for start, end in steps), 2),
        "idle_within_us": round(statistics.median(within), 2),
        "idle_between_us": round(statistics.median(between), 2) if between else None,
        "idle_between_us_max": round(max(between), 2) if between else None,
    }


def _extent(spans: list[Span]) -> Span:
    return min(start for start, _ in spans), max(end for _, end in spans)


def merge(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans as one each, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _idle(busy: list[Span], start: float, end: float) -> float:
    """Time in start..end that no span of the merged list covers; 0 if they overlap."""
    first = max(0, bisect.bisect_left(busy, (start, start)) - 1)  # the one before may reach into it
    covered = 0.0
    for begin, stop in busy[first:]:
        if begin >= end:
            break
        covered += max(0.0, min(end, stop) - max(start, begin))
    return max(0.0, end - start - covered)
