"""The exchange between GPUs: its kernels compile, and no order of events lets a rank read what is not meant for it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import random
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import exchange_kernels
from fastspec.kernels.exchange import exchange_added, exchange_gather, exchange_largest
from fastspec.kernels.reference import keys_of
from fastspec.kernels.room import ALL, BLOCK, EMPTY, Room
from fastspec.parallel.exchange import add_rounded, tree_sum
from tests.helpers.modules import module_output

TURNS = 12
OWNER = 1  # the rank that adds, two-shot


def test_kernels_compile_for_a_hopper_gpu() -> None:
    reports = module_output("tests.helpers.compile_launches", "90", "exchanges")
    kernels = {"_one_shot_kernel", "_two_shot_kernel", "_gather_kernel", "_largest_kernel", "ranks_kernel"}
    assert {report["kernel"] for report in reports} == kernels
    for report in reports:
        assert report["spills"] == 0, report
        assert report["waits_first"] or report["kernel"] == "ranks_kernel", (
            report
        )  # what comes behind may start early, and waits for the sums itself
        # 16 bytes at a time: elements alone take several times the transactions of what peers have pushed
        assert report["kernel"] == "_largest_kernel" or report["narrow_waits"] == 0, report


def runs(size: int, halves: int, seed: int, empties: bool = True) -> bool:
    """Whether one block of every rank reads what was meant for it, in one random order of all that ranks do.

    A rank's turn is that of the kernel: push to each peer; of each peer wait until its place is not empty, read it and
    empty it. Or in two: all push to one rank, which waits for them, reads, pushes to them, and for which they wait.
    """
    choose = random.Random(seed)
    slots: list[list[list[int | None]]] = [[[None] * size for _ in range(halves)] for _ in range(size)]
    right = True
    two = {turn: choose.choice((False, True)) for turn in range(TURNS)}

    def pushed(to: list[int], turn: int, me: int):  # type: ignore[no-untyped-def]
        nonlocal right
        for other in to:
            yield
            right &= slots[other][turn % halves][me] is None  # nobody is to read it any more
            slots[other][turn % halves][me] = turn

    def received(whose: list[int], turn: int, me: int):  # type: ignore[no-untyped-def]
        nonlocal right
        for other in whose:
            while slots[me][turn % halves][other] is None:
                yield
            yield
            right &= slots[me][turn % halves][other] == turn
            if empties:
                yield
                slots[me][turn % halves][other] = None

    def rank(me: int):  # type: ignore[no-untyped-def]
        others = [other for other in range(size) if other != me]
        for turn in range(TURNS):
            if not two[turn]:
                yield from pushed(others, turn, me)
                yield from received(others, turn, me)
            elif me == OWNER:
                yield from received(others, turn, me)
                yield from pushed(others, turn, me)
            else:
                yield from pushed([OWNER], turn, me)
                yield from received([OWNER], turn, me)

    going = [rank(me) for me in range(size)]
    while going and right:  # after a wrong one a rank may wait for ever
        one = choose.choice(going)
        for _ in range(choose.choice((1, 1, 5, 40))):  # now and then a rank runs ahead
            if next(one, "ended") == "ended":
                going.remove(one)
                break
    return right


@pytest.mark.parametrize("size", [2, 4])
def test_two_halves_in_turn_are_enough_and_one_is_not(size: int) -> None:
    assert all(runs(size, 2, seed) for seed in range(200))
    assert not all(runs(size, 1, seed) for seed in range(200))
    assert not any(runs(size, 2, seed, empties=False) for seed in range(20))


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter knows no clock of a device."""
    monkeypatch.setattr(exchange_kernels, "_now", lambda zero: zero)
    monkeypatch.setattr(exchange_kernels, "_stop_after", lambda start, limit: start)


class Forked:
    """Ranks as processes of one host's memory, in which the interpreter's kernels reach each other's as GPUs do."""

    def __init__(self, size: int, elements: int) -> None:
        self.size, self.elements = size, elements
        self.memory = [
            torch.full((2 * size * elements,), EMPTY, dtype=torch.int32).share_memory_() for _ in range(size)
        ]

    def room(self, rank: int) -> Room:
        buffers = torch.tensor([each.data_ptr() for each in self.memory])
        turns = torch.zeros(self.elements // BLOCK, dtype=torch.int32)
        return Room(rank, self.size, self.elements, buffers, turns)

    def run(self, body: Callable[[Room], None]) -> None:
        """Runs all ranks to their end; one that fails ends those that would wait for it."""

        def rank(number: int) -> None:
            torch.set_num_threads(1)
            body(self.room(number))

        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=rank, args=(number,)) for number in range(self.size)]
        for process in ranks:
            process.start()
        while not any(process.exitcode for process in ranks) and any(process.exitcode is None for process in ranks):
            multiprocessing.connection.wait([process.sentinel for process in ranks if process.exitcode is None])
        for process in ranks:
            process.kill()  # nothing, if it has ended
            process.join()
        assert [process.exitcode for process in ranks] == [0] * self.size
        for memory in self.memory:
            assert (memory == EMPTY).all(), "what is read is emptied"


def of_rank(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))


@pytest.mark.parametrize("size", [2, 4])
def test_kernels_exchange_between_processes(size: int, untimed: None) -> None:
    """Sums of one part and several, one-shot and two-shot, gathers and keys, one after the other in one room."""
    forked = Forked(size, 4 * BLOCK)

    def body(room: Room) -> None:
        bias, everyone = of_rank(99, 300).bfloat16(), range(size)
        for turn, (rows, ways, least) in enumerate(((3, 1, ALL), (5, 2, 1), (1, 4, ALL), (5, 1, 1), (6, 1, ALL))):
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
            logits = of_rank(50, rows, 40 * size, seed=turn).round()
            parts = logits.view(rows, size, 40).unbind(1)
            ids = torch.full((rows, 2), -1)
            exchange_largest(keys_of(parts[room.rank], 40).view(torch.uint64), 40, room, ids[:, 1])
            assert torch.equal(ids[:, 1], logits.argmax(-1))
            assert (ids[:, 0] == -1).all()

    forked.run(body)


def test_a_nan_of_the_bits_of_an_empty_place_arrives_as_another(untimed: None) -> None:
    forked = Forked(2, 2 * BLOCK)

    def body(room: Room) -> None:
        x = torch.full((3, 200), EMPTY, dtype=torch.int32).view(torch.float32)
        residual = torch.zeros(3, 200, dtype=torch.bfloat16)
        for least in (1, ALL):
            assert exchange_added(x, None, residual, room, least).isnan().all()
        assert exchange_gather(x, room).isnan().all()

    forked.run(body)
