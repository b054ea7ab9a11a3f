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


def test_steps_stand_beside_those_without_ranks_and_texts_beside_those_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def said_by(command: list[str], env: object) -> str:
        given = json.loads(command[-1])
        asked.append((command[1:-1], given["options"]))
        ranks = given["row"]["tensor_parallel"]
        # without ranks another text; on eight a text that depends on k
        texts = {None: "other", 1: "same", 8: "same"}
        rows = [
            {
                **given["row"],
                "batch": batch,
                "k": k,
                "text": f"{texts[ranks]} {batch} {k if ranks == 8 else 0}",
                "ms_step": {None: 2.0, 1: 2.5, 8: 1.0}[ranks],
            }
            for batch in given["batches"]
            for k in given["ks"]
        ]
        return "a line of a library\n" + "\n".join(json.dumps([row]) for row in rows) + "\n"

    monkeypatch.setattr(ranks, "said_by", said_by)
    rows = rows_of(tmp_path, "--ranks", "1", "8", "--drafts", "cut")
    assert [(row["tensor_parallel"], row["ranks"], row["batch"], row["k"]) for row in rows] == [
        (number, number or 1, batch, k) for number in (None, 1, 8) for batch in (1, 2) for k in (0, 3)
    ]
    assert [row["over_one"] for row in rows] == [1.0] * 4 + [0.8] * 4 + [2.0] * 4
    assert [row["same_text"] for row in rows] == [True] * 8 + [True, False] * 2
    (without, none), (alone, one), (together, eight) = asked
    assert without == alone == ["-m", "perf.ranks_worker"]
    assert "tensor_parallel" not in none
    assert one["tensor_parallel"] == 1
    assert together[:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    assert (eight["tensor_parallel"], eight["draft_tensor_parallel"]) == (8, "split")


@pytest.mark.slow
def test_two_ranks_write_the_text_of_one(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--ranks", "1", "2")
    assert all(row["same_text"] for row in rows)
    of_ranks = [row["text"] for row in rows if row["tensor_parallel"] is not None]
    assert len(set(of_ranks)) == 2, "one text for each batch"
