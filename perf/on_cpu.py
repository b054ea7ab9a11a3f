"""Tables of what was measured on a CPU, for docs/results.md: decoding beside transformers, drafters, perplexity."""

from __future__ import annotations

from collections.abc import Sequence

from perf import on_tasks
from perf.on_tasks import Column, newest
from perf.records import Row

FILES = ("cpu", "tasks", "perplexity", "training")

DECODING: tuple[Column, ...] = (
    ("workload", "model"), ("dtype", "dtype"), ("threads", "threads"), ("prompt", "prompt"),
    ("tok_cpu_s", "transformers plain, tok per CPU second"), ("transformers prompt lookup", "its lookup, times plain"),
    ("transformers assistant", "its assistant"), ("fastspec plain", "fastspec plain"),
    ("fastspec plain, exact=False", "exact=False"), ("fastspec lookup, k = 4", "lookup, k = 4"),
    ("fastspec lookup, k = 8", "k = 8"), ("fastspec lookup, auto", "auto"), ("fastspec draft, k = 4", "draft, k = 4"),
    ("fastspec draft, auto", "auto"), ("commit", "commit"),
)  # fmt: skip
PERPLEXITY: tuple[Column, ...] = (
    ("workload", "model and text"), ("format", "format"), ("mib", "MiB"), ("perplexity", "perplexity"),
    ("over_stored", "nats over those as stored"), ("over_stored_95", "95% interval"), ("commit", "commit"),
)  # fmt: skip
Part = tuple[str, Sequence[Row], Sequence[Column]]


def by_workload(rows: Sequence[Row]) -> list[Row]:
    """A row for each workload: tokens per second of transformers' plain decoding, and each engine's multiple of it."""
    lines: dict[tuple[object, ...], Row] = {}
    for row in newest(rows, "cpu", "workload", "dtype", "threads", "prompt", "engine"):
        key = {name: row.get(name) for name in ("workload", "dtype", "threads", "prompt")}
        line = lines.setdefault(tuple(key.values()), key)
        line |= {row["engine"]: row.get("over_plain"), "commit": row["commit"]}
        if row["engine"] == "transformers plain":
            line["tok_cpu_s"] = row["tok_cpu_s"]
    return list(lines.values())


def parts(rows: Sequence[Row]) -> list[Part]:
    """Headings, rows and columns of the tables."""
    return [
        ("Decoding on a CPU, in multiples of transformers", by_workload(rows), DECODING),
        ("Drafters on tasks, greedy, on a CPU", on_tasks.greedy(rows), on_tasks.GREEDY),
        ("Perplexity by format", newest(rows, "perplexity", "workload", "format"), PERPLEXITY),
    ]
