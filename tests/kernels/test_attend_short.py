"""Which kernel decodes over a short cache, with how many query rows to a program and programs to a tile."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import attend_short


@pytest.mark.parametrize(
    ("sequences", "queries", "splits", "groups", "shares"),
    [
        *((1, 1, 32, 1, 0), (1, 5, 8, 1, 0), (1, 5, 32, 1, 11), (1, 8, 32, 1, 8), (1, 17, 32, 2, 6), (2, 8, 32, 1, 4)),
        *((4, 8, 2, 2, 0), (4, 8, 32, 2, 4), (8, 1, 4, 1, 0), (8, 1, 32, 1, 4), (8, 5, 32, 2, 2), (8, 8, 32, 2, 2)),
        *((16, 4, 2, 2, 0), (16, 5, 32, 3, 2), (16, 8, 32, 2, 1), (24, 8, 32, 4, 1), (32, 1, 32, 1, 1)),
        (32, 5, 2, 3, 1),
    ],
)
def test_who_reads_keys_once(sequences: int, queries: int, splits: int, groups: int, shares: int) -> None:
    """For four query heads of 128 to each of eight: groups of 8 query rows to a program, programs to a tile."""
    kernel, (_, programs), constants, _ = attend_short.short_launch(4 * queries, 128, 8 * sequences, splits)
    assert (constants["G"], programs) == (groups, shares or splits)
    assert kernel is (attend_short.batch_kernel if shares else attend_short.fragment_kernel)


def test_more_programs_run_at_a_time_with_fewer_registers() -> None:
    assert [attend_short.short_launch(32, dim, 8, 32)[1][1] for dim in (64, 128)] == [12, 8]
