"""The exchange between GPUs: its kernels compile, and no order of events lets a rank read what is not meant for it."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from tests.helpers.modules import module_output

TURNS = 12
OWNER = 1  # the rank that adds, in two turns


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


def runs(size: int, halves: int, seed: int) -> bool:
    """Whether one block of every rank reads what was meant for it, in one random order of all that ranks do.

    A rank's turn is that of the kernel: push to each peer, set each peer's flag, wait for each flag, read each peer's.
    Or in two: all push to one rank, which waits for them, reads, pushes to them, and for which they wait. Or as words:
    push to each peer, and read each peer's until it is of this epoch.
    """
    choose = random.Random(seed)
    slots = [[[-1] * size for _ in range(halves)] for _ in range(size)]  # of each rank: half, from whom
    words = [[[-1] * size for _ in range(halves)] for _ in range(size)]
    flags = [[0] * size for _ in range(size)]
    right = True

    ways = {epoch: choose.choice(("one turn", "two turns", "words")) for epoch in range(1, TURNS + 1)}

    def pushed(to: list[int], epoch: int, me: int):  # type: ignore[no-untyped-def]
        for other in to:
            yield
            slots[other][epoch % halves][me] = epoch
        for other in to:
            yield
            flags[other][me] = epoch

    def received(whose: list[int], epoch: int, me: int):  # type: ignore[no-untyped-def]
        nonlocal right
        for other in whose:
            while flags[me][other] < epoch:
                yield
        for other in whose:
            yield
            right &= slots[me][epoch % halves][other] == epoch

    def in_words(others: list[int], epoch: int, me: int):  # type: ignore[no-untyped-def]
        nonlocal right
        for other in others:
            yield
            words[other][epoch % halves][me] = epoch
        for other in others:
            while words[me][epoch % halves][other] < epoch:
                yield
            right &= words[me][epoch % halves][other] == epoch

    def rank(me: int):  # type: ignore[no-untyped-def]
        others = [other for other in range(size) if other != me]
        for epoch in range(1, TURNS + 1):
            if ways[epoch] == "words":
                yield from in_words(others, epoch, me)
            elif ways[epoch] == "two turns":
                givers = others if me == OWNER else [OWNER]
                yield from pushed([] if me == OWNER else givers, epoch, me)
                yield from received(givers, epoch, me)
                yield from pushed(givers if me == OWNER else [], epoch, me)
            else:
                yield from pushed(others, epoch, me)
                yield from received(others, epoch, me)

    going = [rank(me) for me in range(size)]
    while going:
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
