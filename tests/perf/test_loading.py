"""Loads that are timed: what rows say, and a smoke run on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from fastspec.kernels.common.rounding import FORMATS
from perf import loading
from perf.loading import STORED

CPU = torch.device("cpu")


def test_a_load_is_compared_with_plain_ones_of_the_same_place() -> None:
    seconds = {(STORED, "first"): 2.0, (STORED, "again"): 1.0, ("int4", "first"): 3.0, ("int4", "again"): 1.1}
    rows = [{"target": form, "load": load, "seconds": each} for (form, load), each in seconds.items()]
    rows.append({"target": STORED, "load": "again", "seconds": 1.2})
    assert [row["over_plain"] for row in loading.compared(rows)] == [1.0, 1.0, 1.5, 1.1, 1.2]


def test_every_format_of_a_written_model_is_loaded(tmp_path: Path) -> None:
    loading.write("tiny", tmp_path, CPU)
    for form in (STORED, *FORMATS):
        row = loading.loaded(tmp_path, form, CPU)
        assert row["target"] == form
        assert row["seconds"] > 0
