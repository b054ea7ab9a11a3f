"""What a trainer asks for is measured: scores, updates, rollouts and their tail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator
from fastspec.engine import settings
from fastspec.kernels.triton_ops import TRITON_OPS
from perf import __main__ as cli
from perf import records, shaped
from perf.training import SETS, Task, drafts_of, tail
from perf.workloads import WORKLOADS


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


def test_the_plan_of_256_rows_on_a_gpu_of_80_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8B: 2048 tokens a row with K and V in 8 bits; in 16 bits these alone take 64 GiB beside weights of 15."""
    (task,) = (each for each in SETS["all"] if each.card)
    assert (task.rows, task.prompt + task.new, task.kv, task.card) == (256, 2048, "fp8", 80)
    monkeypatch.setattr(settings, "free_bytes", lambda device: task.card * 10**9)
    monkeypatch.setattr(settings, "ops_for", lambda device: TRITON_OPS)
    for role in ("target", "draft"):
        config = WORKLOADS["8b+1b"].config(role)
        told = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        shaped.write(tmp_path / role, told, shaped.shapes_of(config, torch.bfloat16), {})
    options: dict[str, Any] = {"num_speculative_tokens": "auto", "verification": "coupled", "max_length": 2048}
    options |= {"max_batch_size": task.rows, "device": "cpu", "dtype": "bfloat16"}
    plan = FastSpecGenerator.plan(tmp_path / "target", tmp_path / "draft", kv_dtype="fp8", **options)
    assert plan.target_cache > 256 * 2048 * 2**16  # 64 KiB a token
    assert plan.total < 0.9 * task.card * 10**9
    with pytest.raises(MemoryError, match=r"largest max_length that fits is 1\d\d\d;"):
        FastSpecGenerator.plan(tmp_path / "target", **options)
