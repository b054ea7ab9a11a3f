"""`perf ranks`: what its processes are asked for, and rows beside those of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import __main__ as cli
from perf import ranks
from perf.records import ROOT

OWN = ("--target", str(ROOT / "fastspec/demo/target"), "--draft", str(ROOT / "fastspec/demo/draft"), "--device", "cpu")
SMALL = ("--batches", "1", "2", "--ks", "0", "3", "--prompt", "24", "--new", "12")


def rows_of(tmp_path: Path, *more: str) -> list[dict[str, object]]:
    out = tmp_path / "rows.jsonl"
    cli.main(["ranks", *OWN, *SMALL, *more, "--out", str(out), "--commit", "0000000"])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_rows_stand_beside_those_of_the_first_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def said_by(command: list[str], env: object) -> str:
        given = json.loads(command[-1])
        asked.append((command[1:-1], given["options"]))
        several = given["row"]["ranks"] > 1
        rows = [
            {**given["row"], "batch": batch, "k": k, "text": f"{batch}{several and k}", "ms_step": 2.0 - several}
            for batch in given["batches"]
            for k in given["ks"]
        ]
        return "a line of a library\n" + "\n".join(json.dumps([row]) for row in rows) + "\n"

    monkeypatch.setattr(ranks, "said_by", said_by)
    rows = rows_of(tmp_path, "--ranks", "1", "8", "--drafts", "cut")
    assert [(row["ranks"], row["batch"], row["k"]) for row in rows] == [
        (number, batch, k) for number in (1, 8) for batch in (1, 2) for k in (0, 3)
    ]
    assert [row["over_one"] for row in rows] == [1.0] * 4 + [2.0] * 4
    assert [row["same_text"] for row in rows] == [True] * 4 + [False, False] * 2
    (alone, first), (together, second) = asked
    assert alone == ["-m", "perf.ranks_worker"]
    assert "tensor_parallel" not in first
    assert together[:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    assert (second["tensor_parallel"], second["draft_tensor_parallel"]) == (8, "split")


@pytest.mark.slow
def test_two_ranks_write_the_text_of_one(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--ranks", "1", "2")
    assert all(row["same_text"] for row in rows)
    assert len({row["text"] for row in rows}) == 2, "one text for each batch"
