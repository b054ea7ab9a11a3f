"""A rank that dies, raises or hangs in the middle of a call ends it on every rank, with its name and the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastspec.distributed.monitor import BEAT, LOST, Monitor
from tests.distributed import tasks
from tests.helpers.rank_processes import NOTHING, Processes

Pair = tuple[str, str]
CAUSES = {
    "die": "RankFailed: rank 1 gave no sign of life",
    "raise": "RankFailed: rank 1 raised ZeroDivisionError: a streamer's own error",
    "hang": "waited too long for rank 1, which is generating",
}


@pytest.mark.parametrize("how", CAUSES)
def test_every_rank_is_told_which_rank_failed_and_how(how: str, pair: Pair, tmp_path: Path) -> None:
    ranks = Processes(4 if how == "raise" else 2, tmp_path / "meeting")
    try:
        said = ranks.run(tasks.open_generator, "fails", {"pair": pair, "tensor_parallel": "auto"})
        assert all("ranks" in each for each in said), said
        for pipe in range(len(said)):
            ranks.send(pipe, tasks.fail, "fails", how, 30.0 if how != "hang" else 1.0)
        others = [rank for rank in range(len(said)) if rank != 1]
        found = [ranks.answer(rank) for rank in others]
        for each in found:
            assert CAUSES[how] in each, each
            assert "No rank can continue" in each
        if how == "hang":
            ranks.tell(1, "go on")
        own = ranks.answer(1)
        assert {"die": NOTHING, "raise": "ZeroDivisionError", "hang": "RankFailed"}[how] in own, own
        for rank in others:  # nothing is begun that could not end
            ranks.send(rank, tasks.text, "fails", {})
            assert ranks.answer(rank).startswith("RankFailed")
        if how == "die":
            ranks.processes[1].join()
            assert ranks.processes[1].exitcode == 3
    finally:
        ranks.stop()


@pytest.mark.parametrize("follows", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nobody_waits_for_a_rank_0_that_is_stopped(follows: bool, pair: Pair, tmp_path: Path) -> None:
    """With it stops the store of all signs of life, which then answers nobody."""
    ranks = Processes(2, tmp_path / "meeting")
    try:
        ranks.run(tasks.open_generator, "fails", {"pair": pair, "tensor_parallel": "auto"})
        ranks.send(1, tasks.follow if follows else tasks.text, "fails", *([] if follows else [{"max_new_tokens": 40}]))
        ranks.send(0, tasks.submit_and_fail if follows else tasks.fail_in_a_step, "fails", "stop")
        assert ranks.answer(1).startswith("RankFailed: rank 0 gave no sign of life")
    finally:
        ranks.stop()


def test_who_counts_a_rank_as_dead_tells_the_others() -> None:
    """Who has seen that rank's signs in time would else wait for the one that gave up."""
    first = Monitor(0, 3, None)
    others = [Monitor(rank, 3, first.port) for rank in (1, 2)]
    try:
        while set(first._seen) != {1, 2}:
            first._closed.wait(BEAT / 4)
        first.close()  # it sees no more
        first._seen = {2: (first._seen[2][0], -LOST)}
        assert first.cause is not None
        assert "rank 2 gave no sign of life" in first.cause
        assert others[0].wait_for_cause(60.0) == first.cause
    finally:
        for each in (*others, first):
            each.close()
