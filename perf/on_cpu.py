"""Tables of what was measured on a CPU, for docs/results.md: decoding beside transformers, drafters, perplexity."""

from __future__ import annotations

from collections.abc import Sequence

from perf.records import Row

FILES = ("cpu", "tasks", "perplexity", "training")

Column = tuple[str, str]  # key of a row, heading
DECODING: tuple[Column, ...] = (
    ("workload", "model"), ("dtype", "dtype"), ("threads", "threads"), ("prompt", "prompt"),
    ("tok_cpu_s", "transformers plain, tok per CPU second"), ("transformers prompt lookup", "its lookup, times plain"),
    ("transformers assistant", "its assistant"), ("fastspec plain", "fastspec plain"),
    ("fastspec plain, exact=False", "exact=False"), ("fastspec lookup, k = 4", "lookup, k = 4"),
    ("fastspec lookup, auto", "lookup, auto"), ("fastspec draft, k = 4", "draft, k = 4"), ("commit", "commit"),
)  # fmt: skip
DRAFTERS: tuple[Column, ...] = (
    ("workload", "model and tasks"), ("kinds", "kinds of tasks"), ("drafter", "drafter"), ("k", "k"),
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


def of_drafters(rows: Sequence[Row]) -> list[Row]:
    """The newest greedy row over all tasks for each model, kinds of tasks, drafter and k."""
    greedy = [row for row in rows if row.get("bench") == "tasks" and row["temperature"] == 0]
    kinds: dict[tuple[str, str], dict[str, None]] = {}
    for row in greedy:
        if row["kind"] != "all":
            kinds.setdefault((row["workload"], row["commit"]), {})[row["kind"]] = None
    whole = [
        row | {"model": row["workload"].partition(",")[0], "kinds": ", ".join(sorted(kinds[run]))}
        for row in greedy
        if row["kind"] == "all" and row["drafter"] != "plain" and (run := (row["workload"], row["commit"])) in kinds
    ]
    return newest(whole, "tasks", "model", "kinds", "drafter", "k")


def parts(rows: Sequence[Row]) -> list[Part]:
    """Headings, rows and columns of the tables."""
    return [
        ("Decoding on a CPU, in multiples of transformers", by_workload(rows), DECODING),
        ("Drafters on tasks, greedy, on a CPU", of_drafters(rows), DRAFTERS),
        ("Perplexity by format", newest(rows, "perplexity", "workload", "format"), PERPLEXITY),
    ]
