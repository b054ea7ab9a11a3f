"""Where a step's time goes: wall time over many steps, and a profiler's trace of some of them.

Kept to what any loop offers: `generate` with its statistics, and `stream`. What happens inside a step is read off
the trace.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fastspec import FastSpecGenerator
from perf.e2e import Run, fastspec_call
from perf.records import Row
from perf.trace import analyse

STEPS = 200  # consecutive steps of one call that are timed
TRACED = 40  # steps that are traced: enough for a median, and a trace of some megabytes
SETTLE = 8  # steps before those


def phase_rows(generator: FastSpecGenerator, run: Run, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """A row for every k: time per step, and what the trace says.

    The difference of two rows' steps over the difference of their k is what one more draft costs; each row that
    drafts has it as `draft_ms`, against k = 0. Tracing slows the launches down: times come from the untraced call,
    the trace gives counts and gaps.

    Args:
        generator: made for the largest k, and for run.new tokens more than the prompts hold.
        run: its `new` should leave STEPS steps for every k; a row says how many there were.
    """
    rows: list[Row] = []
    for k in dict.fromkeys((0, *run.ks)):
        fastspec_call(generator, run, 0, k=k, new=min(SETTLE, run.new))
        call = fastspec_call(generator, run, 0, k=k)
        step = call.step_seconds
        row: Row = {
            "engine": f"fastspec k={k}" if k else "fastspec plain",
            "k": k,
            "status": "ok",
            "steps": call.steps,
            "ms_step": None if step is None else round(step * 1e3, 4),
            "tokens_per_pass": round(call.tokens / call.row_steps, 3) if call.row_steps else None,
        }
        if rows and k and step is not None and rows[0]["ms_step"] is not None:
            row["draft_ms"] = round((step * 1e3 - rows[0]["ms_step"]) / k, 4)
        rows.append(row | traced(generator, run, k))
        say(f"k = {k}")
    return rows


def traced(generator: FastSpecGenerator, run: Run, k: int, steps: int = TRACED) -> Row:
    """Counts and gaps of some consecutive steps; on a CPU a row that says that there is no trace."""
    if torch.device(run.device).type != "cuda":
        return {"trace": "none on a CPU"}
    stream = iter(generator.stream(run.batches[0], max_new_tokens=run.new, num_speculative_tokens=k, **run.options(0)))
    if _advance(stream, SETTLE) < SETTLE:
        return {"trace": "too few steps"}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        made = _advance(stream, steps)
        torch.cuda.synchronize()
    _advance(stream, run.new)
    if not made:
        return {"trace": "too few steps"}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return {"trace": "ok", **analyse(events, made)}


def _advance(stream: Iterator[object], steps: int) -> int:
    """Takes up to so many steps; returns how many there were."""
    return sum(1 for _ in zip(range(steps), stream, strict=False))
