"""Rates of a pair by formats: what calls of two lengths differ by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf import __main__ as cli
from perf import records
from perf.experiment import Call
from perf.quantised import Pair, columns


def call(seconds: float, emitted: int, steps: int) -> Call:
    output: Any = SimpleNamespace(stats=SimpleNamespace(seconds=seconds, emitted=emitted, steps=steps))
    return Call(emitted, steps, steps, seconds, None, [], output=output)


def test_rates_are_of_the_steps_alone() -> None:
    pairs = [Pair(call(1.5, 16, 6), call(2.5, 96, 26)), Pair(call(3.5, 16, 4), call(5.5, 96, 44))]
    assert columns(pairs) == {"tok_s": 53.3, "ms_step": 50.0, "tokens_per_step": 2.667}


@pytest.mark.filterwarnings("ignore:the tokenizers:UserWarning")
def test_a_pair_is_measured_by_format(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    small = ["--workload", "tiny", "--cases", "bf16+bf16", "--k", "0", "2", "--prompts", "1", "--new", "24"]
    rows = cli.main(["quantised", *small, "--device", "cpu", "--out", str(out)])
    assert [(row["case"], row["k"], row["texts_equal"], row["prompts"]) for row in rows] == [
        ("bf16+bf16", 0, True, 1),
        ("bf16+bf16", 2, True, 1),
    ]
    assert records.read(out) == rows
