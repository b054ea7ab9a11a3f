"""Ranks in one process: threads that each run one rank's part of a model, and what stands between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from fastspec.distributed.exchange import add_rounded, tree_sum
from tests.helpers.limits import HANGS

T = TypeVar("T")


class Table:
    """Where threads put what they have, and find what the others have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=HANGS)
        self._places: list[Tensor | None] = [None] * size
        self.exchanged: list[tuple[int, ...]] = []

    def abort(self) -> None:
        """Lets nobody wait for a thread that has failed."""
        self._barrier.abort()

    def gather(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self._places[rank] = tensor.clone()
        if self._barrier.wait() == 0:
            self.exchanged.append(tuple(tensor.shape))
        found = [each for each in self._places if each is not None]
        self._barrier.wait()
        return found


class BetweenThreads:
    """The exchange of one thread among several."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def describe(self) -> str:
        return "between threads"

    def sum(self, partial: Tensor) -> Tensor:
        return tree_sum(self._table.gather(self._rank, partial))

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        return add_rounded(self.sum(partial), bias, residual)

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._table.gather(self._rank, part), dim=-1)


def on_each(size: int, work: Callable[[int, BetweenThreads], T]) -> list[T]:
    """What `work` gives on every rank; raises the error of the first rank that failed by itself."""
    table = Table(size)

    def one(rank: int) -> T:
        try:
            return work(rank, BetweenThreads(table, rank))
        except BaseException:
            table.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        made = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for each in made if (error := each.exception()) is not None]
    # a broken barrier is what the others see of a rank that has failed, even of one that is past the barrier
    if errors:
        raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
    return [each.result() for each in made]
