"""`perf lookup`: the searches that are timed, and the rows of both halves on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fastspec.kernels import reference
from perf import __main__ as cli
from perf.lookup import COPY, DRAWN, EDIT, Search, call_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(("predicted", "table"), [(0, 0), (64, 0), (0, 512), (64, 512)])
def test_texts_match_where_their_names_say_it(predicted: int, table: int) -> None:
    """The row itself, or its prediction, drafts behind an edit; shared texts do not, but the row is searched, too."""
    counts = {
        kind: reference.look_up(call_of(Search(128, predicted, table, kind), 3, CPU), 15)[1].tolist()
        for kind in (DRAWN, COPY, EDIT)
    }
    assert counts[DRAWN] == [0] * 3
    assert min(counts[COPY]) == 15
    assert min(counts[EDIT]) > 0


def test_the_command_records_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    line = ["lookup", "--small", "--batches", "2", "--k", "8", "--new", "24", "--rounds", "1", "--device", "cpu"]
    cli.main([*line, "--out", str(out), "--commit", "0000000"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    searches, decoded = rows[:-2], rows[-2:]
    assert len(searches) == 8
    assert all(row["us"] > 0 and row["engine"] == "torch" for row in searches)
    assert [row["k"] for row in decoded] == [8, "auto"]
    assert all(row["text_equal"] and row["batch"] == 2 and row["new"] == 24 for row in decoded)
    assert decoded[0]["tokens_per_pass"] > 1.5
