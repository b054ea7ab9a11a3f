"""The exchange between GPUs: its kernels compile, and no order of events lets a rank read what is not meant for it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from tests.helpers.modules import module_output

ROOT = Path(__file__).parents[2]
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


def test_kernels_exchange_between_processes() -> None:
    """Interpreted, they reach each other's memory as GPUs do."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.exchange_ranks"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["sums and gathers 2", "sums and gathers 4", "not numbers 2"]
