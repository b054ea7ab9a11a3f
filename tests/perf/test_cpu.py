"""`python -m perf cpu` on the shipped pair: every way gives a row, and the texts of exact ways are equal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastspec import demo_pair
from perf.__main__ import main, parser


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_way_gives_a_row(tmp_path: Path) -> None:
    target, draft = map(str, demo_pair())
    out = tmp_path / "cpu.jsonl"
    given = ["cpu", "--target", target, "--draft", draft, "--new", "6", "--rounds", "1", "--out", str(out)]
    rows = main([*given, "--commit", "abc"])
    by_name = {str(row["engine"]): row for row in rows}
    exact = {"plain", "lookup, k = 4", "lookup, k = 8", "lookup, auto", "draft, k = 4", "draft, auto"}
    theirs = {"plain", "prompt lookup", "assistant"}
    ours = {f"fastspec {name}" for name in (*exact, "plain, exact=False")}
    assert set(by_name) == ours | {f"transformers {name}" for name in theirs}
    for name in exact:
        assert by_name[f"fastspec {name}"]["text_equal"] == 3, name
    assert by_name["transformers plain"]["over_plain"] == 1
    assert all(float(str(row["tok_cpu_s"])) > 0 for row in rows)
    assert float(str(by_name["fastspec plain"]["load_s"])) > 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["engine"] for row in written] == list(by_name)
    assert {(row["commit"], row["workload"]) for row in written} == {("abc", "target")}


def test_help_needs_no_plots(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    assert "cpu" in capsys.readouterr().out
