"""Paged attention against its torch twin: on a GPU for real, elsewhere in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.models import config
from fastspec.shapes import KEY_BLOCK, AttentionRule
from tests.helpers.devices import devices
from tests.helpers.layouts import spread

triton: Any = pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.attention import prefill as attention  # noqa: E402
from fastspec.kernels.attention.plan import TILES  # noqa: E402
from fastspec.kernels.common.checks import MAX_HEAD_DIM  # noqa: E402
from fastspec.kernels.gpu import shared_memory  # noqa: E402

NAN = float("nan")


def case(
    device: str,
    *,
    lengths: list[int],
    queries: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Rows whose newest `queries` tokens end at `lengths`; every slot that no row owns holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    pages_per_row = -(-max(lengths) // page_size) + 1
    num_pages = 1 + len(lengths) * pages_per_row
    order = 1 + torch.randperm(num_pages - 1, generator=generator)
    table = order.view(len(lengths), pages_per_row)
    keys = torch.full((num_pages, page_size, kv_heads, dim), NAN)
    values = torch.full_like(keys, NAN)
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        where = (table[row, at // page_size], at % page_size)
        keys[where] = torch.randn(length, kv_heads, dim, generator=generator)
        values[where] = torch.randn(length, kv_heads, dim, generator=generator)
    newest = torch.tensor(lengths)[:, None] - queries
    return {
        "query": torch.randn(len(lengths), queries, heads, dim, generator=generator).to(dtype).to(device),
        "keys": keys.to(dtype).to(device),
        "values": values.to(dtype).to(device),
        "block_table": table.to(device),
        "positions": (newest + torch.arange(queries)).clamp_min(0).to(device),
    }


def blocks(given: dict[str, Tensor]) -> int:
    return -(-(int(given["positions"].max()) + 1) // KEY_BLOCK)


def both(given: dict[str, Tensor], window: int | None = None) -> tuple[Tensor, Tensor]:
    """(kernel, twin on fp32 inputs)."""
    count = blocks(given)
    ours = attention.paged_attention(**given, num_blocks=count, rule=AttentionRule(window))
    wide = {name: x.float() if x.is_floating_point() else x for name, x in given.items()}
    return ours, reference.paged_attention(**wide, num_blocks=count, rule=AttentionRule(window))


def torch_error(given: dict[str, Tensor], window: int | None, exact: Tensor) -> float:
    """What torch's own scaled_dot_product_attention errs by in the inputs' dtype, on gathered pages."""
    worst = 0.0
    page_size = given["keys"].shape[1]
    for row in range(len(given["query"])):
        at = torch.arange(int(given["positions"][row].max()) + 1, device=given["keys"].device)
        pages = given["block_table"][row][at // page_size]
        k, v = (given[name][pages, at % page_size].transpose(0, 1) for name in ("keys", "values"))
        seen = at <= given["positions"][row][:, None]
        if window is not None:
            seen &= at > given["positions"][row][:, None] - window
        q = given["query"][row].transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        worst = max(worst, (out.transpose(0, 1).float() - exact[row]).abs().max().item())
    return worst


SHAPES = [
    {"lengths": [1], "queries": 1},
    {"lengths": [17, 3, 99], "queries": 1},
    {"lengths": [19, 64], "queries": 5, "heads": 6, "kv_heads": 2},
    {"lengths": [300, 17], "queries": 17, "page_size": 64},
    {"lengths": [40], "queries": 8, "heads": 8, "kv_heads": 1},
    {"lengths": [40, 23], "queries": 3, "heads": 3, "kv_heads": 3, "dim": 40},
    {"lengths": [33], "queries": 2, "dim": 128, "heads": 2, "kv_heads": 1},
    {"lengths": [21], "queries": 2, "dim": 256, "heads": 2, "kv_heads": 2, "page_size": 7},
    {"lengths": [70], "queries": 64},
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_its_torch_definition(shape: dict[str, object], window: int | None, device: str) -> None:
    given = case(device, **shape)  # type: ignore[arg-type]
    ours, exact = both(given, window)
    assert torch.isfinite(ours).all()
    # the rule of the house: twice what torch itself errs by; floored at a few fp32 ulp of values near one
    assert (ours - exact).abs().max().item() <= max(2 * torch_error(given, window, exact), 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_the_kernel_equals_its_torch_definition_at_real_sizes(dim: int, dtype: torch.dtype, window: int | None) -> None:
    for queries in (1, 6, 17, 256):
        given = case("cuda", lengths=[989, 300, 512], queries=queries, heads=8, kv_heads=2, dim=dim, dtype=dtype)
        ours, exact = both(given, window)
        bound = max(2 * torch_error(given, window, exact), 2e-6)
        assert (ours.float() - exact).abs().max().item() <= bound, queries


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 9])
def test_a_row_does_not_feel_what_runs_beside_it(window: int | None, device: str) -> None:
    """To the bit: alone or in a batch, one query or many, more blocks than needed."""
    lengths = [60, 300, 17, 41]
    given = case(device, lengths=lengths, queries=9, heads=6, kv_heads=2)
    whole = attention.paged_attention(**given, num_blocks=2, rule=AttentionRule(window))
    for row in range(len(lengths)):
        one = {
            name: x[row : row + 1] if name in ("query", "block_table", "positions") else x for name, x in given.items()
        }
        need = -(-lengths[row] // KEY_BLOCK)
        alone = attention.paged_attention(**one, num_blocks=need, rule=AttentionRule(window))
        assert torch.equal(alone[0], whole[row])
        for query in (0, 4, 8):
            single = {
                **one,
                "query": one["query"][:, query : query + 1],
                "positions": one["positions"][:, query : query + 1],
            }
            out = attention.paged_attention(**single, num_blocks=4, rule=AttentionRule(window))
            assert torch.equal(out[0, 0], whole[row, query])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_over_many_rows(dtype: torch.dtype) -> None:
    """10^4 rows in random places, one query at a time against nine together."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, 700, (160,), generator=generator).tolist()
    given = case("cuda", lengths=lengths, queries=8, heads=8, kv_heads=1, dim=128, dtype=dtype)
    whole = attention.paged_attention(**given, num_blocks=3, rule=AttentionRule())  # 160 x 8 x 8 rows
    for _ in range(3):
        order = torch.randperm(len(lengths), generator=generator).cuda()
        mixed = {name: x[order] if name in ("query", "block_table", "positions") else x for name, x in given.items()}
        assert torch.equal(attention.paged_attention(**mixed, num_blocks=3, rule=AttentionRule()), whole[order])
        for query in range(8):
            single = {
                **mixed,
                "query": mixed["query"][:, query : query + 1],
                "positions": mixed["positions"][:, query : query + 1],
            }
            out = attention.paged_attention(**single, num_blocks=3, rule=AttentionRule())
            assert torch.equal(out[:, 0], whole[order, query])


@pytest.mark.gpu
def test_cache_beyond_two_to_the_31_elements() -> None:
    """Page 2^31 / (page_size * kv_heads * dim) starts at element 2^31: int32 offsets would wrap there."""
    page_size, kv_heads, dim = 64, 8, 128
    pages = 2**31 // (page_size * kv_heads * dim) + 4
    keys = torch.full((pages, page_size, kv_heads, dim), NAN, dtype=torch.bfloat16, device="cuda")
    values = torch.full_like(keys, NAN)
    table = torch.tensor([[pages - 1, pages - 2], [1, 2]], device="cuda")  # beyond, and a control row below
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(2, page_size, kv_heads, dim, generator=generator).to(torch.bfloat16).cuda()
    for row in range(2):
        keys[table[row]] = content
        values[table[row]] = content
    query = torch.randn(1, 3, 16, dim, generator=generator).to(torch.bfloat16).cuda().expand(2, -1, -1, -1)
    positions = torch.tensor([[97, 98, 99]] * 2, device="cuda")
    out = attention.paged_attention(query, keys, values, table, positions, num_blocks=1, rule=AttentionRule())
    assert torch.isfinite(out).all()
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("keys", lambda x: x.transpose(0, 1), r"keys is .*strides.*pass whole layers"),
        ("keys", lambda x: x.double(), "keys is float64"),
        ("values", lambda x: x[1:], "values is .*goes with keys"),
        ("block_table", lambda x: x.t().contiguous().t(), "block_table is .*each row contiguous"),
        ("block_table", lambda x: x.int(), "block_table is int32"),
        ("block_table", lambda x: x[:1], r"block_table is int64 \[1, .*wanted int64 \[2, 1 or more\]"),
        ("positions", lambda x: x.int(), r"positions is int32 \[2, 3\]; wanted contiguous int64 \[2, 3\]"),
        ("positions", lambda x: x[:, :2], r"positions is int64 \[2, 2\]"),
        ("query", lambda x: x.half(), "query is float16"),
        ("query", lambda x: x[..., :16], "query is .*wanted contiguous float32"),
        ("query", lambda x: x[:, :, :3], "num_heads is 3; wanted a multiple of the 2"),
    ],
)
def test_wrong_layouts_are_refused_by_name(name: str, change: Callable[[Tensor], Tensor], match: str) -> None:
    given = case("cpu", lengths=[9, 7], queries=3)
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=match):
        attention.paged_attention(**given, num_blocks=1, rule=AttentionRule())


@pytest.mark.parametrize("change", [lambda x: x[:1], Tensor.half, spread])
def test_where_the_result_goes_is_checked(change: Callable[[Tensor], Tensor]) -> None:
    given = case("cpu", lengths=[9, 7], queries=3)
    with pytest.raises(ValueError, match=r"out is .*leave it out"):
        attention.paged_attention(**given, num_blocks=1, rule=AttentionRule(), out=change(given["query"]))


@pytest.mark.parametrize("dim", [1024, 33])
def test_heads_without_a_tile_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim is {dim}; wanted an even one up to 512"):
        attention.paged_attention(**case("cpu", lengths=[9], queries=1, dim=dim), num_blocks=1, rule=AttentionRule())


def test_every_head_that_is_taken_has_a_tile() -> None:
    for table in (attention.LAUNCH, TILES):
        dims = {(size, dim) for size in (2, 4) for dim in (16, 32, 64, 128, 256, MAX_HEAD_DIM)}
        assert set(table) == dims
    assert MAX_HEAD_DIM == config.MAX_HEAD_DIM


def test_launch_entries_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large entry where a program may have as much shared memory, and never off CUDA.

    Its half where large tiles are fewer than there are SMs: a warp has as many rows and keys, so a row keeps its bits.
    """
    assert set(attention.HALVES) <= set(attention.LARGE) <= set(attention.LAUNCH)
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(attention, "shared_memory", shared_memory.__wrapped__)  # what it is told here is not kept
    for bytes_there, large in ((attention.LARGE_SHARED - 1, False), (attention.LARGE_SHARED, True)):
        utils = SimpleNamespace(get_device_properties=lambda index, most=bytes_there: {"max_shared_mem": most})
        monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
        for entry, small in attention.LAUNCH.items():
            expected = attention.LARGE.get(entry, small) if large else small
            assert attention.launch_of(torch.device("cuda", 0), *entry) == expected
            assert attention.launch_of(torch.device("cpu"), *entry) == small
            half = attention.HALVES.get(entry, expected) if large else small
            for rows, chosen in ((64, half), (512, half), (513, expected), (2048, expected)):
                assert attention.launch_of(torch.device("cuda", 0), *entry, heads=32, rows=rows) == chosen
    for entry, tiles in attention.HALVES.items():
        whole = attention.LARGE[entry]
        assert (tiles.rows * 2, tiles.num_warps * 2, tiles.block_n) == (whole.rows, whole.num_warps, whole.block_n)


@pytest.mark.parametrize("device", devices())
def test_the_result_may_take_the_place_of_the_query(device: str) -> None:
    given = case(device, lengths=[70], queries=64)
    expected = attention.paged_attention(**given, num_blocks=1, rule=AttentionRule())
    out = attention.paged_attention(**given, num_blocks=1, rule=AttentionRule(), out=given["query"])
    assert out is given["query"]
    assert torch.equal(out, expected)
