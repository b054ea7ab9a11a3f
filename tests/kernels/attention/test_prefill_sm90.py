"""Attention of prompts by TMA and wgmma: in the simulator against its torch twin, on a GPU its bits and its error."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import reference
from fastspec.kernels.attention import plan, prefill, prefill_sm90
from fastspec.kernels.attention.arguments import paged_cache, scoring_of
from fastspec.kernels.gpu import Gpu
from fastspec.shapes import AttentionRule
from tests.helpers import gluon_simulator
from tests.helpers.devices import devices
from tests.kernels.attention.test_prefill import blocks, case

BF16 = torch.bfloat16


@cache
def _simulated() -> Any:
    return gluon_simulator.prompts_by_tma()


def attend(given: dict[str, Tensor], rule: AttentionRule, sinks: Tensor | None = None) -> Tensor:
    """What the kernel leaves; the rows that no token has stay NaN."""
    module = prefill_sm90 if given["query"].is_cuda else _simulated()
    query, keys, values = given["query"], given["keys"], given["values"]
    out = torch.full_like(query, float("nan"))
    cache, scoring = paged_cache(keys, values, given["block_table"]), scoring_of(rule, sinks, query.shape[-1])
    rows, queries, heads, dim = query.shape
    tile = plan.chunk_tile(Gpu((9, 0), 132), dim, rows * heads, queries)
    module.attend_chunk(query, keys, values, cache, given["positions"], out, blocks(given), rule.window, scoring, tile)
    return out


def wanted(given: dict[str, Tensor], rule: AttentionRule, sinks: Tensor | None = None) -> Tensor:
    wide = {name: each.float() if each.is_floating_point() else each for name, each in given.items()}
    return reference.paged_attention(**wide, num_blocks=blocks(given), rule=rule, sinks=sinks)


CASES = {
    "one block": ({"lengths": [5], "queries": 5, "dim": 64}, AttentionRule(), False),
    "a tail, and rows of other lengths": ({"lengths": [300, 129], "queries": 70, "dim": 64}, AttentionRule(), False),
    "pages of 8": ({"lengths": [200], "queries": 130, "dim": 128, "page_size": 8}, AttentionRule(), False),
    "heads of 256": ({"lengths": [90], "queries": 70, "dim": 256}, AttentionRule(), False),
    "a window": ({"lengths": [330], "queries": 70, "dim": 64}, AttentionRule(window=100), False),
    "softcap and sinks": ({"lengths": [150], "queries": 66, "dim": 64}, AttentionRule(None, 0.2, 20.0), True),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_it_is_its_definition(name: str, late: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_simulator.MACHINE, "late", late)
    options, rule, sunk = CASES[name]
    given = case(device, dtype=BF16, **options)  # type: ignore[arg-type]
    sinks = torch.linspace(-1, 2, 4, device=device) if sunk else None
    ours, theirs = attend(given, rule, sinks), wanted(given, rule, sinks)
    # weights and results are rounded to 8 bits: 2^-8 of values that are at most 4.5 here
    torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=4.5 * 2**-8)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(window=100)], ids=["whole", "window"])
def test_bits_depend_on_no_launch(rule: AttentionRule, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of warps or two, tokens in one pass or in blocks of 64 of several rows, other tokens beside."""
    given = case(device, dtype=BF16, lengths=[320], queries=256, dim=64)
    found = []
    for few in (0, 1):
        monkeypatch.setitem(plan.CHUNK_TILES, 64, plan.CHUNK_TILES[64][few : few + 1] * 2)
        found.append(attend(given, rule))
        parts = dict(given, query=given["query"].view(4, 64, 4, 64), positions=given["positions"].view(4, 64))
        parts["block_table"] = given["block_table"].expand(4, -1)
        found.append(attend(parts, rule).view_as(given["query"]))
        later = {name: given[name][:, 40:].contiguous() for name in ("query", "positions")}
        found.append(torch.cat((found[0][:, :40], attend(given | later, rule)), 1))
    assert all(torch.equal(found[0], each) for each in found[1:])


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "dtype"), [(128, BF16), (64, BF16), (256, BF16), (128, torch.float16)])
def test_long_prompts_on_a_gpu(dim: int, dtype: torch.dtype) -> None:
    """Errs by no more than the kernel of other GPUs, and by both launches has the same bits."""
    given = case("cuda", dtype=dtype, lengths=[5000], queries=2048, heads=8, dim=dim, page_size=64)
    theirs = wanted(given, AttentionRule())
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for few in (0, 1):
            patch.setitem(plan.CHUNK_TILES, dim, plan.CHUNK_TILES[dim][few : few + 1] * 2)
            found.append(prefill.paged_attention(**given, num_blocks=blocks(given), rule=AttentionRule()))
        patch.setattr(prefill, "uses_chunks", lambda *given: False)
        other = prefill.paged_attention(**given, num_blocks=blocks(given), rule=AttentionRule())
    assert torch.equal(*found)
    errors = [(each.float() - theirs).norm() / theirs.norm() for each in (found[0], other)]
    assert errors[0] <= 1.05 * errors[1]  # the same roundings, in another order of sums
