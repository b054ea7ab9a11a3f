"""What a trainer asks for is measured: scores, updates, rollouts and their tail."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import __main__ as cli
from perf import records
from perf.training import SETS, Task, drafts_of, tail


def test_the_tail_begins_when_a_tenth_of_the_rows_is_left() -> None:
    """Ten rows, of which nine end at 2 s; the last emits 6 tokens in 3 s more."""
    events = [(1.0, dict.fromkeys(range(10), 2)), (2.0, dict.fromkeys(range(10), 1)), (3.0, {9: 2}), (5.0, {9: 4})]
    assert tail(events, 10) == {"tail_s": 3.0, "tail_tok_s": 2.0}


def test_a_few_rows_are_much_longer_than_the_others() -> None:
    task = Task("rollout", 32, 8, 128, 1920, mean=512)
    lengths = sorted(task.lengths())
    assert lengths == sorted(task.lengths())
    assert len(lengths) == 256
    assert 400 < sum(lengths) / 256 < 600
    assert 1 <= lengths[0] < 20
    assert lengths[229] < 0.75 * lengths[-1] == 0.75 * 1920
    assert Task("rollout", 2, 1, 8, 24).lengths() == [24, 24]


def test_numbers_of_drafts_are_read() -> None:
    assert drafts_of("0,4,auto") == (0, 4, "auto")


def test_names_tell_tasks_apart() -> None:
    for tasks in SETS.values():
        assert len({task.name for task in tasks}) == len(tasks)


@pytest.mark.filterwarnings("ignore:the tokenizers:UserWarning")
@pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning")
def test_each_task_gives_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    line = ["training", "--workload", "tiny", "--tasks", "small", "--device", "cpu", "--peers", "--out", str(out)]
    rows = cli.main(line)
    ours = [row for row in rows if row["engine"] != "vllm"]
    assert [(row["bench"], row["k"]) for row in ours] == [
        ("score", 2), ("score", 0), ("score", 2), ("update", 0), ("rollout", 0), ("rollout", 2), ("rollout", "auto"),
    ]  # fmt: skip
    assert all(row["status"] == "ok" and row["seconds"] > 0 for row in ours)
    assert ours[0]["read_tok_s"] > 0
    assert ours[3]["gb_s"] > 0
    lengths = SETS["small"][-1].lengths()
    for row in ours[4:]:
        assert row["texts_equal"]
        assert row["tokens"] == sum(lengths)
        assert row["tail_s"] < row["seconds"]
    assert ours[4]["drafted"] == 0 < ours[5]["drafted"] <= 2
    assert [row["bench"] for row in rows if row["engine"] == "vllm"] == ["score", "score", "update", "rollout"]
    assert records.read(out) == rows
