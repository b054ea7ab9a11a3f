"""The ops of the CPU: near the definitions, and a row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.cpu import blocked
from fastspec.kernels.cpu.blocked import Blocked, RowCounts, is_supported, same_bits
from fastspec.kernels.cpu.ops import CPU_OPS
from fastspec.kernels.ops import TORCH_OPS, Ops
from fastspec.kernels.reference.attention import AttendCall
from fastspec.shapes import KEY_BLOCK, UNTILED, AttentionRule

pytestmark = pytest.mark.skipif(not is_supported(torch.float32), reason="torch has no oneDNN here")

# fp32 by FBGEMM and by oneDNN, bf16 rounded, and logits of bf16
KINDS = ["half", "fp32", "bf16", "logits"]
SHAPES = [(64, 32), (100, 37), (576, 1536), (33, 1100)]


def made(kind: str, shape: tuple[int, int], *, embeds: bool = False) -> tuple[Weight, Tensor]:
    """A filled weight, and its values as rows."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05
    dtype = torch.bfloat16 if kind in ("bf16", "logits") else torch.float32
    values = values.to(torch.bfloat16).to(dtype) if kind != "fp32" else values
    if dtype == torch.bfloat16 and not is_supported(dtype):
        pytest.skip("oneDNN has no bf16 on this machine")
    weight = Weight.of_blocked(Blocked(shape, dtype, head=kind == "logits", embeds=embeds, counts=RowCounts()))
    weight.fill(values)
    return weight, values


def outputs(kind: str) -> torch.dtype | None:
    return torch.float32 if kind == "logits" else None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_product_depends_on_that_row_alone(kind: str, shape: tuple[int, int]) -> None:
    weight, values = made(kind, shape)
    x = torch.randn(70, shape[1], generator=torch.Generator().manual_seed(2)).to(values.dtype)
    out = outputs(kind)
    whole = CPU_OPS.linear(x, weight, out_dtype=out)
    for rows in (*range(1, 18), 33, 64):
        assert torch.equal(CPU_OPS.linear(x[:rows], weight, out_dtype=out), whole[:rows]), rows
        assert torch.equal(CPU_OPS.linear(x[5 : 5 + rows], weight, out_dtype=out), whole[5 : 5 + rows]), rows
    wide = torch.cat((x, x), dim=1)[:, : shape[1]]  # not contiguous
    assert not wide.is_contiguous()
    assert torch.equal(CPU_OPS.linear(wide, weight, out_dtype=out), whole)
    assert torch.equal(CPU_OPS.linear(x.view(7, 10, -1), weight, out_dtype=out), whole.view(7, 10, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str) -> None:
    weight, values = made(kind, (576, 1536))
    x = torch.randn(17, 1536).to(values.dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(CPU_OPS.linear(x, weight, out_dtype=outputs(kind)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_their_neighbours_are_those_of_the_definition(kind: str) -> None:
    weight, values = made(kind, (128, 96))
    dtype = values.dtype
    x, bias = torch.randn(5, 96).to(dtype), torch.randn(128).to(dtype)
    residual, norm = torch.randn(5, 64).to(dtype), (torch.rand(96).to(dtype), 1e-5)
    # fp32: order of sums; bf16: one rounding of a sum of size about 1
    limits = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.02}
    options: list[dict[str, Any]] = [{}, {"norm": norm}, {"gated": True, "residual": residual}]
    for each in [*options, {"gated": True, "gelu": True}, {"out_dtype": torch.float32}]:
        wanted = TORCH_OPS.linear(x, Weight(values), bias, **each)
        torch.testing.assert_close(CPU_OPS.linear(x, weight, bias, **each), wanted, **limits)


def test_logits_of_bf16_are_not_rounded() -> None:
    weight, values = made("logits", (256, 64))
    x = torch.randn(3, 64).bfloat16()
    logits = CPU_OPS.linear(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(logits, x.float() @ values.float().T, atol=1e-5, rtol=1e-5)
    assert not torch.equal(logits, logits.bfloat16().float())
    for dtype in (torch.int64, torch.uint64):
        mine, theirs = torch.empty(3, dtype=dtype), torch.empty(3, dtype=dtype)
        CPU_OPS.argmax(x, weight, 250, work=None, out=mine)
        reference.pick(logits, 250, theirs)
        assert torch.equal(mine.view(torch.int64), theirs.view(torch.int64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("embeds", [False, True])
def test_values_come_back(kind: str, embeds: bool) -> None:
    weight, values = made(kind, (40, 24), embeds=embeds)
    assert weight.shape == (40, 24)
    assert weight.dtype == values.dtype
    assert torch.equal(weight.unpack(), values)
    ids = torch.tensor([[3, 0], [39, 3]])
    assert torch.equal(weight.embed(ids), values[ids])


def test_values_that_fp16_does_not_hold_stay_in_fp32() -> None:
    weight, values = made("fp32", (32, 64))
    assert weight.blocked is not None
    assert weight.blocked.way == "fp32"
    assert torch.equal(weight.unpack(), values)
    for special in (float("inf"), float("nan"), 1e-38):
        values = torch.full((16, 32), 0.5)
        values[3, 4] = special
        weight = Weight.of_blocked(Blocked((16, 32), torch.float32, head=False, embeds=False, counts=RowCounts()))
        weight.fill(values)
        assert weight.blocked is not None
        assert weight.blocked.way == "fp32"
        assert torch.equal(weight.unpack().nan_to_num(nan=7.0), values.nan_to_num(nan=7.0))


def test_row_counts_with_other_bits_are_left_out() -> None:
    def uneven(rows: Tensor) -> Tensor:
        return rows + (1e-3 if len(rows) in (1, 5) else 0.0)

    def by_place(rows: Tensor) -> Tensor:
        return rows if len(rows) != 4 else rows + torch.arange(4)[:, None] * 1e-3 * (rows[0, 0] > 0)

    rows = torch.randn(17, 3, generator=torch.Generator().manual_seed(0))
    assert same_bits(uneven, rows, (1, 2, 5, 8, 16)) == (2, 8, 16)
    assert 4 not in same_bits(by_place, rows.abs(), (2, 4, 8))


@pytest.mark.parametrize("shape", [(33, 1100), (16, 96), (576, 1536)])
def test_row_counts_of_bf16_keep_the_bits_of_many_rows(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to bf16 hides most other orders of sums, so a trial with few rows would miss them."""
    monkeypatch.setattr(blocked, "worth_having", lambda product, rows, counts: counts)  # none is left out as slow
    weight, _ = made("bf16", shape)
    matrix = weight.blocked
    assert matrix is not None
    x = torch.randn(2048, shape[1], generator=torch.Generator().manual_seed(3)).bfloat16()
    wanted = torch.cat([matrix.multiply(part) for part in x.split(8)])
    for count in matrix.counts.few:
        whole = len(x) - len(x) % count
        found = torch.cat([matrix.multiply(part) for part in x[:whole].split(count)])
        assert torch.equal(found, wanted[:whole]), count


def attention(dtype: torch.dtype, window: int | None, heads: tuple[int, int], dim: int = 32) -> Callable[..., Tensor]:
    """A function of ops, rows and queries that attends at the last positions of three rows, in one pass."""
    num_heads, kv_heads = heads
    torch.manual_seed(3)
    lengths, page, per_row = [700, 40, 300], 16, 48
    pages = torch.stack([1 + torch.arange(48), 1 + 48 + torch.randperm(48), 1 + 96 + torch.arange(48)])
    keys, values = (torch.randn(1 + 3 * per_row, page, kv_heads, dim).to(dtype) for _ in range(2))
    new = torch.randn(3, 900, (num_heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(800, dim // 2)
    sinks = torch.randn(num_heads)

    def run(ops: Ops, rows: list[int], queries: int) -> Tensor:
        k, v = keys.clone(), values.clone()
        unwritten = torch.arange(per_row * page)
        for row, length in enumerate(lengths):  # slots behind a row hold anything
            for at in unwritten[length:].tolist():
                k[pages[row, at // page], at % page] = v[pages[row, at // page], at % page] = torch.nan
        starts = torch.tensor([lengths[row] for row in rows])
        positions = starts[:, None] + torch.arange(queries)
        qkv = torch.stack([new[row, lengths[row] : lengths[row] + queries] if lengths[row] < 200 else
                           new[row, :queries] for row in rows])  # fmt: skip
        call = AttendCall(
            qkv, angles.cos(), angles.sin(), k, v, pages[rows], positions, torch.ones_like(positions, dtype=torch.bool),
            num_heads=num_heads,
            num_blocks=int(positions.amax()) // KEY_BLOCK + 1,
            rule=AttentionRule(window, None, 30.0 if window else None),
            sinks=sinks if window else None,
            tiling=UNTILED,
        )  # fmt: skip
        return ops.attend(call, ops.workspace(k.device, 3, 64, 800, (num_heads, kv_heads, dim)))

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(6, 2), (2, 2), (4, 1)])
def test_attention_is_that_of_the_definition_and_knows_no_neighbours(
    dtype: torch.dtype, window: int | None, heads: tuple[int, int]
) -> None:
    run = attention(dtype, window, heads)
    whole = run(CPU_OPS, [0, 1, 2], 20)
    limit = 2e-6 if dtype == torch.float32 else 2e-2  # order of sums; one rounding of values of size about 1
    torch.testing.assert_close(whole, run(TORCH_OPS, [0, 1, 2], 20), atol=limit, rtol=limit)
    assert whole.isfinite().all()
    for queries in (1, 2, 3, 5, 9, 17):
        assert torch.equal(run(CPU_OPS, [0, 1, 2], queries), whole[:, :queries]), queries
    for rows in ([0], [1], [2], [2, 0]):
        assert torch.equal(run(CPU_OPS, rows, 4), whole[rows, :4]), rows
