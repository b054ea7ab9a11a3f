"""What is said of a small model in int4: when, once, and with the numbers that were measured."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from fastspec import FastSpecGenerator, demo_pair
from fastspec.models.checkpoints.quantised.small import MEASURED, SMALL, cost_of_int4

RESULTS = Path(__file__).parents[4] / "perf" / "results" / "perplexity.jsonl"
SMALL_MODEL = r"target_quantization='int4': a model of 7 million parameters loses much of its quality in int4 rounded"


def test_the_numbers_are_rows_of_the_results() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    for name, shown in MEASURED.items():
        found = {row["format"]: row for row in rows if name in row["workload"]}  # the newest row of each format
        formats = ("as stored", "int4", "int4, calibrated", "int8")
        assert [round(found[form]["perplexity"]) for form in formats] == list(shown)


def test_a_model_is_small_below_a_number_of_parameters() -> None:
    assert "a model of 135 million parameters" in (cost_of_int4(134_515_008) or "")
    assert cost_of_int4(SMALL) is None


def test_a_small_target_in_int4_is_warned_of_once() -> None:
    target, draft = demo_pair()
    options = {"device": "cpu", "max_length": 64, "progress": False}
    with pytest.warns(UserWarning, match=SMALL_MODEL) as seen:
        FastSpecGenerator(target, target_quantization="int4", **options).close()  # type: ignore[arg-type]
    assert len(seen) == 1
    assert seen[0].filename == __file__, "it names the caller's line"
    assert "Give target_quantization='int8', or a copy that `fastspec quantize --calibrate FILE` wrote" in str(seen[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FastSpecGenerator(target, target_quantization="int8", **options).close()  # type: ignore[arg-type]
        FastSpecGenerator(target, draft, draft_quantization="int4", **options).close()  # type: ignore[arg-type]
