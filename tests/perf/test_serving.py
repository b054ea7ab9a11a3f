"""`python -m perf serving` on a CPU: what is measured in the process, and servers that do not come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import __main__ as cli
from perf import serving
from perf.servers import Line, words

pytestmark = pytest.mark.filterwarnings("ignore:the tokenizers:UserWarning")


def test_handles_are_measured_against_generate(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    line = ["serving", "--workload", "tiny", "--requests", "2", "--prompt", "8", "--new", "4", "--engines", "handles"]
    cli.main([*line, "--device", "cpu", "--out", str(out), "--commit", "0000000"])
    rows = [json.loads(text) for text in out.read_text().splitlines()]
    assert [row["how"] for row in rows] == ["generate", "submit", "submit, one event loop"]
    assert all(row["status"] == "ok" and row["tok_s"] > 0 and len(row["seconds"]) == serving.ROUNDS for row in rows)
    assert rows[0]["over_generate"] == 1.0
    assert all(row["ms_cpu_token"] > 0 for row in rows)


@pytest.mark.parametrize(("code", "says"), [("raise SystemExit(3)", "ended with 3"), ("print('sorry')", "sorry")])
def test_a_server_that_ends_is_told(code: str, says: str, tmp_path: Path) -> None:
    load = serving.Load(["t1"], [[1]], 4, 2, tmp_path, tmp_path, "cpu")
    with pytest.raises(RuntimeError, match=says):
        list(serving._served(Line("x", ["-c", code], "model"), load))


def test_words_are_ids() -> None:
    tokenizer = words(32)
    assert tokenizer("t3 t31 t0")["input_ids"] == [3, 31, 0]
    assert tokenizer.decode([3, 31, 0]) == "t3 t31 t0"
