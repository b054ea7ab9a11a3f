"""Tables of what was measured on a CPU, for docs/results.md: decoding beside transformers, drafters, perplexity."""

from __future__ import annotations

from collections.abc import Sequence

from perf.records import Row

FILES = ("cpu", "tasks", "perplexity")

Column = tuple[str, str]  # key of a row, heading
DECODING: tuple[Column, ...] = (
    ("workload", "model"), ("dtype", "dtype"), ("threads", "threads"), ("prompt", "prompt"), ("engine", "engine"),
    ("tok_cpu_s", "tok per CPU second"), ("over_plain", "over transformers plain"), ("text_equal", "texts equal"),
    ("commit", "commit"),
)  # fmt: skip
DRAFTERS: tuple[Column, ...] = (
    ("workload", "model and tasks"), ("drafter", "drafter"), ("k", "k"),
    ("tokens_per_step", "tokens/step"), ("tokens_per_step_95", "95% interval"), ("acceptance", "acceptance"),
    ("text_equal", "texts equal"), ("commit", "commit"),
)  # fmt: skip
PERPLEXITY: tuple[Column, ...] = (
    ("workload", "model and text"), ("format", "format"), ("mib", "MiB"), ("perplexity", "perplexity"),
    ("over_stored", "nats over those as stored"), ("over_stored_95", "95% interval"), ("commit", "commit"),
)  # fmt: skip
Part = tuple[str, Sequence[Row], Sequence[Column]]


def newest(rows: Sequence[Row], bench: str, *keys: str) -> list[Row]:
    """The last row of a bench for every value of the keys, in the order of the last run."""
    latest: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.get("bench") == bench:
            key = tuple(row.get(name) for name in keys)
            latest.pop(key, None)
            latest[key] = row
    return list(latest.values())


def parts(rows: Sequence[Row]) -> list[Part]:
    """Headings, rows and columns of the tables."""
    tasks = [
        {**row, "model": row["workload"].split(",")[0]}
        for row in rows
        if row.get("bench") == "tasks"
        and row["kind"] == "all"
        and row["temperature"] == 0
        and row["drafter"] != "plain"
    ]
    return [
        (
            "Decoding on a CPU, beside transformers",
            newest(rows, "cpu", "workload", "dtype", "threads", "prompt", "engine"),
            DECODING,
        ),
        ("Drafters on tasks, greedy, on a CPU", newest(tasks, "tasks", "model", "drafter", "k"), DRAFTERS),
        ("Perplexity by format", newest(rows, "perplexity", "workload", "format"), PERPLEXITY),
    ]
