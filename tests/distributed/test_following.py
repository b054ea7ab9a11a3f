"""Rank 0 takes requests one by one, and the other ranks make the same steps: as one process alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import tasks
from tests.helpers.rank_processes import NOTHING, Processes, Rank

Pair = tuple[str, str]
OPTIONS: list[dict[str, Any]] = [
    {},
    {**tasks.SAMPLED, "seed": 3, "logit_bias": {5: 1.5}, "top_k": 20},
    {"num_speculative_tokens": 0},
    {**tasks.SAMPLED, "seed": 4, "allowed_token_ids": list(range(50))},
    {"max_new_tokens": 30},
]


def test_requests_of_rank_0_get_the_text_of_one_rank(pair: Pair, two: Processes) -> None:
    here = Rank(0, 1, None)  # type: ignore[arg-type]  # which waits for nobody
    tasks.open_generator(here, "one", {"tensor_parallel": 1, "pair": pair})
    want = [
        tasks.text(here, "one", {"first": index % 3, "prompts": 1, **each})[0] for index, each in enumerate(OPTIONS)
    ]
    beside = tasks.text(here, "one", {})
    here.kept["one"].close()

    two.run(tasks.open_generator, "submits", {"pair": pair, "tensor_parallel": 2})
    assert two.run(tasks.text, "submits", {}) == [beside, beside], "before, all ranks make a call"
    two.send(1, tasks.follow, "submits")
    two.send(0, tasks.submits, "submits", OPTIONS)
    found = two.answer(0)
    assert two.answer(1) == "followed"
    assert found["submitted"] == want
    assert found["beside"] == beside
    assert found["cancelled"] == ["cancelled"]
    assert found["again"] == [beside[1]]
    assert "since rank 0's first submit() they follow rank 0" in found["refused"][0]
    assert "follow() is for ranks other than 0" in found["refused"][1]


def test_grammars_and_stop_strings_are_followed_by_all_ranks(two: Processes) -> None:
    """In calls of all ranks, and in requests of rank 0: each rank has the tokenizer, and reads every step."""
    calls: list[dict[str, Any]] = [
        {"prompts": 1, "regex": "[a-z]+( [a-z]+)*", **tasks.SAMPLED, "seed": 5},
        {"prompts": 1, "stop_strings": ["e", "0"], "max_new_tokens": 30},
    ]
    calls = [{**each, "first": index} for index, each in enumerate(calls)]
    here = Rank(0, 1, None)  # type: ignore[arg-type]  # which waits for nobody
    tasks.open_generator(here, "one", {"tensor_parallel": 1})
    want = tasks.texts(here, "one", calls)
    here.kept["one"].close()
    two.run(tasks.open_generator, "words", {"tensor_parallel": 2})
    assert two.run(tasks.texts, "words", calls) == [want, want]
    two.send(1, tasks.follow, "words")
    ours = ("prompts", "first")
    two.send(0, tasks.submits, "words", [{name: each[name] for name in each if name not in ours} for each in calls])
    found = two.answer(0)
    assert two.answer(1) == "followed"
    assert found["submitted"] == [rows[0] for rows in want]


def test_who_may_submit(pair: Pair, two: Processes) -> None:
    two.run(tasks.open_generator, "who", {"pair": pair, "tensor_parallel": 2})
    two.send(1, tasks.submit_and_see, "who")
    assert "submit() is for rank 0, and this is rank 1: call follow()" in two.answer(1)


@pytest.mark.parametrize("how", ["die", "raise"])
def test_a_rank_that_fails_while_it_follows_is_named(how: str, pair: Pair, tmp_path: Any) -> None:
    ranks = Processes(2, tmp_path / "meeting")
    try:
        ranks.run(tasks.open_generator, "fails", {"pair": pair, "tensor_parallel": 2})
        ranks.send(1, tasks.follow_and_fail, "fails", how)
        ranks.send(0, tasks.submit_and_see, "fails")
        step, behind = ranks.answer(0)
        cause = "rank 1 gave no sign of life" if how == "die" else "rank 1 raised ZeroDivisionError: a rank's own error"
        assert step.startswith(f"RankFailed: {cause}"), step
        assert "Submit them again" not in step, "no rank can"
        assert behind.startswith(f"RankFailed: {cause}"), behind
        assert (NOTHING if how == "die" else "ZeroDivisionError") in ranks.answer(1)
    finally:
        ranks.stop()


def test_rank_0_that_fails_while_it_steps_is_named_to_all(pair: Pair, tmp_path: Any) -> None:
    ranks = Processes(2, tmp_path / "meeting")
    try:
        ranks.run(tasks.open_generator, "fails", {"pair": pair, "tensor_parallel": 2})
        ranks.send(1, tasks.follow, "fails")
        ranks.send(0, tasks.submit_and_fail, "fails", "raise")
        cause = "RankFailed: rank 0 raised ZeroDivisionError: a rank's own error"
        for said in (*ranks.answer(0), ranks.answer(1)):
            assert said.startswith(cause), said
        ranks.send(1, tasks.follow, "fails")
        assert ranks.answer(1).startswith(cause)
    finally:
        ranks.stop()
