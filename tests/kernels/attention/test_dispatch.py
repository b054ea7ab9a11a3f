"""Decoding attention and prompt chunks against their torch twin: on a GPU for real, elsewhere in the interpreter.

Gluon kernels have no interpreter: on the CPU the source of the mma kernels runs in Triton's interpreter, that of the
TMA kernel in a simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import gluon_simulator
from tests.helpers.attention import MISREAD, case, copied, rows_of, run, stored, torch_error, twin
from tests.helpers.devices import devices
from tests.helpers.layouts import spread

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.attention import dispatch as attention
from fastspec.kernels.attention import plan
from fastspec.kernels.attention.decode import launch as decoding
from fastspec.kernels.common import packing
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.embed import embed
from fastspec.kernels.gpu import Gpu
from fastspec.shapes import KEY_BLOCK
from tests.helpers.gluon_on_cpu import interpreted

CPU_PARTS = (
    "attention/decode/query_rows",
    "attention/decode/mma_tiles",
    "attention/decode/combine",
)
CPU_FRAGMENTS = (*CPU_PARTS, "attention/decode/mma")
CPU_BATCH = (*CPU_PARTS, "attention/decode/kv_loads", "attention/decode/mma_batch")
MODULES = {"fragments": CPU_FRAGMENTS, "batch": CPU_BATCH, "concurrent": CPU_BATCH}
KINDS = ("tiles", *MODULES, "tma")
LATE_SPLITS = ((0, 256), (256, 128), (512, 384), (896, 256))  # every size within reach of short rows


@cache
def _interpreted(stems: tuple[str, ...]) -> Any:
    return interpreted(*stems)


@cache
def _simulated_tma() -> dict[str, Any]:
    return gluon_simulator.attention_by_tma()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which decoding kernel runs."""
    return choose(request.param, monkeypatch)


def choose(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if kind in MODULES and not torch.cuda.is_available():
        module = _interpreted(MODULES[kind])
        for name in ("fragment_kernel", "batch_kernel"):
            if hasattr(module, name):
                monkeypatch.setattr(decoding, name, getattr(module, name))
    if kind == "tma" and not torch.cuda.is_available():
        simulate_tma(monkeypatch)
    set_ctas(0 if kind == "fragments" else 1, monkeypatch)
    monkeypatch.setattr(plan, "reads_concurrently", lambda *args: kind == "concurrent")
    as_many = partial(plan.even_groups, max_groups=plan.MAX_ROW_GROUPS)  # rows to a tile as there are
    monkeypatch.setattr(plan, "tile_groups", lambda gpu, sizes: as_many(sizes.num_rows))
    monkeypatch.setattr(attention, "uses_mma", lambda *args: kind != "tiles")
    monkeypatch.setattr(plan, "LATE_FROM", 0 if kind == "tma" else 2**30)
    monkeypatch.setattr(plan, "LATE_SPLITS", LATE_SPLITS)
    return kind


def set_ctas(ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many CTAs share the splits of a tile; 0: every split has its own."""
    monkeypatch.setattr(plan, "ctas_of_early_tile", lambda *args: ctas)


def simulate_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs decode/tma_sm90.py in the simulator, as on a GPU whose CTAs three tiles of two heads share unevenly."""
    stand_ins: dict[str, Any] = {**_simulated_tma(), "launch": gluon_simulator.launch}
    stand_ins |= {"described": gluon_simulator.Described, "gpu_of": lambda device: Gpu((9, 0), 20)}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(decoding, name, stand_in)


def dtype_for(device: str, kind: str) -> torch.dtype:
    """What a kernel is tested in: the interpreter has none of bf16's products."""
    return torch.bfloat16 if kind == "tma" or (device == "cuda" and kind != "tiles") else torch.float32


def work_for(given: dict[str, Any], split_keys: int = 128) -> attention.AttendWork:
    """Exactly the room that a pass needs, with NaN where a partial sum is to be written."""
    batch, queries = given["positions"].shape
    heads, dim = given["num_heads"], given["keys"].shape[3]
    device, room = given["qkv"].device, given["num_blocks"] * KEY_BLOCK
    page_size = given["keys"].shape[1]
    capacity = given["block_table"].shape[1] * page_size
    splits = -(-room // split_keys)
    groups = -(-splits // plan.FAN)
    if attention.uses_mma(device, given["qkv"].dtype, dim, page_size, capacity):
        far = plan.late_splits(room) if room > plan.LATE_FROM else 0
        splits, groups = max(plan.early_splits(min(room, plan.LATE_FROM)), far), 0
    partials = batch * queries * heads * (splits + groups) * (dim + 1)
    counters = batch * queries * given["keys"].shape[2] * 8 * (1 + groups)
    return attention.AttendWork(
        split_keys,
        torch.zeros(counters, dtype=torch.int32, device=device),
        torch.full((partials,), float("nan"), device=device),
    )


def attend(
    given: dict[str, Any],
    split_keys: int = 128,
    window: int | None = None,
    work: attention.AttendWork | None = None,
    regroup: bool = False,
) -> Tensor:
    """The kernel; its counters are as it found them."""
    work = work or work_for(given, split_keys)
    out = run(partial(attention.attend, regroup=regroup), given, work, window)
    assert work.counters.count_nonzero() == 0
    return out


def check(given: dict[str, Any], split_keys: int, window: int | None) -> None:
    mine, exact, same = copied(given), copied(given, torch.float32), copied(given)
    ours, wide = attend(mine, split_keys, window), twin(exact, window)
    assert torch.isfinite(ours).all()
    eager = ours.device.type == "cpu" and ours.dtype != torch.float32
    # the rule of the house: twice what torch itself errs by; floored at a few fp32 ulp of values near one: scores of
    # heads longer than 256 are sums of as many times more products, and the bound of their rounding grows likewise
    floor = 2e-6 * max(1.0, given["keys"].shape[3] / 256)
    assert (ours.float() - wide).abs().max().item() <= max(2 * torch_error(given, window, wide, eager), floor)
    twin(same, window)
    for kept, expected in zip(stored(mine), stored(same), strict=True):
        if given["k_norm"] is None:
            assert torch.equal(kept, expected)  # the same fp32 operations in the same order, rounded once
        else:
            # torch sums the squares in another order: a last bit of the factor may differ, and with it one rounding
            # each of the normed key, of its product with the weight, and of the rotated key
            eps = torch.finfo(given["qkv"].dtype).eps
            torch.testing.assert_close(kept, expected, rtol=3 * eps, atol=3 * eps)


# dims of 64 and 128 are those that the kernel out of registers has
SHAPES = [
    {"lengths": [1], "queries": 1, "dim": 64},
    {"lengths": [2, 140], "queries": 2, "dim": 64, "heads": 4, "kv_heads": 1},
    {"lengths": [19, 300, 64], "queries": 5, "heads": 6, "kv_heads": 2, "dim": 64, "page_size": 24},
    {"lengths": [270], "queries": 17, "heads": 4, "kv_heads": 1, "dim": 128, "page_size": 64},
    # with a window of 70: the first two splits of the second group
    {"lengths": [2310], "queries": 9, "heads": 2, "kv_heads": 1, "dim": 64},
]
TILE_SHAPES = [
    {"lengths": [40, 23], "queries": 3, "heads": 3, "kv_heads": 3, "dim": 40},
    {"lengths": [33], "queries": 2, "heads": 40, "kv_heads": 1, "dim": 16, "page_size": 7},
    {"lengths": [150], "queries": 2, "dim": 256, "heads": 2, "kv_heads": 2},
    {"lengths": [150], "queries": 2, "dim": 512, "heads": 2, "kv_heads": 1},
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_its_torch_definition(
    shape: dict[str, Any], norm: bool, window: int | None, kind: str, device: str
) -> None:
    check(case(device, **shape, norm=norm, dtype=dtype_for(device, kind)), 128, window)


@pytest.mark.parametrize("device", devices())
def test_windows_within_one_split(kind: str, device: str) -> None:
    """One of an odd number, one of an even."""
    check(case(device, lengths=[200, 330], queries=2, dim=64, dtype=dtype_for(device, kind)), 128, 20)


@pytest.mark.parametrize("device", devices())
def test_regroups_for_the_product_behind(kind: str, device: str) -> None:
    """The same numbers to the bit, in the other order; tiles and long caches leave rows as they are."""
    for shape in (SHAPES[1], SHAPES[2], SHAPES[3]):
        given = case(device, **shape, dtype=dtype_for(device, kind))
        plain, regrouped = attend(copied(given)), attend(copied(given), regroup=True)
        if kind in ("fragments", "batch", "concurrent"):
            assert regrouped.shape == (*plain.shape[:2], plain.shape[2] // 64, 64)
            assert not torch.equal(regrouped.flatten(2), plain)
            regrouped = packing.in_order(regrouped)
        assert torch.equal(regrouped, plain)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("shape", TILE_SHAPES, ids=str)
def test_tiles_take_any_head(
    shape: dict[str, Any], window: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose("tiles", monkeypatch)
    check(case(device, **shape, norm=True), 128, window)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "shape",
    [
        {"lengths": [70], "queries": 60},
        {"lengths": [18], "queries": 18, "dim": 40},
        {"lengths": [40], "queries": 18, "dim": 512, "heads": 2, "kv_heads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 9])
def test_a_chunk_equals_its_twin(shape: dict[str, Any], window: int | None, device: str) -> None:
    check(case(device, **shape, norm=True), 128, window)
    check(case(device, **shape), 128, window)


@pytest.mark.parametrize("device", devices())
def test_chunks_and_steps_store_the_same_bits(device: str, kind: str) -> None:
    if kind == "tma" and device == "cpu":
        pytest.skip("of chunks the interpreter stores what it rounds to bf16 by cutting off")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    whole = case(device, lengths=[40], queries=40, dim=64, norm=True, dtype=dtype)
    steps = copied(whole)
    attend(whole)
    for first in range(0, 40, 8):
        attend(rows_of(steps, [0], slice(first, first + 8)))
    for ours, theirs in zip(stored(whole), stored(steps), strict=True):
        assert torch.equal(ours, theirs)


def run_in_steps(given: dict[str, Any], queries: int, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Outputs and cache of a case fed `queries` tokens at a time."""
    mine = copied(given)
    total = given["positions"].shape[1]
    parts = [attend(rows_of(mine, slice(None), slice(i, i + queries)), **options) for i in range(0, total, queries)]
    return torch.cat(parts, dim=1), stored(mine)


def assert_same(first: tuple[Tensor, list[Tensor]], second: tuple[Tensor, list[Tensor]]) -> None:
    assert torch.equal(first[0], second[0])
    for ours, theirs in zip(first[1], second[1], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 50])
def test_a_row_does_not_feel_what_runs_beside_it(window: int | None, device: str, kind: str) -> None:
    """To the bit, outputs and cache: one query or many, alone or in a batch, more blocks, another order of pages."""
    dtype = torch.bfloat16 if device == "cuda" else dtype_for(device, kind)
    # on the CPU a library multiplies, whose bits depend on how many columns there are: 8 in all of these
    shape = {"heads": 16, "kv_heads": 2} if device == "cuda" else {"heads": 2, "kv_heads": 2}
    lengths = [40, 150, 17]
    given = case(device, lengths=lengths, queries=8, dim=64, norm=True, dtype=dtype, **shape)
    whole = run_in_steps(given, 8, window=window)
    assert_same(run_in_steps(given, 1, window=window), whole)
    assert_same(run_in_steps(given, 3, window=window), whole)
    more = {**given, "num_blocks": given["num_blocks"] + 1}
    assert_same(run_in_steps(more, 8, window=window), whole)
    mine = copied(given)
    alone = torch.cat([attend(rows_of(mine, [row]), window=window) for row in (2, 0, 1)])
    assert torch.equal(alone[[1, 2, 0]], whole[0])
    order = torch.randperm(len(given["keys"]) - 1).to(device)
    moved = {**given, "block_table": 1 + torch.argsort(order)[given["block_table"] - 1]}
    for name in ("keys", "values"):
        moved[name] = torch.cat((given[name][:1], given[name][1:][order]))
    assert torch.equal(run_in_steps(moved, 8, window=window)[0], whole[0])


@pytest.mark.parametrize("device", devices())
def test_rows_that_do_not_write(device: str, kind: str) -> None:
    """Their K and V are dropped and nothing else changes; positions beyond every table do no harm."""
    dtype = dtype_for(device, kind)
    given = case(device, lengths=[20, 33, 12], queries=4, dim=64, dtype=dtype)
    given["writes"][0, 2:] = False  # junk after what counts
    given["writes"][1] = False
    given["positions"][1] = 10**9
    mine, same = copied(given), copied(given)
    for name in ("keys", "values"):  # 0 * NaN in what only rows that do not count look at
        mine[name].nan_to_num_()
        same[name].nan_to_num_()
    before = [x.clone() for x in stored(mine)]
    out, expected = attend(mine), twin(same)
    if device == "cpu" and kind in ("fragments", "batch", "concurrent"):
        assert out[1].isnan().all()  # left as new memory is: in a pass over long rows another kernel may have them
    counts = given["writes"]
    error = (out.float() - expected.float())[counts].abs().max().item()
    # values near one: one rounding to the dtype each, and a few fp32 ulp of sums taken in another order
    assert error <= torch.finfo(dtype).eps + 2e-6
    for kept, wanted, old in zip(stored(mine), stored(same), before, strict=True):
        assert torch.equal(kept, wanted)
        page, offset = given["block_table"][0, 18 // 16] - 1, 18 % 16
        assert torch.equal(kept[page, offset], old[page, offset])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("window", [None, 100])
def test_the_kernel_equals_its_torch_definition_at_real_sizes(dim: int, dtype: torch.dtype, window: int | None) -> None:
    """What runs by default: the mma kernels where they take the head; elsewhere splits of several sizes."""
    for queries in (1, 6, 17, 200):
        given = case(
            "cuda", lengths=[989, 300, 512], queries=queries, heads=8, kv_heads=2, dim=dim, dtype=dtype, norm=True
        )
        for split_keys in (128, 256, 1024):
            check(given, split_keys, window)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_bits_over_many_rows(dim: int, kind: str) -> None:
    """10^4 rows in random places; as many query rows a tile as there are kinds of tiles."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, 700, (160,), generator=generator).tolist()
    given = case("cuda", lengths=lengths, queries=8, heads=8, kv_heads=1, dim=dim, dtype=torch.bfloat16, norm=True)
    for split_keys in (128, 256):
        whole = run_in_steps(given, 8, split_keys=split_keys)
        for queries in (1, 2, 3, 4):  # tiles of 8, 16, 24 and 32 rows
            assert_same(run_in_steps(given, queries, split_keys=split_keys), whole)
        order = torch.randperm(len(lengths), generator=generator).cuda()
        assert torch.equal(attend(rows_of(copied(given), order), split_keys), whole[0][order])


@pytest.mark.gpu
def test_cache_beyond_two_to_the_31_elements(kind: str) -> None:
    """Page 2^31 / (page_size * kv_heads * dim) starts at element 2^31: int32 offsets would wrap there."""
    small = case(
        "cuda", lengths=[150, 150], queries=3, heads=16, kv_heads=8, dim=128, page_size=64, dtype=torch.bfloat16
    )
    for name in ("qkv", "positions"):
        small[name] = small[name][:1].expand(2, *small[name].shape[1:]).contiguous()
    first = small["block_table"][0].clone()
    pages = 2**31 // (64 * 8 * 128) + 4
    beyond = torch.arange(pages - 4, pages, device="cuda")[: len(first)]
    large = {**small, "block_table": torch.stack((first, beyond))}
    for name in ("keys", "values"):
        large[name] = torch.empty(pages, 64, 8, 128, dtype=torch.bfloat16, device="cuda")
        large[name][: len(small[name])] = small[name]
        large[name][beyond] = small[name][first]
    out = attend(large)
    assert torch.isfinite(out).all()
    assert torch.equal(out[0], out[1])
    for name in ("keys", "values"):
        assert torch.equal(large[name][beyond].nan_to_num(7), large[name][first].nan_to_num(7))


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 6])
def test_bits_in_a_chain_of_early_launches(queries: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 passes that each write what the next reads, in one graph: the same bits with early launches and without."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no early launches below sm_90")
    lengths = [64 * queries + 700, 64 * queries + 3]
    given = case("cuda", lengths=lengths, queries=64 * queries, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16)
    table, ids = torch.ones(16, 64, dtype=torch.bfloat16, device="cuda"), torch.arange(4, device="cuda")
    results = []
    for early in (True, False):
        monkeypatch.setattr(attention, "has_pdl", lambda device, early=early: early)
        mine = copied(given)
        work = work_for({**given, "positions": given["positions"][:, :queries]})
        passes = [rows_of(mine, slice(None), slice(i, i + queries)) for i in range(0, 64 * queries, queries)]
        for one in passes:
            one.update({name: one[name].contiguous() for name in ("qkv", "positions", "writes")})

        def chain(passes: list[dict[str, Any]] = passes, work: attention.AttendWork = work) -> Tensor:
            outs = []
            for one in passes:
                embed(Weight(table), ids)  # as at the start of every pass: what follows it may read the cache at once
                outs.append(run(attention.attend, one, work))
            return torch.cat(outs, dim=1)

        eager = chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for _ in range(50):
            graph.replay()
            assert torch.equal(out, eager)
        assert work.counters.count_nonzero() == 0
        results.append((eager, stored(mine)))
    assert_same(results[0], results[1])


def test_work_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choose("tiles", monkeypatch)
    given = case("cpu", lengths=[300], queries=2)
    small = attention.AttendWork(128, torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    with pytest.raises(ValueError, match="attend_work"):
        run(attention.attend, given, small)
    assert torch.isnan(given["keys"]).any()


@pytest.mark.parametrize("positions", [256, 4352, 4353, 8192, 8193, 131072])
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 8, 64), (3, 3, 40), (64, 1, 16), (16, 8, 256)])
def test_work_has_room_for_every_pass(positions: int, heads: tuple[int, int, int]) -> None:
    num_heads, kv_heads, dim = heads
    long = plan.late_splits(-(-positions // KEY_BLOCK) * KEY_BLOCK) if positions > plan.LATE_FROM else 0
    splits = -(-positions // plan.split_keys_for(positions, dim))
    groups = -(-splits // plan.FAN)
    near = plan.early_splits(min(positions, plan.LATE_FROM))
    for batch, queries in ((1, 17), (1, 1), (5, 6), (64, 2)):
        counters, partials = plan.work_sizes(batch * queries, positions, heads)
        for rows in (8, 16, 32):
            tiles = batch * kv_heads * -(-queries * num_heads // kv_heads // rows)
            assert counters >= tiles * (1 + groups)
        assert splits == 1 or partials >= batch * queries * num_heads * max(splits + groups, near, long) * (dim + 1)
        assert attention.attend_work_bytes(batch * queries, positions, heads) == 4 * (counters + partials)


@pytest.mark.parametrize(("name", "change", "match"), MISREAD)
def test_what_would_be_misread_is_refused(name: str, change: Callable[[Any], Any], match: str) -> None:
    given = case("cpu", lengths=[9, 7], queries=3, norm=True)
    work = work_for(given)
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=match):
        run(attention.attend, given, work)


@pytest.mark.parametrize("queries", [1, 20])
def test_heads_without_a_tile_are_refused(queries: int) -> None:
    given = case("cpu", lengths=[20], queries=queries, dim=1024)
    with pytest.raises(ValueError, match="head_dim is 1024; wanted an even one up to 512"):
        run(attention.attend, given, work_for(given))


def test_views_are_read_as_they_are() -> None:
    """Of what one pass alone is made of: the product, positions and writes."""
    given = case("cpu", lengths=[9, 7], queries=3)
    expected = attend(copied(given))
    views = copied(given)
    for name in ("qkv", "positions", "writes"):
        views[name] = spread(given[name])
    assert torch.equal(attend(views), expected)
