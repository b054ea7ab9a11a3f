"""The grid of auto against fixed ks: its arithmetic, and a smoke run on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf import __main__ as cli
from perf import auto, records
from perf.auto import FIRST, compared, verdict
from perf.experiment import Call


def call(rate: float, text: list[list[int]]) -> Call:
    output: Any = SimpleNamespace(stats=SimpleNamespace(tokens_per_step=2.0, steps_at={2: 7}))
    return Call(round(rate), None, None, 1.0, None, text, output=output)


def calls(**rates: float) -> dict[str, list[Call]]:
    return {name.replace("_", "="): [call(rate, [[1, 2]])] for name, rate in rates.items()}


def test_rows_say_what_each_way_is_of_the_best() -> None:
    rows = compared(calls(k_0=100.0, k_2=150.0, auto=147.0), (0, 2))
    found = {row["engine"]: (row["over_plain"], row["over_best"], row["best"]) for row in rows}
    assert found == {"k=0": (1.0, 0.667, 2), "k=2": (1.5, 1.0, 2), "auto": (1.47, 0.98, 2)}
    assert rows[-1]["steps_at"] == {"2": 7}
    assert all(row["text_equal"] for row in rows)
    other = calls(k_0=100.0) | {"auto": [call(100.0, [[1, 3]])]}
    assert [row["text_equal"] for row in compared(other, (0,))] == [True, False]


def test_the_verdict_is_the_worst_cell() -> None:
    rows = [
        {"engine": name, "acceptance": rate, "batch": 1, "over_best": best, "over_plain": plain}
        for name, rate, best, plain in [("auto", 0.0, 0.99, 0.98), ("auto", 0.9, 0.96, 2.0), (FIRST, 0.0, 0.9, 0.97)]
    ]
    assert verdict(rows) == [
        "auto: 0.960 of the best fixed k at worst (acceptance 0.9, batch 1)",
        "auto: 0.980 of plain decoding at worst (acceptance 0.0, batch 1)",
        f"{FIRST}: 0.900 of the best fixed k at worst (acceptance 0.0, batch 1)",
        f"{FIRST}: 0.970 of plain decoding at worst (acceptance 0.0, batch 1)",
    ]
    assert verdict([]) == []


def test_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "auto.jsonl"
    small = ["auto", "--workload", "tiny", "--device", "cpu", "--prompt", "8", "--new", "12", "--rounds", "1"]
    rows = cli.main([*small, "--rates", "0.9,planted", "--batches", "2", "--ks", "2", "--out", str(out)])
    tried = {row["engine"] for row in rows if row["engine"].startswith("calibrate")}
    assert tried == {f"calibrate k={k}" for k in (0, 1, 2, 4, 6, 8)}
    assert {(row["acceptance"], row["engine"]) for row in rows if row["engine"] not in tried} == {
        (rate, engine) for rate in (0.9, auto.AGREEMENT) for engine in ("k=0", "k=2", "auto", FIRST)
    }
    stored = records.read(out)
    assert len(stored) == len(rows)
    assert all(("not the model's" in row["acceptance_by"]) == (row["acceptance"] == 0.9) for row in stored)
    assert all(
        row["text_equal"] for row in stored if row["acceptance"] == auto.AGREEMENT and row["engine"] not in tried
    )
    assert "of the best fixed k at worst" in capsys.readouterr().out


def test_a_grid_without_time_says_so(tmp_path: Path) -> None:
    small = ["auto", "--workload", "tiny", "--device", "cpu", "--rates", "0.5", "--batches", "1"]
    rows = cli.main([*small, "--seconds", "-1", "--out", str(tmp_path / "auto.jsonl")])
    assert [(row["acceptance"], row["batch"], row["status"]) for row in rows] == [(0.5, 1, "no time")]
