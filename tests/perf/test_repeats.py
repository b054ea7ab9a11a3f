"""The replay of edits counts what is drafted right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from perf.__main__ import main
from perf.repeats import DRAFTERS, Replay, edited_lines, ends_of_edits, pairs_of, replay, rows_of


def test_a_replay_counts_accepted_drafts_and_when_they_come_again() -> None:
    """Drafts from the old text by place: right but at one place, and behind an insertion never again."""
    found, old = Replay(), list(range(20))
    by_place = lambda old, text, k: old[len(text) : len(text) + k]  # noqa: E731
    new = [*old[:6], 99, *old[7:]]
    assert ends_of_edits(old, new) == [(7, 13)]
    replay(found, (old, new), [(7, 13)], 4, by_place)
    assert (found.steps, found.emitted, found.drafted, found.accepted) == (5, 20, 18, 15)
    assert found.resumed == [0]
    lost = Replay()
    replay(lost, (old, [99, *old]), ends_of_edits(old, [99, *old]), 4, by_place)
    assert (lost.steps, lost.accepted, lost.resumed) == (21, 0, [20])


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_copies_a_text_that_is_not_edited(name: str) -> None:
    text = random.Random(1).sample(range(1000), 120)
    found = Replay()
    replay(found, (text, text), [], 5, DRAFTERS[name](5))
    assert found.accepted == found.drafted
    assert found.emitted == 120
    assert found.steps <= 22


def test_edits_are_drafted_better_from_a_prediction() -> None:
    text = random.Random(2).choices(range(60), k=300)
    new = [*text[:50], 99, *text[50:100], *text[110:200], 98, *text[201:]]
    rows = {row["drafter"]: row for row in rows_of([(text, new)], [8], "planted")}
    prediction, prompt, corpus, ngram, peer = (rows[name] for name in DRAFTERS)
    assert all(prediction["tokens_per_step"] > other["tokens_per_step"] for other in (corpus, peer))
    assert ngram["tokens_per_step"] > peer["tokens_per_step"]
    assert prompt["tokens_per_step"] > corpus["tokens_per_step"]
    assert prediction["resumed_within_8"] == 1


def test_files_that_differ_are_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, texts in {
        "old": {"a": "x = 1\n", "b": "same\n"},
        "new": {"a": "x = 2\n", "b": "same\n", "c": "y"},
    }.items():
        for name, text in texts.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.py").write_text(text, encoding="utf-8")
    assert pairs_of(tmp_path / "old", tmp_path / "new") == [("x = 1\n", "x = 2\n")]
    assert edited_lines([("a\nb\nc\nd\n", "a\nx\nc\nd\n")]) == 0.25
    line = ["repeats", "--old", str(tmp_path / "old"), "--new", str(tmp_path / "new"), "--name", "two", "--k", "4"]
    assert [row["files"] for row in main(line)] == [1] * len(DRAFTERS)
    assert "tokens_per_step" in capsys.readouterr().out
