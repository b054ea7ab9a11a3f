"""Which rows the picture of formats is drawn from."""

from __future__ import annotations

from perf.formats import newest_of_pairs


def test_rows_of_one_run_are_drawn() -> None:
    rows = [
        {"bench": "quantised pair", "commit": "a", "tok_s": 2},
        {"bench": "quantised pair", "commit": "b", "tok_s": 1},
        {"bench": "quantised chain", "commit": "c", "ms": 1},
    ]
    assert newest_of_pairs(rows) == rows[1:2]
    assert newest_of_pairs([]) == []
