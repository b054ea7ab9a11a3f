"""A step taken apart into its kernels: the pass, phase and time of each.

A captured step carries no ranges, so passes are told by their kernels: each begins with the one that feeds tokens. All
passes but the last are the draft's; the last is the target's, and ends with its last matrix product. Kernels after that
verify the drafts, and from the commit kernel on commit them. A kernel that does both is "verify".
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from perf.recording import Event, Recording
from perf.records import Row
from perf.trace import analyse, faults, steps_of

# kind of a kernel, by parts of its name; the first that fits
KINDS = (
    ("norm", ("norm", "regroup_kernel")),
    ("feed", ("_feed", "_embed", "_joined")),
    ("lookup", ("_look_up_kernel", "_strongest_kernel")),
    ("exchange", ("_one_shot_kernel", "_two_shot_kernel", "ranks_kernel", "_gather_kernel", "_largest_kernel")),
    ("attention", ("fragment", "batch_kernel", "_decode_kernel", "gather_kernel", "rotate")),
    ("attention", ("flash", "attend", "fmha", "shares_kernel", "chunk_kernel")),
    ("recurrent", ("_delta_kernel", "_prepare_kernel", "solve_kernel", "_scan_kernel", "_keep_kernel")),
    ("recurrent", ("_conv_kernel", "_mamba_kernel")),
    ("experts", ("expert_kernel", "codes_kernel", "route_kernel", "router_kernel", "list_kernel")),
    ("activation", ("_gelu_kernel", "_gate_kernel")),
    ("loading", ("round_groups", "round_rows")),
    ("verify", ("verify", "_end_kernel")),
    ("commit", ("commit", "publish")),
    (
        "sampler",
        ("_distribution_kernel", "_processed_kernel", "_groups_kernel", "_draw", "softmax", "sort", "scan", "cumsum"),
    ),
    ("product", ("dequantise",)),
    ("product", ("few_rows", "many_rows", "tma_kernel", "sum_kernel", "tile_", "fp32", "hopper", "prefill")),
    ("product", ("gemm", "gemv", "cutlass", "nvjet", "triton_")),  # of torch, cuBLAS and inductor
)
OTHER = "other"
SHOWN = ("product", "attention", "norm", "feed", "sampler", "verify", "commit", OTHER)  # kinds with a column
Timeline = list[list[Any]]  # [phase, kind, start, duration] of each kernel, microseconds from the step's start


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    return next((kind for kind, parts in KINDS if any(part in name.lower() for part in parts)), OTHER)


def phases_of(step: list[Event]) -> list[str]:
    """The phase of each kernel in order: "draft 1" .. "draft k", "score", "verify", "commit"; "" if unknown."""
    kinds = [kind_of(event.name) for event in step]
    starts = [place for place, event in enumerate(step) if "_feed" in event.name]
    if not starts:
        return [""] * len(step)
    last = starts[-1]
    products = [place for place in range(last, len(step)) if kinds[place] == "product"]
    scored = products[-1] if products else len(step) - 1
    commits = [place for place in range(scored + 1, len(step)) if kinds[place] == "commit"]
    found = []
    for place in range(len(step)):
        if place < last:
            found.append(f"draft {max(1, sum(start <= place for start in starts))}")
        elif place <= scored:
            found.append("score")
        else:
            found.append("commit" if commits and place >= commits[0] else "verify")
    return found


def anatomy(recording: Recording) -> Row:
    """Median time of each phase over the steps recorded, of each kind of kernel, and one step kernel by kernel.

    A phase lasts from its first kernel's start to the next phase's, so that phases add up to the step. Kernels that
    are launched early overlap with those before them: times by kind add up to more than the step.
    """
    steps = steps_of(recording)
    if not steps:
        return {}
    lasting: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for phase, took in _extents(step).items():
            lasting[phase].append(took)
        for kind, total in _totals(step).items():
            by_kind[kind].append(total)
    medians = {phase: round(statistics.median(taken), 2) for phase, taken in lasting.items()}
    drafts = [took for phase, took in medians.items() if phase.startswith("draft")]
    middle = sorted(steps, key=_length)[len(steps) // 2]
    return {
        "draft_first_us": drafts[0] if drafts else None,
        "draft_pass_us": round(statistics.median(drafts[1:] or drafts), 2) if drafts else None,
        **{f"{phase}_us": medians.get(phase) for phase in ("score", "verify", "commit")},
        "kind_us": {kind: round(statistics.median(taken), 2) for kind, taken in sorted(by_kind.items())},
        "kind_kernels": {kind: sum(kind_of(event.name) == kind for event in middle) for kind in sorted(by_kind)},
        "timeline": timeline(middle),
    }


def timeline(step: list[Event]) -> Timeline:
    """One step, kernel by kernel."""
    origin = step[0].start
    return [
        [phase, kind_of(event.name), round(event.start - origin, 2), round(event.end - event.start, 2)]
        for phase, event in zip(phases_of(step), step, strict=True)
    ]


def _extents(step: list[Event]) -> dict[str, float]:
    """Microseconds of each phase."""
    begun: dict[str, float] = {}
    for phase, event in zip(phases_of(step), step, strict=True):
        begun.setdefault(phase, event.start)
    starts = [*begun.values(), max(event.end for event in step)]
    return {phase: after - start for phase, start, after in zip(begun, starts[:-1], starts[1:], strict=True) if phase}


def _totals(step: list[Event]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for event in step:
        found[kind_of(event.name)] += event.end - event.start
    return dict(found)


def _length(step: list[Event]) -> float:
    return max(event.end for event in step) - step[0].start


def rows_of(recording: Recording, steps: int) -> Row:
    """The row of a recording: counts, gaps, phases, its reader, and its faults."""
    row: Row = {"read_by": recording.read_by, **analyse(recording, steps), **anatomy(recording)}
    wrong = faults(row)
    return {**row, "status": "ok" if not wrong else "failed: " + "; ".join(wrong)}
