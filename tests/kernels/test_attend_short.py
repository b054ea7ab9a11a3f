"""Which kernel decodes over a short cache, with how many query rows to a program and programs to a tile."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import attend_short


@pytest.mark.parametrize(
    ("sequences", "queries", "splits", "groups", "at_once", "programs"),
    [
        *((1, 1, 32, 1, 0, 32), (1, 5, 8, 1, 0, 8), (1, 5, 32, 1, 1, 11), (1, 8, 32, 1, 1, 8), (1, 17, 32, 2, 2, 3)),
        *((2, 8, 4, 2, 2, 2), (2, 8, 32, 2, 2, 4), (4, 8, 32, 2, 2, 2), (8, 1, 4, 1, 0, 4), (8, 1, 32, 1, 1, 4)),
        *((8, 5, 32, 2, 2, 1), (8, 8, 2, 2, 0, 2), (8, 8, 4, 2, 2, 1), (16, 1, 2, 1, 0, 2), (16, 1, 32, 1, 2, 1)),
        *((16, 4, 32, 2, 2, 1), (16, 5, 32, 3, 2, 1), (16, 8, 32, 4, 2, 1), (24, 8, 32, 4, 1, 1), (32, 1, 32, 1, 1, 1)),
        (32, 5, 2, 3, 1, 1),
    ],
)
def test_who_reads_keys_once(
    sequences: int, queries: int, splits: int, groups: int, at_once: int, programs: int
) -> None:
    """For four query heads of 128 to each of eight: groups of 8 query rows to a program, splits that it reads at once
    (0: it has no other), programs to a tile."""
    kernel, grid, constants, options = attend_short.short_launch(4 * queries, 128, 8 * sequences, splits)
    assert (constants["G"], grid[1]) == (groups, programs)
    assert kernel is (attend_short.batch_kernel if at_once else attend_short.fragment_kernel)
    assert constants.get("AT_ONCE", 0) == at_once
    if at_once == 2:  # a program has a multiprocessor to itself
        assert options["num_warps"] * 32 * options["maxnreg"] > 65_536 // 2
        assert grid[0] * grid[1] <= attend_short.MULTIPROCESSORS


@pytest.mark.parametrize(
    ("sequences", "queries", "groups", "at_once", "programs"),
    [(4, 5, 2, 1, 6), (2, 8, 1, 1, 6), (8, 5, 2, 2, 1), (16, 1, 1, 2, 1), (32, 2, 1, 1, 1)],
)
def test_heads_of_64_have_more_warps_one_by_one(
    sequences: int, queries: int, groups: int, at_once: int, programs: int
) -> None:
    """Three programs share a multiprocessor: two splits at once only where one program then has all of a tile's."""
    _, grid, constants, _ = attend_short.short_launch(4 * queries, 64, 8 * sequences, 32)
    assert (constants["G"], constants["AT_ONCE"], grid[1]) == (groups, at_once, programs)


def test_more_programs_run_at_a_time_with_fewer_registers() -> None:
    assert [attend_short.short_launch(32, dim, 7, 32)[1][1] for dim in (64, 128)] == [14, 9]
