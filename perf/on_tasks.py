"""Tables of drafters on tasks: on a CPU for docs/results.md, on a GPU for perf/TABLES.md."""

from __future__ import annotations

from collections.abc import Sequence

from perf.records import Row

Column = tuple[str, str]  # key of a row, heading
SHARED: tuple[Column, ...] = (
    ("drafter", "drafter"), ("k", "k"), ("tokens_per_step", "tokens/step"), ("tokens_per_step_95", "95% interval"),
    ("acceptance", "acceptance"),
)  # fmt: skip
END: tuple[Column, ...] = (("text_equal", "texts equal"), ("commit", "commit"))
GREEDY: tuple[Column, ...] = (("workload", "model and tasks"), ("kinds", "kinds of tasks"), *SHARED, *END)
TIMED: tuple[Column, ...] = (
    ("workload", "model and tasks"), ("temperature", "temperature"), *SHARED, ("tok_s", "tok/s"),
    ("tok_s_95", "95% interval"), ("over_plain", "over plain"), *END,
)  # fmt: skip
ALL, PLAIN = "all", "plain"


def newest(rows: Sequence[Row], bench: str, *keys: str) -> list[Row]:
    """The last row of a bench for every value of the keys, in the order of the last run."""
    latest: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.get("bench") == bench:
            key = tuple(row.get(name) for name in keys)
            latest.pop(key, None)
            latest[key] = row
    return list(latest.values())


def greedy(rows: Sequence[Row]) -> list[Row]:
    """The newest greedy row over all tasks for each model, kinds of tasks, drafter and k."""
    found = [row for row in rows if row.get("bench") == "tasks" and row["temperature"] == 0]
    kinds: dict[tuple[str, str], dict[str, None]] = {}
    for row in found:
        if row["kind"] != ALL:
            kinds.setdefault((row["workload"], row["commit"]), {})[row["kind"]] = None
    whole = [
        row | {"model": row["workload"].partition(",")[0], "kinds": ", ".join(sorted(kinds[run]))}
        for row in found
        if row["kind"] == ALL and row["k"] and (run := (row["workload"], row["commit"])) in kinds
    ]
    return newest(whole, "tasks", "model", "kinds", "drafter", "k")


def timed(rows: Sequence[Row]) -> list[Row]:
    """The rows over all tasks of the newest run of each workload and temperature, with the multiple of plain decoding.

    Seconds of two runs do not compare, so a run is shown whole or not at all.
    """
    whole = [row for row in rows if row.get("bench") == "tasks" and row["kind"] == ALL]
    runs = {(row["workload"], row["temperature"]): row["commit"] for row in whole}
    shown = [row for row in whole if runs[row["workload"], row["temperature"]] == row["commit"]]
    plain = {(row["workload"], row["temperature"]): row["tok_s"] for row in shown if row["drafter"] == PLAIN}
    return [row | {"over_plain": round(row["tok_s"] / plain[row["workload"], row["temperature"]], 2)} for row in shown]


def of_the_picture(rows: Sequence[Row]) -> list[Row]:
    """The rows of `timed` of the last workload that was decoded at several temperatures."""
    heats: dict[str, set[float]] = {}
    for row in rows:
        heats.setdefault(row["workload"], set()).add(row["temperature"])
    several = [workload for workload, found in heats.items() if len(found) > 1]
    return [row for row in rows if several and row["workload"] == several[-1]]
