"""Attention over long caches: splits that grow with their position, combined by a second launch; the TMA pipeline."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.helpers import gluon_simulator, tiny
from tests.helpers.attention import case, copied, rows_of, run
from tests.helpers.devices import devices
from tests.helpers.tiny import tiny_spec

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import triton_ops
from fastspec.kernels.attention import dispatch, plan
from fastspec.kernels.attention.decode import combine
from fastspec.kernels.attention.decode import launch as decoding
from fastspec.kernels.gpu import Gpu
from fastspec.kernels.ops import TORCH_OPS
from fastspec.shapes import KEY_BLOCK
from tests.kernels.attention.test_dispatch import (
    assert_same,
    attend,
    check,
    choose,
    dtype_for,
    run_in_steps,
    simulate_tma,
    work_for,
)
from tests.scheduling.test_scheduler import run as decode
from tests.scheduling.test_scheduler import texts


@pytest.mark.parametrize("window", [None, 70])
def test_tma_copies_may_land_early_or_late(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator loads as much as it may before anything is stored, or nothing."""
    choose("tma", monkeypatch)
    simulate_tma(monkeypatch)
    given = case("cpu", lengths=[700, 131, 64], queries=11, heads=14, kv_heads=2, dim=128, dtype=torch.bfloat16)
    found = []
    for late in (True, False):
        monkeypatch.setattr(gluon_simulator.MACHINE, "late", late)
        found.append(run_in_steps(given, 11, window=window))
    assert_same(*found)
    check(given, 128, window)


@pytest.mark.parametrize("device", devices())
def test_bits_over_a_ladder(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pass and the room: rows that end in each rung, the longest at both edges of a split."""
    dtype = dtype_for(device, choose("tma", monkeypatch))
    given = case(device, lengths=[1155, 518, 259], queries=3, heads=1, kv_heads=1, dim=64, dtype=dtype)
    whole = run_in_steps(given, 3)
    check(given, 128, None)
    assert_same(run_in_steps(given, 1), whole)
    assert_same(run_in_steps({**given, "num_blocks": given["num_blocks"] + 6}, 3), whole)
    alone = [attend({**rows_of(copied(given), [row]), "num_blocks": room}) for row, room in enumerate((5, 3, 2))]
    assert torch.equal(torch.cat(alone), whole[0])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 1600])
def test_more_splits_than_are_added_up_at_once(
    device: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """39 splits of a row, and 34; with the window those from number 25, or for one of its queries 26, and 20 on."""
    dtype = dtype_for(device, choose("tma", monkeypatch))
    monkeypatch.setattr(plan, "LATE_SPLITS", ((0, 128),))
    assert combine.GATHER_WARPS.value * combine.SPLITS_PER_WARP.value == 32
    given = case(device, lengths=[4928, 4250], queries=2, heads=2, kv_heads=1, dim=64, dtype=dtype)
    check(given, 128, window)
    whole = run_in_steps(given, 2, window=window)
    assert_same(run_in_steps(given, 1, window=window), whole)
    for row in range(2):
        assert torch.equal(run_in_steps(rows_of(given, [row]), 2, window=window)[0], whole[0][[row]])


@pytest.mark.parametrize("device", devices())
def test_splits_of_the_ladder_that_a_window_reaches(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own ladder, where its rungs meet: only the splits of the two sides leave sums."""
    ladder = plan.LATE_SPLITS
    choose("tma", monkeypatch)
    monkeypatch.setattr(plan, "LATE_SPLITS", ladder)
    edges = [position for position, _keys in ladder[1:]]
    dtype = dtype_for(device, "tma")
    given = case(device, lengths=[edge + 1 for edge in edges], queries=2, heads=1, kv_heads=1, dim=64, dtype=dtype)
    check(given, 128, 70)
    work = work_for(given)
    alone = run_in_steps(rows_of(given, [-1]), 1, window=70)[0]
    assert torch.equal(attend(copied(given), window=70, work=work)[[-1]], alone)
    splits = plan.late_splits(given["num_blocks"] * KEY_BLOCK)
    weights = work.partials[-len(edges) * splits * 2 :].view(len(edges), splits, 2)
    numbers = {position: number for position, _keys, number in plan.split_sizes()}
    for row, edge in enumerate(edges):
        left = (~weights[row].isnan().all(dim=1)).nonzero().flatten().tolist()
        assert left == [numbers[edge] - 1, numbers[edge]]


FROM = 640  # for the library's 4352: within a split of the ladder of tests, as that one is of its own


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 70, 300])
@pytest.mark.parametrize("short", ["fragments", "batch"])
def test_rows_of_either_kind_beside_each_other(
    short: str, window: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose queries are early, late, or some of either: each as alone, where there is room for it and no more."""
    if device == "cpu":
        pytest.skip("the interpreter of the early kernels has no products of 16-bit values, which the TMA kernel takes")
    choose("tma", monkeypatch)
    dtype = dtype_for(device, choose(short, monkeypatch))
    monkeypatch.setattr(plan, "LATE_FROM", FROM)
    lengths = [FROM + 2, 900, 300, 1155, FROM + 1, FROM]  # the first and the fifth have queries on both sides
    given = case(device, lengths=lengths, queries=3, heads=2, kv_heads=1, dim=64, dtype=dtype, norm=True)
    check(given, 128, window)
    whole = run_in_steps(given, 3, window=window)
    assert_same(run_in_steps(given, 1, window=window), whole)
    for row, length in enumerate(lengths):
        room = -(-length // KEY_BLOCK)
        alone = run_in_steps({**rows_of(given, [row]), "num_blocks": room}, 3, window=window)
        assert torch.equal(alone[0], whole[0][[row]]), length
    late = [row for row, length in enumerate(lengths) if length > FROM + 3]  # no row is the short kernels'
    assert torch.equal(run_in_steps(rows_of(given, late), 3, window=window)[0], whole[0][late])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 70])
def test_early_rows_are_left_alone(device: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late ones are as where all rows are; with the window a single split is the output at once."""
    dtype = dtype_for(device, choose("tma", monkeypatch))
    given = case(device, lengths=[FROM + 2, 300, 900, 700], queries=3, heads=2, kv_heads=1, dim=64, dtype=dtype)
    expected = attend(copied(given), window=window)
    monkeypatch.setattr(plan, "LATE_FROM", FROM)
    monkeypatch.setattr(decoding, "start_early", lambda given, *rest: given.out.fill_(7))
    found, early = attend(copied(given), window=window), given["positions"] < FROM
    assert torch.equal(found[~early], expected[~early])
    assert (found[early] == 7).all()
    assert early.sum(dim=1).tolist() == [1, 3, 0, 0]


@pytest.mark.parametrize("device", devices())
def test_passes_whose_rows_are_all_late(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is for early rows is launched where there may be some; the others are the same without it."""
    dtype = dtype_for(device, choose("tma", monkeypatch))
    monkeypatch.setattr(plan, "LATE_FROM", FROM)
    given = case(device, lengths=[900, 1155], queries=3, heads=2, kv_heads=1, dim=64, dtype=dtype)
    short, launched = decoding.start_early, []

    def counted(*arguments: Any) -> None:
        launched.append(arguments)
        if device != "cpu":  # the interpreter of the early kernels takes other types than the simulator does
            short(*arguments)

    monkeypatch.setattr(decoding, "start_early", counted)
    first = -(-FROM // KEY_BLOCK)
    late = attend({**copied(given), "first_block": first})
    assert not launched
    assert torch.equal(attend({**copied(given), "first_block": first - 1}), late)
    assert torch.equal(attend(copied(given)), late)
    assert len(launched) == 2


def test_splits_of_the_ladder_are_counted() -> None:
    """Splits tile the positions: a room of one position more has a split more just where one begins."""
    starts, position = [], 0
    for (_edge, keys), (stop, _keys) in pairwise((*plan.LATE_SPLITS, (131072, 0))):
        while position < stop:
            starts.append(position)
            position += keys
        assert position == stop
        assert keys % 128 == 0
    for number, start in enumerate(starts):
        assert plan.late_splits(start + 1) == number + 1
        assert start == 0 or plan.late_splits(start) == number
    assert plan.late_splits(131072) == len(starts)


@pytest.mark.parametrize(("capable", "page_size"), [(False, 64), (True, 20)])
def test_without_tma_the_portable_kernel_has_all_rows_of_a_long_cache(
    capable: bool, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their position: by the room of the block table alone."""
    monkeypatch.setattr(dispatch, "gpu_of", lambda device: Gpu((9, 0) if capable else (10, 0), 148))
    monkeypatch.setattr(decoding, "start_early", lambda *given: launched.append("short"))
    monkeypatch.setattr(decoding, "launch", lambda kernel, *given, **options: launched.append(kernel.__name__))
    launched: list[str] = []
    for capacity, blocks, expected in ((4352, 17, "short"), (4400, 1, "_decode_kernel"), (4400, 18, "_decode_kernel")):
        given = case("cpu", lengths=[9], queries=2, dim=64, page_size=page_size, dtype=torch.bfloat16)
        pages = -(-capacity // page_size) if expected != "short" else capacity // page_size
        given |= {"block_table": torch.ones(1, pages, dtype=torch.int64), "num_blocks": blocks}
        work = dispatch.attend_work(torch.device("cpu"), 2, capacity, (4, 2, 64))
        run(dispatch.attend, given, work)
        assert launched.pop() == expected
        assert not launched


def test_text_over_a_long_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler with the portable kernel, work of the size that it gives it, and a row in its second split."""
    choose("tiles", monkeypatch)
    mine = TORCH_OPS.replaced(attend=triton_ops.TRITON_OPS.attend, workspace=triton_ops.TRITON_OPS.workspace)
    monkeypatch.setattr(tiny, "tiny_spec", lambda **given: tiny_spec(**{**given, "dim": 64}))
    found = []
    for ops, k in ((TORCH_OPS, 0), (mine, 0), (mine, 2)):
        monkeypatch.setattr(tiny, "ops_for", lambda device, ops=ops: ops)  # type: ignore[misc]
        engine = tiny.tiny_engine(k=2, batch=1, max_length=17_000, page_size=64)
        found.append(texts(decode(engine, [[place % 101 for place in range(190)]], 6, k=k)))
    assert found[1] == found[0]
    assert found[2] == found[1]
