"""Rates of a pair by formats: what calls of two lengths differ by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from perf.quantised import Sums


def output(seconds: float, emitted: int, steps: int) -> Any:
    return SimpleNamespace(stats=SimpleNamespace(seconds=seconds, emitted=emitted, steps=steps))


def test_rates_are_of_the_steps_alone() -> None:
    sums = Sums()
    sums.add(output(1.5, 16, 6), output(2.5, 96, 26))
    sums.add(output(3.5, 16, 4), output(5.5, 96, 44))
    assert sums.columns() == {"tok_s": 53.3, "ms_step": 50.0, "tokens_per_step": 2.667}
