"""The parts of a step's time: wall time over many steps, and a profiler's recording of some of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fastspec import FastSpecGenerator
from perf.anatomy import rows_of
from perf.experiment import Call
from perf.models import Run
from perf.recording import of_chrome
from perf.records import Row
from perf.step_hooks import around_steps
from perf.trace import STEP

TRACED = 40  # steps that are traced at most: enough for a median, and a trace of some megabytes
SETTLE = 8  # steps before those


def phase_row(engine: str, k: int, call: Call, plain: float | None) -> Row:
    """The columns of one timed call: time per step, `draft_ms` and `prefill_ms`.

    `draft_ms` is (this step - a plain step) / k. `prefill_ms` is the time to the first token less a step: the prompt's
    passes through the target, and with drafts through the draft too.

    Args:
        engine: name of it.
        k: drafts per step.
        call: untraced, for a trace slows launches down.
        plain: milliseconds of a plain step; None before it is known.
    """
    step = call.step_seconds
    row: Row = {
        "engine": engine,
        "k": k,
        "steps": call.steps,
        "ms_step": None if step is None else round(step * 1e3, 4),
        "tokens_per_pass": round(call.tokens / call.row_steps, 3) if call.row_steps else None,
    }
    if step is not None and call.first is not None:
        row["prefill_ms"] = round(max(0.0, call.first - step) * 1e3, 3)
    if k and step is not None and plain is not None:
        row["draft_ms"] = round((step * 1e3 - plain) / k, 4)
    return row


def steady_steps(run: Run, k: int) -> int:
    """Number of steps after the first few in which no row can end; an end moves other rows, which takes launches."""
    return max(1, min(TRACED, run.new // (k + 1) - SETTLE - 2))


def traced(generator: FastSpecGenerator, run: Run, k: int) -> Row:
    """The columns of a trace of some consecutive steps; on a CPU a row that says that there is none."""
    if torch.device(run.device).type != "cuda":
        return {"status": "ok", "trace": "none on a CPU"}
    stream = settled(generator, run, k)
    if stream is None:
        return {"status": "ok", "trace": "too few steps"}
    with (
        around_steps(generator, lambda key: record_function(f"{STEP}{key}")),
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler,
    ):
        made = advance(stream, steady_steps(run, k))
        torch.cuda.synchronize()
    advance(stream, run.new)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return {"trace": "ok", **rows_of(of_chrome(events), made)}


def settled(generator: FastSpecGenerator, run: Run, k: int) -> Iterator[object] | None:
    """A stream that has made SETTLE steps; None where it may end soon after."""
    if run.new // (k + 1) <= SETTLE + 2:
        return None
    stream = iter(generator.stream(run.batches[0], max_new_tokens=run.new, num_speculative_tokens=k, **run.options(0)))
    advance(stream, SETTLE)
    return stream


def advance(stream: Iterator[object], steps: int) -> int:
    """Takes up to so many steps; returns how many there were."""
    return sum(1 for _ in zip(range(steps), stream, strict=False))
