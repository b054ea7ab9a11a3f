"""Steps under Nsight Systems: `nsys profile` around a run, and its SQLite export read into the same rows.

The reader follows NVIDIA's published description of the export (Nsight Systems, "SQLite Schema Reference"): times in
nanoseconds, names as numbers into StringIds, tables that are there only when something was recorded. It has met no
export of a real run yet, and its rows say so. Where nsys is not installed the same rows come from torch.profiler.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from fastspec import FastSpecGenerator
from perf.models import Run
from perf.phases import advance, settled, steady_steps
from perf.recording import Event, Recording
from perf.records import ROOT

READ_BY = "nsys (reader unverified: written from the published schema)"
CALLS, STRINGS, NAMED = "CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds", "NVTX_EVENTS"
WORK = {
    "kernel": ("CUPTI_ACTIVITY_KIND_KERNEL", "shortName"),
    "gpu_memcpy": ("CUPTI_ACTIVITY_KIND_MEMCPY", None),
    "gpu_memset": ("CUPTI_ACTIVITY_KIND_MEMSET", None),
}
RANGE_TYPES = (59, 60)  # NvtxPushPopRange and NvtxStartEndRange
TIMEOUT = 500  # seconds for a whole run under nsys


class NotAnExport(ValueError):
    """A file is no SQLite export of Nsight Systems, or lacks what is needed of one."""


def of_sqlite(path: Path) -> Recording:
    """Reads what `nsys export --type=sqlite` wrote.

    Raises:
        NotAnExport: it is no such file, or holds no CUDA calls.
    """
    if not path.is_file():
        raise NotAnExport(f"{path.name}: there is no such file")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        try:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        except sqlite3.DatabaseError as error:
            raise NotAnExport(f"{path.name} is no SQLite file: {error}") from error
        if missing := {CALLS, STRINGS} - tables:
            raise NotAnExport(f"{path.name} has no table {', '.join(sorted(missing))}; was CUDA traced?")
        calls = _events(
            database,
            f"SELECT s.value, c.start, c.end, c.correlationId FROM {CALLS} c JOIN {STRINGS} s ON s.id = c.nameId",
            "call",
        )
        work = [event for kind in WORK for event in _work(database, tables, kind)]
        return Recording(calls, sorted(work, key=lambda event: event.start), _ranges(database, tables), READ_BY)


def _work(database: sqlite3.Connection, tables: set[str], kind: str) -> list[Event]:
    table, name = WORK[kind]
    if table not in tables:
        return []  # tables are made when the first event of their kind comes
    if name is None:
        return _events(database, f"SELECT '{kind}', start, end, correlationId FROM {table}", kind)
    query = f"SELECT s.value, w.start, w.end, w.correlationId FROM {table} w JOIN {STRINGS} s ON s.id = w.{name}"
    return _events(database, query, kind)


def _ranges(database: sqlite3.Connection, tables: set[str]) -> list[Event]:
    """Ranges that were ended; their text lies in the event, or among the strings when it was registered."""
    if NAMED not in tables:
        return []
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({NAMED})")}
    registered = "textId" in columns
    text = "COALESCE(n.text, s.value, '')" if registered else "COALESCE(n.text, '')"
    join = f"LEFT JOIN {STRINGS} s ON s.id = n.textId" if registered else ""
    types = ", ".join(map(str, RANGE_TYPES))
    query = (
        f"SELECT {text}, n.start, n.end, NULL FROM {NAMED} n {join} "
        f"WHERE n.eventType IN ({types}) AND n.end IS NOT NULL"
    )
    return _events(database, query, "range")


def _events(database: sqlite3.Connection, query: str, kind: str) -> list[Event]:
    """Events of a query for (name, start, end, correlation), nanoseconds made microseconds, in order of start."""
    rows = database.execute(f"{query} ORDER BY 2")
    return [Event(name, kind, start / 1e3, end / 1e3, correlation) for name, start, end, correlation in rows]


def command_of(program: str, output: Path, inside: Sequence[str]) -> list[str]:
    """The command line that profiles `python -m perf ...`, and exports what it finds next to `output`.

    Only what lies between cudaProfilerStart and cudaProfilerStop is recorded, and graphs node by node: as one piece
    they would have no kernels.
    """
    options = (
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--cuda-graph-trace=node",
        "--export=sqlite",
        "--force-overwrite=true",
        f"--output={output}",
    )
    return [program, "profile", *options, sys.executable, "-m", "perf", *inside]


def profile(inside: Sequence[str], directory: Path, say: Callable[[str], None] = lambda _: None) -> Path | None:
    """Runs `python -m perf ...` under nsys; the export, or None where nsys is not installed.

    Raises:
        RuntimeError: nsys failed, or wrote nothing.
    """
    program = shutil.which("nsys")
    if program is None:
        return None
    output = directory / "steps"
    command = command_of(program, output, inside)
    say(" ".join(command))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    export = output.with_suffix(".sqlite")
    if done.returncode or not export.is_file():
        raise RuntimeError(
            f"nsys gave no export (exit {done.returncode}): {(done.stderr or done.stdout).strip()[-400:]}"
        )
    return export


def record_steps(generator: FastSpecGenerator, run: Run, k: int) -> int:
    """Makes the steps that `nsys profile` records, between cudaProfilerStart and Stop; returns how many.

    Args:
        generator: made with nvtx=True, so that the steps have ranges.

    Raises:
        ValueError: there are too few steps.
    """
    stream = settled(generator, run, k)
    if stream is None:
        raise ValueError(f"a call of {run.new} new tokens has too few steps to record")
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    made = advance(stream, steady_steps(run, k))
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    advance(stream, run.new)
    return made
