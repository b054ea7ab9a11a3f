"""Chooses the clock by which decode steps are timed."""

from __future__ import annotations

import time
from collections.abc import Callable

_FINE = 1e-5  # seconds; a step takes some hundred times as long, at least


def step_clock(device: str, ranks: int) -> Callable[[], float]:
    """Returns the clock for decode steps, in seconds.

    On a CPU it is the calling thread's time on its core. So time in which other processes have the core does not count:
    it would fall on any k, and a few steps with one k would seem slow. The clock of all time is used on a GPU, with
    several ranks, which wait for each other, and on systems that count a thread's time in ticks.

    Args:
        device: type of the device.
        ranks: number of processes that share the target.
    """
    fine = time.get_clock_info("thread_time").resolution <= _FINE
    return time.thread_time if device == "cpu" and ranks == 1 and fine else time.perf_counter
