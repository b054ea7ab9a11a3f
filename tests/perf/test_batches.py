"""Large batches and arrivals as commands, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perf import __main__ as cli


def rows_of(tmp_path: Path, *line: str) -> list[dict[str, Any]]:
    out = tmp_path / "rows.jsonl"
    cli.main([*line, "--small", "--device", "cpu", "--out", str(out), "--commit", "0000000"])
    return [json.loads(row) for row in out.read_text().splitlines()]


def test_large_batches_compare_with_plain_and_with_the_best(tmp_path: Path) -> None:
    line = ["large_batches", "--batches", "2", "--ks", "1", "--rates", "0.9", "--new", "6"]
    rows = rows_of(tmp_path, *line)
    assert [(row["batch"], row["k"], row["status"]) for row in rows] == [(2, 0, "ok"), (2, 1, "ok"), (2, "auto", "ok")]
    assert rows[0]["over_plain"] == 1.0
    assert max(row["over_best"] for row in rows[:2]) == 1.0
    assert set(rows[1]["steps_at"]) == {"1"}
    assert rows[1]["workspace_gib"] > 0


def test_no_batch_begins_after_the_time_is_over(tmp_path: Path) -> None:
    line = ["large_batches", "--batches", "2", "4", "--rates", "0.9", "--seconds", "0"]
    assert [row["status"] for row in rows_of(tmp_path, *line)] == ["no time", "no time"]


def test_arrivals_have_times_of_first_tokens_and_between_tokens(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "arrivals", "--arrivals", "1", "2", "--ks", "0", "--new", "4")
    assert [(row["arrivals"], row["k"], row["status"]) for row in rows] == [(1, 0, "ok"), (2, 0, "ok")]
    assert all(0 < row["first_ms"][0] <= row["first_ms"][1] and row["gap_ms"][0] > 0 for row in rows)
