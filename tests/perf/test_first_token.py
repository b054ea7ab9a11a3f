"""The time to the first token as a command, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

from perf import __main__ as cli
from perf import first_token


def test_rows_of_a_tiny_model(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    line = ["prompts", "--small", "--cases", "2x40", "--device", "cpu", "--out", str(out), "--commit", "0000000"]
    cli.main(line)
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    assert [(row["batch"], row["prompt"], row["k"], row["status"]) for row in rows] == [
        (2, 40, 0, "ok"),
        (2, 40, 4, "ok"),
    ]
    assert all(row["first_ms"] > 0 and "vllm_ms" not in row for row in rows)


def test_formats_are_compared_with_the_first(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    line = ["prompts", "--small", "--cases", "1x40", "--ks", "0", "--formats", "bf16", "fp8", "--device", "cpu"]
    cli.main([*line, "--out", str(out), "--commit", "0000000"])
    stored, fp8 = (json.loads(row) for row in out.read_text().splitlines())
    assert (stored["format"], stored["over_first_format"], fp8["format"]) == ("bf16", 1.0, "fp8")
    assert fp8["over_first_format"] == round(fp8["first_ms"] / stored["first_ms"], 3)


def test_cases_are_named_by_batch_and_prompt() -> None:
    assert first_token.case_of("8x512") == (8, 512)
