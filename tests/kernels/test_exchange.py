"""The exchange between GPUs: its kernels compile, and no order of events lets a rank read what is not meant for it."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from tests.helpers.modules import module_output

TURNS = 12


def test_kernels_compile_for_a_hopper_gpu() -> None:
    reports = module_output("tests.helpers.compile_launches", "90", "exchanges")
    assert {report["kernel"] for report in reports} == {"_added_kernel", "_gather_kernel", "_largest_kernel"}
    for report in reports:
        assert report["spills"] == 0, report
        assert report["waits_first"], report  # what comes behind may start early, and waits for the sums itself


def runs(size: int, halves: int, seed: int) -> bool:
    """Whether one block of every rank reads what was meant for it, in one random order of all that ranks do.

    A rank's turn is that of the kernel: push to each peer, set each peer's flag, wait for each flag, read each peer's.
    """
    choose = random.Random(seed)
    slots = [[[-1] * size for _ in range(halves)] for _ in range(size)]  # of each rank: half, from whom
    flags = [[0] * size for _ in range(size)]
    right = True

    def rank(me: int):  # type: ignore[no-untyped-def]
        nonlocal right
        others = [other for other in range(size) if other != me]
        for epoch in range(1, TURNS + 1):
            for other in others:
                yield
                slots[other][epoch % halves][me] = epoch
            for other in others:
                yield
                flags[other][me] = epoch
            for other in others:
                while flags[me][other] < epoch:
                    yield
            for other in others:
                yield
                right &= slots[me][epoch % halves][other] == epoch

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
