"""What a recording says about steps: launches, synchronisations, copies, and how long the GPU waits."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict

from perf.recording import Event, Recording, idle, merge
from perf.records import Row

_GRAPH, _KERNEL = ("GraphLaunch",), ("LaunchKernel", "LaunchCooperative")
_SYNC = ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize", "CtxSynchronize")
_COPY = ("Memcpy", "Memset")
STEP = "step: "  # how the name of a step's range begins


def analyse(recording: Recording, steps: int) -> Row:
    """Counts calls and gaps of `steps` consecutive steps.

    Only what the host did from the first launch of a graph to the last one counts: a profiler is started and ended
    with synchronisations of its own.

    Args:
        recording: of the steps.
        steps: made meanwhile; where steps have ranges, those are counted instead.

    Returns:
        Host calls per step by kind; of the graph launched most often (the step) the median span of a launch, its
        kernels, the time within it that no kernel ran, and the time between two launches that the GPU did nothing.
        Without GPU events only what there is: no graph, no gaps.

    Raises:
        ValueError: steps is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}, wanted at least 1")
    launches = outermost([call for call in recording.calls if kind_of(call) == "graph"])
    calls = _steady(recording.calls, launches)
    ranges = [each for each in _steady(recording.ranges, launches, slack=True) if each.name.startswith(STEP)]
    made = len(ranges) or steps
    counts = Counter(kind_of(call) for call in calls)
    between = made * (len(launches) - 1) / len(launches) if len(launches) > 1 else made  # steps that those calls span
    row: Row = {"graph_per_step": round(len(launches) / made, 3)}
    row |= {f"{kind}_per_step": round(counts[kind] / between, 3) for kind in ("launch", "sync", "copy")}
    copies = sum(work.kind in ("gpu_memcpy", "gpu_memset") for work in recording.work)
    row["gpu_copies_per_step"] = round(copies / made, 3)
    row["traced_steps"] = made
    if ranges:
        inside = [sum(each.start <= launch.start <= each.end for launch in launches) for each in ranges]
        row["graphs_in_a_step"] = [min(inside), max(inside)]
    return row | _gaps(recording)


def faults(row: Row) -> list[str]:
    """What a captured step must not do, as far as a row of `analyse` shows it: one sentence each."""
    found = []
    if row.get("graph_per_step") != 1:
        found.append(f"{row.get('graph_per_step')} graph launches per step, wanted 1")
    elif row.get("graphs_in_a_step", [1, 1]) != [1, 1]:
        low, high = row["graphs_in_a_step"]
        found.append(f"{low} to {high} graph launches within a step's range, wanted 1")
    for kind, words in (("sync", "synchronisations"), ("launch", "launches outside the graph")):
        if row.get(f"{kind}_per_step"):
            found.append(f"{row[f'{kind}_per_step']} {words} per step, wanted 0")
    return found


def kind_of(call: Event) -> str:
    """ "graph", "launch", "sync", "copy" or "other"."""
    if "Memcpy" in call.name and "Async" not in call.name:
        return "sync"  # the host waits for it
    for kind, parts in (("graph", _GRAPH), ("launch", _KERNEL), ("sync", _SYNC), ("copy", _COPY)):
        if any(part in call.name for part in parts):
            return kind
    return "other"


def outermost(calls: list[Event]) -> list[Event]:
    """Calls that lie in no other of them: the runtime's launch may show the driver's within it."""
    found: list[Event] = []
    for call in calls:
        if not found or call.end > found[-1].end or call.start >= found[-1].end:
            found.append(call)
    return found


def _steady(events: list[Event], launches: list[Event], *, slack: bool = False) -> list[Event]:
    """Those between the first and the last launch; with slack also those that hold one of the two."""
    if not launches:
        return events
    first, last = launches[0].start, launches[-1].end
    if slack:
        return [event for event in events if event.end >= first and event.start <= last]
    return [event for event in events if first <= event.start <= last]


def steps_of(recording: Recording) -> list[list[Event]]:
    """The GPU's work of each launch of the commonest graph, told from others by its number of kernels."""
    launches = [call for call in recording.calls if kind_of(call) == "graph"]
    work: dict[int | None, list[Event]] = defaultdict(list)
    for event in recording.work:
        work[event.correlation].append(event)
    wanted = {call.correlation for call in launches if call.correlation is not None}
    lists = [work[correlation] for correlation in wanted if work.get(correlation)]
    if not lists:
        return []
    size = Counter(map(len, lists)).most_common(1)[0][0]
    return sorted((each for each in lists if len(each) == size), key=lambda each: each[0].start)


def _gaps(recording: Recording) -> Row:
    """Spans and idle times around launches of the step's graph."""
    steps = steps_of(recording)
    if not steps:
        return {"graph_kernels": None, "step_us": None, "idle_within_us": None, "idle_between_us": None}
    extents = [(min(event.start for event in step), max(event.end for event in step)) for step in steps]
    busy = merge(event.span for event in recording.work)
    between = [idle(busy, before[1], after[0]) for before, after in itertools.pairwise(extents)]
    within = [idle(busy, start, end) for start, end in extents]
    return {
        "graph_kernels": len(steps[0]),
        "step_us": round(statistics.median(end - start for start, end in extents), 2),
        "idle_within_us": round(statistics.median(within), 2),
        "idle_between_us": round(statistics.median(between), 2) if between else None,
        "idle_between_us_max": round(max(between), 2) if between else None,
    }
