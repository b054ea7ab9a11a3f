"""The clock of decode steps: on a CPU, the time of other processes on its cores does not count."""

from __future__ import annotations

import time
from itertools import count
from threading import Thread
from types import SimpleNamespace

import pytest

from fastspec import FastSpecGenerator, demo_pair
from fastspec.engine.threads import step_clock
from fastspec.scheduling.scheduler import StepTimer
from fastspec.shapes import GREEDY


def test_a_cpu_counts_the_time_of_the_thread_and_others_all_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_clock("cpu", 1) is time.thread_time
    assert step_clock("cuda", 1) is time.perf_counter
    assert step_clock("cpu", 2) is time.perf_counter  # ranks wait for each other
    monkeypatch.setattr(time, "get_clock_info", lambda name: SimpleNamespace(resolution=1 / 64))  # as on Windows
    assert step_clock("cpu", 1) is time.perf_counter


def test_a_neighbour_s_time_is_not_the_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another process had the core for a second whenever the time is read."""
    seconds = count()
    target = demo_pair()[0]
    with FastSpecGenerator(target, device="cpu", max_batch_size=1, max_length=64, progress=False) as gen:
        engine = gen._open().engine
        monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
        with engine.on_device():
            assert engine.step_seconds(1, 0, GREEDY) < 1


def test_a_result_that_another_thread_got_has_no_time() -> None:
    timer = StepTimer(ahead=False, clock=time.thread_time)
    assert timer.arrived(waited=True) is None
    assert timer.arrived(waited=True) is not None
    got: list[float | None] = []
    other = Thread(target=lambda: got.extend(timer.arrived(waited=True) for _ in range(2)))
    other.start()
    other.join()
    assert got[0] is None
    assert got[1] is not None
    assert timer.arrived(waited=True) is None
