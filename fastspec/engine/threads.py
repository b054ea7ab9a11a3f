"""How many of torch's threads work on one step on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from fastspec.kernels.ops import Ops
from fastspec.torch_settings import using_threads

_SMALL = 2**16  # mean elements of a weight matrix: below, starting threads takes longer than the product
_GAIN = 1.25  # what twice the threads must bring
_SLOW = 8.0  # times what such a step took: then the threads wait for cores that others use
_IN_A_ROW = 3
_REST = 256  # steps with one thread after that


@dataclass(slots=True)
class Threads:
    """The number of threads for a generator's work, in whichever thread of the caller it runs.

    Threads that share an operation wait for each other at its end. Where other processes use the cores, such a wait may
    last as long as a time slice of theirs, and small models have many operations. So a number is chosen by measuring;
    and when steps become many times slower, one thread works alone for a while.

    Attributes:
        limit: torch's own setting at construction.
        chosen: at construction.
        why: it was chosen.
        now: for the next step.
    """

    limit: int
    chosen: int = 1
    why: str = "torch has one"
    now: int = 1
    _best: dict[Hashable, float] = field(default_factory=dict)  # seconds of a step, by its kind
    _slow: int = 0
    _rest: int = 0
    _before: float = 0.0  # seconds of the last slow step
    _alone: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, limit: int, elements: float, seconds: Callable[[int], float]) -> Threads:
        """Chooses a number.

        Args:
            limit: at most so many.
            elements: of a weight matrix, in the mean.
            seconds: what a pass takes with a number of threads; asked only where there is a choice.
        """
        if limit == 1:
            return cls(limit)
        if elements < _SMALL:
            return cls(limit, why="products too small to share")
        count, best = limit, seconds(limit)
        while count > 1:
            fewer = seconds(count // 2)
            if fewer > best * _GAIN:
                break
            count, best = count // 2, fewer
        why = "more are not faster" if count < limit else "fewer are slower"
        return cls(limit, count, f"measured, {why}", count)

    def took(self, kind: Hashable, seconds: float) -> None:
        """Takes in what a step took; `now` may change."""
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
        """Takes in a step that one thread made after steps of several had become slow."""
        self._rest -= 1
        if len(self._alone) < _IN_A_ROW:
            self._alone.append(seconds)
            if len(self._alone) == _IN_A_ROW and min(self._alone) > self._before:
                self._best[kind], self._rest = self._before, 0  # such steps are longer now: threads were not to blame
        if not self._rest:
            self.now = self.chosen

    def __str__(self) -> str:
        """A short description, for messages and `explain()`."""
        resting = f"; {self.now} for now: steps had become many times slower" if self.now != self.chosen else ""
        return f"{self.chosen} of torch's {self.limit} on the CPU ({self.why}){resting}"


def sampling_alone(ops: Ops) -> Ops:
    """These operations, with those over whole distributions run by one thread.

    Several would split a sum over a large vocabulary where there is one row and not where there are more, so that bits
    would depend on the number of rows, of drafts and of threads.
    """
    names = ("sampled_commit", "sampled_draw", "verify_commit", "commit", "record_logprobs")
    alone = {name: _alone(getattr(ops, name)) for name in names}
    return ops.replaced(**alone)


def _alone(op: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(op)
    def by_one_thread(*args: Any, **options: Any) -> Any:
        """Runs the op with one thread of torch."""
        if torch.get_num_threads() == 1:
            return op(*args, **options)
        with using_threads(1):
            return op(*args, **options)

    return by_one_thread
