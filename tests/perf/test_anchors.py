"""Published speeds as cases: what is told of them, and that each kind of model is made without weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from fastspec.models.checkpoints.safetensors_files import SINGLE, ShardTensors
from perf import __main__ as cli
from perf import anchors, shaped
from perf.anchors import ANCHORS, HEAD, PATTERN, SHAPES, pattern_of, shorter, small

LENGTHS = {"MT-bench": 3.86, "HumanEval": 4.91, "MATH500": 5.40}  # tokens a pass at k = 7, as published


def test_the_table_has_the_published_figures() -> None:
    found = {anchor.name: anchor for anchor in ANCHORS}
    assert len(found) == len(ANCHORS) == 12
    for task, length in LENGTHS.items():
        seven = found[f"8B, EAGLE-3 k = 7, {task}"]
        assert seven.length == length
        for k in (3, 5):
            fewer = found[f"8B, EAGLE-3 k = {k}, {task}"]
            assert fewer.length is not None
            assert 1 < fewer.length < min(length, k + 1)
            assert "derived" in fewer.source
    assert [found[f"8B, EAGLE-3 k = 7, {task}"].tok_s for task in LENGTHS] == [450, 571.5, 638]
    plain = {anchor.shape: anchor.tok_s for anchor in ANCHORS if not anchor.k}
    assert plain == {"1b": 1050, "qwen3-30b-a3b": 204, "gpt-oss-20b": 248}
    assert all(anchor.source and anchor.on for anchor in ANCHORS)
    assert all((anchor.rule is None) == (anchor.k == 0) for anchor in ANCHORS), "every row with drafts is synthetic"


@pytest.mark.parametrize("anchor", [anchor for anchor in ANCHORS if anchor.k], ids=lambda anchor: anchor.name)
def test_a_pattern_has_the_length_of_its_anchor(anchor: anchors.Anchor) -> None:
    assert anchor.length is not None
    counts = pattern_of(anchor.length)
    assert len(counts) == PATTERN
    assert 1 + mean(counts) == pytest.approx(anchor.length, abs=0.5 / PATTERN)
    assert max(counts) - min(counts) <= 1
    assert max(counts) <= anchor.k


def test_fewer_drafts_are_accepted_at_the_same_rate() -> None:
    rate = 0.8
    seven, three = (sum(rate**j for j in range(k + 1)) for k in (7, 3))
    assert shorter(seven, 7, 3) == pytest.approx(three)
    assert shorter(seven, 7, 7) == pytest.approx(seven)


def test_sizes_are_those_of_the_published_models() -> None:
    """Parameters of the shapes, in thousand millions: Llama-3.1-8B 8.03, Llama-3.2-1B 1.24, Qwen3-30B-A3B 30.5."""
    from transformers import CONFIG_MAPPING

    for name, size in {"8b": 8.03, "1b": 1.24, "qwen3-30b-a3b": 30.5}.items():
        fields = {key: value for key, value in SHAPES[name].items() if key not in ("model_type", "architectures")}
        shapes = shaped.shapes_of(CONFIG_MAPPING[SHAPES[name]["model_type"]](**fields), torch.bfloat16)
        assert sum(torch.Size(shape).numel() for shape, _ in shapes.values()) / 1e9 == pytest.approx(size, abs=0.05)


def test_files_take_no_room_and_matrices_are_drawn(tmp_path: Path) -> None:
    place = anchors.write_head(tmp_path / "head", small(HEAD))
    file = place / SINGLE
    assert os.stat(file).st_blocks * 512 < file.stat().st_size / 4
    with shaped.drawn("cpu"):
        tensors = ShardTensors(place)
        drawn, again = (tensors.read("fc.weight") for _ in range(2))
        assert drawn.float().std() == pytest.approx(shaped.STD, rel=0.05)
        assert not torch.equal(drawn, again)
        assert torch.equal(tensors.read("norm.weight"), torch.ones(128, dtype=torch.bfloat16))
        with tensors.open():
            assert tensors.read("t2d").sum() == small(HEAD)["draft_vocab_size"], "tables of ids are read"
    with tensors.open():
        assert not tensors.read("fc.weight").any(), "behind the context files are read again"


@pytest.mark.parametrize("name", ["gpt-oss-20b, plain", "8B, EAGLE-3 k = 3, MATH500"])
def test_the_command_records_a_row(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "NEW", 48)
    out = tmp_path / "rows.jsonl"
    line = ["anchors", "--small", "--only", name, "--device", "cpu", "--out", str(out), "--commit", "0000000"]
    cli.main(line)
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    (anchor,) = (anchor for anchor in ANCHORS if anchor.name == name)
    assert row["tok_s"] == pytest.approx(
        (anchor.length or 1) / row["ms_step"] * 1e3, rel=1e-3, abs=0.051
    )  # rounded to 0.1
    assert row["ratio"] == pytest.approx(row["tok_s"] / anchor.tok_s, abs=1e-3)
    # the last step of a text may be cut
    assert row["tokens_per_pass"] == pytest.approx(anchor.length or 1, rel=0.1)
    said: Any = row["synthetic"]
    assert (said is None) == (anchor.k == 0)
    assert {"source", "published_on", "gpu"} <= row.keys()
