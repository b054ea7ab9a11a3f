"""Runs the kernels of the exchange between processes that share their memory, by Triton's interpreter.

Prints a line for each check that passed. In a process of its own, for it forks.

Usage: TRITON_INTERPRET=1 python -m tests.helpers.exchange_ranks
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import sys
from collections.abc import Callable

import torch

from fastspec.distributed.exchange import add_rounded, tree_sum
from fastspec.kernels import exchange_kernels
from fastspec.kernels.exchange import exchange_added, exchange_gather, exchange_largest
from fastspec.kernels.reference import keys_of
from fastspec.kernels.room import ALL, BLOCK, EMPTY, Room

CONTEXT = multiprocessing.get_context("fork")
# rows, split-K parts, elements from which a sum is two-shot
SUMS = ((3, 1, ALL), (5, 2, 1), (1, 4, ALL), (5, 1, 1), (6, 1, ALL))


class Ranks:
    """Ranks as processes, each of which reaches the memory of all."""

    def __init__(self, size: int, elements: int) -> None:
        self.size, self.elements = size, elements
        room = 2 * size * elements
        self.memory = [torch.full((room,), EMPTY, dtype=torch.int32).share_memory_() for _ in range(size)]

    def room(self, rank: int) -> Room:
        buffers = torch.tensor([each.data_ptr() for each in self.memory])
        turns = torch.zeros(self.elements // BLOCK, dtype=torch.int32)
        return Room(rank, self.size, self.elements, buffers, turns)

    def run(self, check: Callable[[Room], None]) -> None:
        """Runs a check on all ranks to its end; one that fails ends those that would wait for it."""
        ranks = [CONTEXT.Process(target=lambda rank: check(self.room(rank)), args=(rank,)) for rank in range(self.size)]
        for process in ranks:
            process.start()
        going = ranks
        while going and not any(process.exitcode for process in ranks):
            multiprocessing.connection.wait([process.sentinel for process in going])
            going = [process for process in going if process.exitcode is None]
        for process in ranks:
            process.kill()  # nothing, if it has ended
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"{check.__name__} of {self.size} ranks: {[process.exitcode for process in ranks]}")
        assert all(bool((memory == EMPTY).all()) for memory in self.memory), "what is read is emptied"
        print(check.__name__.replace("_", " "), self.size, flush=True)


def of_rank(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))


def sums_and_gathers(room: Room) -> None:
    """Sums of one part and several, one-shot and two-shot, gathers and keys, one after the other in one room."""
    bias, everyone = of_rank(99, 300).bfloat16(), range(room.size)
    for turn, (rows, ways, least) in enumerate(SUMS):
        own = [of_rank(rank, ways, rows, 300, seed=turn) for rank in everyone]
        residual = of_rank(98, rows, 300).half()  # the interpreter cuts bf16 off
        total = tree_sum([tree_sum(each.unbind()) for each in own])
        x = own[room.rank] if ways > 1 else own[room.rank][0]
        for given in (bias, None):
            found = exchange_added(x, given, residual, room, least)
            assert torch.equal(found, add_rounded(total, given, residual)), (turn, rows)
        firsts = [each[0] for each in own]
        assert torch.equal(exchange_added(firsts[room.rank], None, None, room), tree_sum(firsts))
        assert torch.equal(exchange_gather(firsts[room.rank], room), torch.cat(firsts, -1))
        logits = of_rank(50, rows, 40 * room.size, seed=turn).round()
        parts = logits.view(rows, room.size, 40).unbind(1)
        ids = torch.full((rows, 2), -1)
        exchange_largest(keys_of(parts[room.rank], 40).view(torch.uint64), 40, room, ids[:, 1])
        assert torch.equal(ids[:, 1], logits.argmax(-1))
        assert (ids[:, 0] == -1).all()


def not_numbers(room: Room) -> None:
    """A NaN that has the bits of an empty place arrives, as another."""
    x = torch.full((3, 200), EMPTY, dtype=torch.int32).view(torch.float32)
    residual = torch.zeros(3, 200, dtype=torch.bfloat16)
    for least in (1, ALL):
        assert exchange_added(x, None, residual, room, least).isnan().all()
    assert exchange_gather(x, room).isnan().all()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # the interpreter knows no clock of a device
    exchange_kernels._now = lambda zero: zero
    exchange_kernels._stop_after = lambda start, limit: start
    for ranks in (2, 4):
        Ranks(ranks, 4 * BLOCK).run(sums_and_gathers)
    Ranks(2, 2 * BLOCK).run(not_numbers)
