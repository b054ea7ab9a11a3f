"""Chooses how many of torch's threads work on one step on the CPU, and the clock that times a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from fastspec.kernels.ops import Ops
from fastspec.torch_settings import using_threads

_SMALL = 2**16  # mean elements of a weight matrix; for smaller ones starting threads takes longer than the product
_GAIN = 1.25  # least speedup for which twice the threads are used
_SLOW = 8.0  # a step that takes this many times its shortest time is slow: its threads wait for busy cores
_IN_A_ROW = 3
_REST = 256  # number of steps with one thread after several slow steps
_FINE = 1e-5  # seconds; a step takes some hundred times as long, at least


@dataclass(slots=True)
class Threads:
    """Chooses the number of torch's CPU threads for a generator's decode steps.

    The choice is the same for all Python threads that launch steps. Threads that share an operation wait for each other
    at its end. If other processes use the cores, such a wait may last a whole time slice, and small models have many
    operations. So the number is chosen by measurement. When steps become many times slower, one thread works alone for
    a while.

    Attributes:
        limit: torch's number of threads at the measurement.
        why: text with the reason for `chosen`.
        chosen: number of threads that was fastest in the measurement.
        now: number of threads for the next step: `chosen`, or 1 after several slow steps.
    """

    limit: int
    chosen: int = 1
    why: str = "torch has one"
    now: int = 1
    # shortest time of a step in seconds, by (rows, drafts, sampler)
    _best: dict[Hashable, float] = field(default_factory=dict)
    _slow: int = 0
    _rest: int = 0
    _before: float = 0.0  # seconds of the last slow step
    _alone: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, limit: int, elements: float, seconds: Callable[[int], float]) -> Threads:
        """Chooses the number of threads by measurement.

        Begins with `limit` threads, and halves the number while this makes a step at most `_GAIN` times as long. If
        `limit` is 1 or the weight matrices are small, one thread is chosen without a measurement.

        Args:
            limit: upper limit of the number of threads.
            elements: mean number of elements of a weight matrix. Below `_SMALL` a matrix is small.
            seconds: function that returns the seconds of a decode step with a given number of threads.
        """
        if limit == 1:
            return cls(limit)
        if elements < _SMALL:
            return cls(limit, why="products are too small for several threads")
        count, best = limit, seconds(limit)
        while count > 1:
            fewer = seconds(count // 2)
            if fewer > best * _GAIN:
                break
            count, best = count // 2, fewer
        why = "more are not faster" if count < limit else "fewer are slower"
        return cls(limit, count, f"measured, {why}", count)

    def took(self, kind: Hashable, seconds: float) -> None:
        """Records the time of a decode step. May change `now`, the number of threads for the next step.

        Args:
            kind: (number of batch slots, number of draft tokens, sampler) of the step. Only times of the same kind are
                compared.
            seconds: time of the step.
        """
        if self.chosen == 1:
            return
        if self._rest:
            self._take_alone(kind, seconds)
            return
        best = self._best.setdefault(kind, seconds)
        self._best[kind] = min(best, seconds)
        self._slow = self._slow + 1 if seconds > _SLOW * best else 0
        if self._slow == _IN_A_ROW:
            self.now, self._rest, self._slow, self._before, self._alone = 1, _REST, 0, seconds, []

    def _take_alone(self, kind: Hashable, seconds: float) -> None:
        """Records the time of a step that ran with one thread, because steps with several threads had become slow.

        For arguments see `took`.
        """
        self._rest -= 1
        if len(self._alone) < _IN_A_ROW:
            self._alone.append(seconds)
            if len(self._alone) == _IN_A_ROW and min(self._alone) > self._before:
                # one thread is slow, too, so these steps have become longer: use `chosen` threads again
                self._best[kind], self._rest = self._before, 0
        if not self._rest:
            self.now = self.chosen

    def __str__(self) -> str:
        """Describes the chosen number of threads and the reason, for messages and `explain()`."""
        resting = f"; {self.now} for now: steps had become many times slower" if self.now != self.chosen else ""
        return f"{self.chosen} of torch's {self.limit} on the CPU ({self.why}){resting}"


def sampling_alone(ops: Ops) -> Ops:
    """Returns a copy of `ops` whose operations over the whole vocabulary use one torch thread.

    Several threads would split the sum over a large vocabulary if there is one row of logits, but not if there are
    more. The bits would then depend on the numbers of requests, draft tokens and threads.
    """
    names = ("sampled_commit", "sampled_draw", "verify_commit", "commit", "record_logprobs", "processed_logits")
    alone = {name: _alone(getattr(ops, name)) for name in names}
    return ops.replaced(**alone)


def _alone(op: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(op)
    def by_one_thread(*args: Any, **options: Any) -> Any:
        """Runs the op with one torch thread."""
        if torch.get_num_threads() == 1:
            return op(*args, **options)
        with using_threads(1):
            return op(*args, **options)

    return by_one_thread


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
