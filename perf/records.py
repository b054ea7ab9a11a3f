"""Measurements as lines of JSON, with hardware, software and commit. Nothing names a person's machine."""

from __future__ import annotations

import datetime
import json
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "perf" / "results"
PACKAGES = ("torch", "triton", "transformers")
_PATH = re.compile(r"(?:^|[\s'\"=:(])(?:/|~/|[A-Za-z]:\\)[\w.-]+[/\\]")
UNKNOWN = "unknown"
DIRTY = "+dirty"  # behind the commit of a tree whose files were changed

Row = dict[str, Any]


def environment(device: torch.device | str | None = None, commit: str | None = None) -> Row:
    """Hardware, software, commit and date of a row.

    Args:
        device: the one measured; None: CUDA if there is one.
        commit: short hash, where the checkout is not at hand; "+dirty" after it: files were changed.
    """
    cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    row: Row = {
        "device": "cuda" if cuda else "cpu",
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": commit or git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    return row | (gpu_state() if cuda else {})


def gpu_state() -> Row:
    """Driver, clocks and temperature as nvidia-smi has them; "unknown" without it."""
    fields = {
        "driver": "driver_version",
        "sm_mhz": "clocks.sm",
        "memory_mhz": "clocks.mem",
        "celsius": "temperature.gpu",
    }
    command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"]
    answer = _run(command)
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer else [UNKNOWN] * len(fields)
    return dict(zip(fields, values, strict=True))


def git_commit() -> str:
    """Short hash of the checkout, with "+dirty" when files other than results differ from it."""
    commit = _run(["git", "rev-parse", "--short", "HEAD"])
    if not commit:
        return UNKNOWN
    changed = _run(["git", "status", "--porcelain", "--", ".", ":!perf/results"])
    return commit.strip() + (DIRTY if changed else "")


def _version(package: str) -> str:
    try:
        # of what is loaded, if it is: it tells builds apart (2.11.0+cu130), which the metadata may not
        return str(getattr(sys.modules.get(package), "__version__", None) or version(package))
    except PackageNotFoundError:
        return "not installed"


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def append(path: Path | str, rows: Row | list[Row]) -> None:
    """Adds rows to a file of JSON lines.

    Args:
        path: a file; a bare name like "peers" is perf/results/peers.jsonl.

    Raises:
        ValueError: a row names a path or this machine; nothing was written.
    """
    listed = rows if isinstance(rows, list) else [rows]
    for row in listed:
        if (secret := private(row)) is not None:
            raise ValueError(f"{secret!r} names a path or this machine and does not belong into a record")
    file = place(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in listed)


def follow(rows: Iterable[Row], environment: Row, out: str | None) -> list[Row]:
    """All rows with their environment; each is printed as a line of JSON, and appended to `out`, when it is there."""
    listed: list[Row] = []
    for row in rows:
        listed.append(row | environment)
        print(json.dumps(listed[-1]), flush=True)
        if out:
            append(out, listed[-1])
    return listed


def read(path: Path | str) -> list[Row]:
    """All rows of a file, oldest first."""
    return [json.loads(line) for line in place(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def place(path: Path | str) -> Path:
    """The file of a name or path."""
    named = Path(path)
    return RESULTS / f"{named}.jsonl" if named.parent == Path() and not named.suffix else named


def private(value: Any) -> str | None:
    """The first string in a row, however deep, that holds a path or this machine's name; None if there is none."""
    if isinstance(value, dict):
        return next((found for part in (*value, *value.values()) if (found := private(part)) is not None), None)
    if isinstance(value, (list, tuple)):
        return next((found for part in value if (found := private(part)) is not None), None)
    if not isinstance(value, str):
        return None
    host = socket.gethostname()
    named = len(host) > 3 and host != "localhost" and host in value
    return value if named or _PATH.search(value) else None


def table(rows: list[Row], columns: tuple[str, ...]) -> str:
    """Rows as a text table; a column that no row has is left out, and "-" stands for what a row lacks."""
    shown = [column for column in columns if any(row.get(column) is not None for row in rows)]
    cells = [shown, *([cell(row.get(column)) for column in shown] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(shown))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def cell(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list):
        return "..".join(cell(part) for part in value)
    return str(value)
