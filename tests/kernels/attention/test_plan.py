"""Which kernel decodes over a short cache, with how many query rows and CTAs to a tile, on which no bit depends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.helpers.attention import case, copied
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.attention import plan
from fastspec.kernels.attention.decode import combine, mma_tiles, portable, tma_sm90
from fastspec.kernels.gpu import Gpu
from tests.house.test_house import BLOCK_TRITON, run_python
from tests.kernels.attention.test_dispatch import SHAPES, attend, check, choose, dtype_for, set_ctas

H100 = Gpu((9, 0), 132)


@pytest.mark.parametrize(
    ("sequences", "queries", "splits", "groups", "at_once", "ctas"),
    [
        *((1, 1, 32, 1, 0, 32), (1, 5, 8, 1, 0, 8), (1, 5, 32, 1, 1, 11), (1, 8, 32, 1, 1, 8), (1, 17, 32, 2, 2, 3)),
        *((2, 8, 4, 2, 2, 2), (2, 8, 32, 2, 2, 4), (4, 8, 32, 2, 2, 2), (8, 1, 4, 1, 0, 4), (8, 1, 32, 1, 1, 4)),
        *((8, 5, 32, 2, 2, 1), (8, 8, 2, 2, 0, 2), (8, 8, 4, 2, 2, 1), (16, 1, 2, 1, 0, 2), (16, 1, 32, 1, 2, 1)),
        *((16, 4, 32, 2, 2, 1), (16, 5, 32, 3, 2, 1), (16, 8, 32, 4, 2, 1), (24, 8, 32, 4, 1, 1), (32, 1, 32, 1, 1, 1)),
        (32, 5, 2, 3, 1, 1),
    ],
)
def test_who_reads_keys_once(sequences: int, queries: int, splits: int, groups: int, at_once: int, ctas: int) -> None:
    """For four query heads of 128 to each of eight: groups of 8 query rows to a tile, splits that a CTA reads at once
    (0: it has no other), CTAs to a tile."""
    planned = plan.early_plan(H100, plan.Pass(4 * queries, 8 * sequences, 128), splits)
    grid, constants, options = planned.grid, planned.constants, planned.options
    assert (constants["G"], grid[1]) == (groups, ctas)
    assert planned.kernel == ("batch_kernel" if at_once else "fragment_kernel")
    assert constants.get("AT_ONCE", 0) == at_once
    if at_once == 2:  # a CTA owns its SM
        assert options["num_warps"] * 32 * options["maxnreg"] > 65_536 // 2
        assert grid[0] * grid[1] <= H100.sms


@pytest.mark.parametrize(
    ("sequences", "queries", "groups", "at_once", "ctas"),
    [(4, 5, 2, 1, 6), (2, 8, 1, 1, 6), (8, 5, 2, 2, 1), (16, 1, 1, 2, 1), (32, 2, 1, 1, 1)],
)
def test_heads_of_64_have_more_warps_one_by_one(
    sequences: int, queries: int, groups: int, at_once: int, ctas: int
) -> None:
    """Three CTAs run on an SM: two splits concurrently only where one CTA then has all splits of a tile."""
    planned = plan.early_plan(H100, plan.Pass(4 * queries, 8 * sequences, 64), 32)
    assert (planned.constants["G"], planned.constants["AT_ONCE"], planned.grid[1]) == (groups, at_once, ctas)


def test_more_ctas_run_at_a_time_with_fewer_registers() -> None:
    assert [plan.early_plan(H100, plan.Pass(32, 7, dim), 32).grid[1] for dim in (64, 128)] == [14, 9]


@pytest.mark.parametrize("sms", [1, 78, 114, 132, 148])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_no_more_ctas_than_run_at_a_time_whatever_the_number_of_sms(capability: tuple[int, int], sms: int) -> None:
    """Where CTAs share the splits of a tile, unless there are more tiles than that."""
    gpu = Gpu(capability, sms)
    for dim, pairs, num_rows, splits in itertools.product((64, 128), (1, 8, 64, 512), (1, 8, 20, 68), (1, 2, 34)):
        planned = plan.early_plan(gpu, plan.Pass(num_rows, pairs, dim), splits)
        tiles, ctas = planned.grid
        assert tiles * 8 * planned.constants["G"] >= pairs * num_rows
        if planned.kernel == "batch_kernel":
            assert tiles * ctas <= max(tiles, sms * plan.CTAS_PER_SM[dim])


@pytest.mark.parametrize(("tiles", "ctas_per_sm"), [(1, 1), (31, 1), (32, 2), (300, 2)])
def test_long_rows_fill_the_device(tiles: int, ctas_per_sm: int) -> None:
    planned = plan.late_plan(H100, plan.Pass(4, tiles, 128), 500)
    assert planned.grid == (tiles, plan.ctas_of_late_tile(tiles, ctas_per_sm * H100.sms))
    assert planned.constants["STAGES"] * 64 * 128 * 2 == {1: 112, 2: 64}[ctas_per_sm] * 1024
    assert plan.late_plan(H100, plan.Pass(4, tiles, 128), 2).grid[1] <= 2


@pytest.mark.parametrize(("splits", "ctas_per_sm"), [(28, 1), (33, 1), (60, 2)])
def test_eight_bits_have_two_ctas_to_an_sm_where_there_are_many_splits(splits: int, ctas_per_sm: int) -> None:
    """Both pipelines fit into an SM as often as the plan says, beside 64 queries of 16 bits."""
    planned = plan.late_plan(H100, plan.Pass(4, 8, 128), splits, narrow=True)
    assert planned.grid == (8, min(splits, plan.ctas_of_late_tile(8, ctas_per_sm * H100.sms)))
    narrow, wide = planned.constants["STAGES"], planned.constants["CONVERTED"]
    assert (64 * 128 * (narrow + 2 * wide) + 64 * 128 * 2 + 2048) * ctas_per_sm <= 228 * 1024


def test_what_the_plan_says_of_kernels_is_so() -> None:
    assert mma_tiles.EIGHT.value == plan.ROW_GROUP
    assert plan.PARTS == mma_tiles.PARTS
    assert mma_tiles.PARTS * mma_tiles.KEYS.value == plan.SPLIT
    assert (tma_sm90.ROWS.value, tma_sm90.WARPS.value) == (plan.TMA_TILE_ROWS, plan.TMA_WARPS)
    assert tma_sm90.ROWS.value == plan.CHUNK_ROWS  # of prefill_sm90.py, too
    assert combine.GATHER_WARPS.value == plan.GATHER_WARPS
    assert portable.FAN.value == plan.FAN


def test_plans_need_no_triton() -> None:
    run_python(f"{BLOCK_TRITON}\nfrom fastspec.kernels.attention import plan\nplan.work_sizes(8, 4096, (32, 8, 128))")


def equal_however_shared(
    given: dict[str, Any], window: int | None, ways: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CTAs that share splits, by kind and how many to a tile, against a CTA for every split."""
    choose("fragments", monkeypatch)
    expected = attend(copied(given), window=window)
    for kind, ctas in ways:
        choose(kind, monkeypatch)
        set_ctas(ctas, monkeypatch)
        assert torch.equal(attend(copied(given), window=window), expected), (kind, ctas)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[4]], ids=str)
def test_ctas_that_share_splits_change_no_bit(
    shape: dict[str, Any], window: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partial sums of several are combined by the last; a single CTA stores none."""
    given = case(device, **shape, dtype=dtype_for(device, "fragments"))
    ways = [(kind, ctas) for kind in ("batch", "concurrent") for ctas in (1, 2, 3, 40)]
    equal_however_shared(given, window, ways, monkeypatch)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, pytest.param(2100, marks=pytest.mark.slow)])
def test_as_many_splits_as_are_added_up_at_once_and_one_more(
    window: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4, 5, 8, 9, 16, 17, 23 and 24 splits: against the twin, and by CTAs that take runs of them."""
    lengths = [512, 513, 1024, 1025, 2048, 2049, 2900, 3000]
    given = case(device, lengths=lengths, queries=2, heads=4, kv_heads=1, dim=64, dtype=dtype_for(device, "fragments"))
    choose("fragments", monkeypatch)
    check(given, 128, window)
    ways = [("batch", 1), ("batch", 3), ("concurrent", 2)]
    equal_however_shared(given, window, ways, monkeypatch)
