"""Scale, softcap, sinks and heads that are not rotated, in every kernel: against a definition of its own in fp64."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from fastspec.kernels.gpu import Gpu
from fastspec.shapes import AttentionRule
from tests.helpers.attention import case, copied, rows_of, run, twin
from tests.helpers.devices import devices
from tests.helpers.layouts import spread

pytest.importorskip("triton", reason="Triton ships for Linux only")

import triton
import triton.language as tl

from fastspec.kernels.attention import dispatch, prefill
from fastspec.kernels.attention.plan import described
from tests.kernels.attention.test_dispatch import (
    KINDS,
    assert_same,
    attend,
    choose,
    dtype_for,
    run_in_steps,
    work_for,
)

# a softcap within the range of scores, so that they bend; sinks that weigh from next to nothing to most of a row
CAPPED = AttentionRule(scale=0.4, softcap=3.0)
RULES = {
    "scale": (AttentionRule(scale=0.05), False),
    "softcap": (CAPPED, False),
    "sinks": (AttentionRule(), True),
    "all": (CAPPED, True),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which decoding kernel runs."""
    return choose(request.param, monkeypatch)


def ruled(given: dict[str, Any], name: str) -> dict[str, Any]:
    """A case with one of RULES."""
    rule, has_sinks = RULES[name]
    sinks = torch.linspace(-4, 6, given["num_heads"], device=given["qkv"].device) if has_sinks else None
    return {**given, "rule": rule, "sinks": sinks}


def heads_of(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, Q, H, D] and, with those of this pass, keys and values [B, positions, Hkv, D] of a case; its dtype.

    Rotated as complex numbers.
    """
    dim, num_heads = given["keys"].shape[3], given["num_heads"]
    query, key, value = given["qkv"].unflatten(-1, (-1, dim)).split([num_heads, *[given["keys"].shape[2]] * 2], dim=2)
    if given["cos"] is not None:
        turn = torch.complex(given["cos"].double(), given["sin"].double())[given["positions"]][:, :, None]

        def turned(x: Tensor) -> Tensor:
            found = torch.complex(*x.double().chunk(2, dim=-1)) * turn
            return torch.cat((found.real, found.imag), dim=-1).to(x.dtype)

        query, key = turned(query), turned(key)
    at = torch.arange(int(given["positions"].max()) + 1, device=query.device)
    page_size = given["keys"].shape[1]
    caches = [given[name][given["block_table"][:, at // page_size], at % page_size] for name in ("keys", "values")]
    rows = torch.arange(len(query), device=query.device)[:, None]
    for cache, new in zip(caches, (key, value), strict=True):
        cache[rows, given["positions"]] = new
    return query, caches[0], caches[1]


def seen(positions: Tensor, window: int | None) -> Tensor:
    """[Q, positions]: which keys the queries at these positions see."""
    at = torch.arange(int(positions.max()) + 1, device=positions.device)
    return (at <= positions[:, None]) & (at > positions[:, None] - (window or 2**31))


def straight(given: dict[str, Any], window: int | None) -> Tensor:
    """Attention as its formula has it, in fp64, key by key: [B, Q, H * D]."""
    query, keys, values = (x.double() for x in heads_of(given))
    rule, group = given["rule"], given["num_heads"] // keys.shape[2]
    scale = query.shape[3] ** -0.5 if rule.scale is None else rule.scale
    out = torch.zeros_like(query)
    for row, positions in enumerate(given["positions"]):
        visible = seen(positions, window)
        for head in range(query.shape[2]):
            k, v = keys[row, : visible.shape[1], head // group], values[row, : visible.shape[1], head // group]
            scores = scale * (query[row, :, head] @ k.T)
            if rule.softcap is not None:
                scores = rule.softcap * (scores / rule.softcap).tanh()
            weights = torch.where(visible, scores.exp(), 0.0)
            total = weights.sum(1, keepdim=True)
            if given["sinks"] is not None:
                total += given["sinks"][head].double().exp()
            out[row, :, head] = (weights / total) @ torch.where(visible.any(0)[:, None], v, 0.0)
    return out.flatten(2)


def eager(given: dict[str, Any], window: int | None, dtype: torch.dtype) -> Tensor:
    """Attention of transformers in this dtype: of gpt-oss where there are sinks, without a softcap, else of Gemma 2."""
    query, keys, values = (x.to(dtype).transpose(1, 2) for x in heads_of(given))
    rule, dim = given["rule"], query.shape[3]
    scale = dim**-0.5 if rule.scale is None else rule.scale
    assert rule.softcap is None or given["sinks"] is None
    sinks = None if given["sinks"] is None else given["sinks"].to(dtype)
    module: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // keys.shape[1], training=False, sinks=sinks)
    out = []
    for row, positions in enumerate(given["positions"]):
        visible = seen(positions, window)
        mask = torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)
        there = visible.shape[1]
        tensors = (query[row, None], keys[row, None, :, :there], values[row, None, :, :there], mask[None, None])
        if sinks is None:
            found = gemma2_attention(module, *tensors, scaling=scale, softcap=rule.softcap)
        else:
            found = gpt_oss_attention(module, *tensors, scaling=scale)
        out.append(found[0].flatten(2))
    return torch.cat(out)


def bound(given: dict[str, Any], window: int | None, exact: Tensor) -> float:
    """The rule of the house: twice what torch errs by in the dtype; of fp32 at least a few units of values near one."""
    least = 4e-6 if given["qkv"].dtype == torch.float32 else 0.0
    without = given if given["rule"].softcap is None else {**given, "sinks": None}
    target = exact if without is given else straight(without, window)
    return max(least, 2 * (eager(without, window, given["qkv"].dtype) - target).abs().max().item())


def assert_as_defined(given: dict[str, Any], window: int | None, split_keys: int = 128) -> None:
    exact = straight(given, window)
    out = attend(copied(given), split_keys, window)
    assert torch.isfinite(out).all()
    assert (out.double() - exact).abs().max().item() <= bound(given, window, exact)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("name", "window"), [("scale", None), ("softcap", 70), ("sinks", 30), ("all", None)])
def test_every_kernel_is_as_its_formula(name: str, window: int | None, kind: str, device: str) -> None:
    """Single splits, an even and an odd one, and several, that one CTA or the last of several combines."""
    given = case(device, lengths=[200, 300], queries=3, heads=6, kv_heads=2, dim=64, dtype=dtype_for(device, kind))
    assert_as_defined(ruled(given, name), window)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", ["softcap", "all"])
def test_chunks_are_as_their_formula(name: str, device: str) -> None:
    """Blocks of keys that every row sees, which have no mask, and others."""
    for window in (None, 40):
        assert_as_defined(ruled(case(device, lengths=[150], queries=60, heads=6, kv_heads=2), name), window)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", ["softcap", "sinks"])
@pytest.mark.parametrize("window", [None, 70])
def test_the_definition_is_what_transformers_computes(name: str, window: int | None, device: str) -> None:
    given = ruled(case(device, lengths=[19, 300], queries=5, heads=6, kv_heads=2), name)
    exact = straight(given, window)
    # a few units in the last place of fp32 values near one: sums in other orders
    assert (twin(copied(given), window) - exact).abs().max().item() <= 4e-6
    assert (eager(given, window, torch.float32) - exact).abs().max().item() <= 4e-6


@pytest.mark.parametrize("device", devices())
def test_rows_with_softcap_and_sinks_feel_nothing_beside_them(kind: str, device: str) -> None:
    """To the bit: one query or many, alone or in a batch, with room for more splits."""
    dtype = torch.bfloat16 if device == "cuda" else dtype_for(device, kind)
    shape: dict[str, Any] = {"lengths": [40, 300, 17], "heads": 2, "kv_heads": 2, "dim": 64}
    given = ruled(case(device, queries=4, dtype=dtype, **shape), "all")
    whole = run_in_steps(given, 4)
    assert_same(run_in_steps({**given, "num_blocks": given["num_blocks"] + 1}, 1), whole)
    assert torch.equal(attend(rows_of(copied(given), [1])), whole[0][[1]])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("queries", [3, 20])
def test_heads_that_are_not_rotated(queries: int, kind: str, device: str) -> None:
    """To the bit as by angles of zero, and the same K is stored; with norms, too."""
    if queries == 20 and kind != "tiles":
        pytest.skip("chunks have one kernel")
    dtype = torch.float32 if queries == 20 and device == "cpu" else dtype_for(device, kind)
    for norm in (False, True):
        given = case(device, lengths=[150, queries], queries=queries, dim=64, dtype=dtype, norm=norm)
        still = {**given, "cos": torch.ones_like(given["cos"]), "sin": torch.zeros_like(given["sin"])}
        assert_same(run_in_steps({**given, "cos": None, "sin": None}, queries), run_in_steps(still, queries))


@triton.jit
def _tanh_kernel(x_ptr, out_ptr, count, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    there = at < count
    tl.store(out_ptr + at, prefill.tanh(tl.load(x_ptr + at, mask=there, other=0.0)), mask=there)


def test_tanh_is_exact_to_three_units() -> None:
    """Of 2^-23, on both sides of where its two formulas meet and far out."""
    x = torch.cat((torch.linspace(-0.7, 0.7, 3001), torch.linspace(-20, 20, 2001), torch.tensor([0.0, 1e-30, 1e30])))
    out = torch.empty_like(x)
    _tanh_kernel[(1,)](x, out, len(x), 8192)
    exact = x.double().tanh()
    assert ((out - exact).abs() <= 3 * torch.finfo(torch.float32).eps * exact.abs()).all()


MISREAD = [
    ("sinks", lambda x: x[:3], r"sinks is float32 \[3\]; wanted contiguous float32 \[4\]"),
    ("sinks", lambda x: x.half(), r"sinks is float16 \[4\]; wanted contiguous float32"),
    ("sinks", spread, "sinks is .*strides"),
    ("cos", lambda x: None, "cos is None and sin is not; wanted both"),
    ("sin", lambda x: None, "sin is None and cos is not; wanted both"),
]


@pytest.mark.parametrize("queries", [3, 20])
@pytest.mark.parametrize(("name", "change", "match"), MISREAD)
def test_what_would_be_misread_is_refused(name: str, change: Any, match: str, queries: int) -> None:
    given = ruled(case("cpu", lengths=[20], queries=queries), "sinks")
    work = work_for(given)
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=match):
        run(dispatch.attend, given, work)


def test_sinks_in_the_models_dtype_are_read_as_such() -> None:
    given = ruled(case("cpu", lengths=[20, 9], queries=3, dtype=torch.float16), "sinks")
    rounded = {**given, "sinks": given["sinks"].half()}
    same = {**given, "sinks": given["sinks"].half().float()}
    assert torch.equal(attend(copied(rounded)), attend(copied(same)))


@pytest.mark.parametrize(
    ("capability", "itemsize", "dim", "page_size", "capacity", "said"),
    [
        ((9, 0), 2, 128, 64, 4352, r"^tensor-core kernels \(decode_mma\)$"),
        ((9, 0), 2, 64, 64, 8192, "from position 4352 on decode_tma_sm90"),
        ((9, 0), 2, 256, 64, 4352, "portable kernel.*head_dim is 256, .* take 64 and 128"),
        ((9, 0), 4, 128, 64, 4352, "portable kernel.*only queries of 16 bits"),
        ((8, 0), 2, 128, 64, 4352, "portable kernel.*run on sm_90 and later"),
        ((10, 0), 2, 128, 64, 8192, "portable kernel.*8192 positions, and beyond 4352 .* need sm_90"),
    ],
)
def test_which_kernel_decodes_is_told(
    capability: tuple[int, int], itemsize: int, dim: int, page_size: int, capacity: int, said: str
) -> None:
    assert re.search(said, described(Gpu(capability, 132), itemsize, dim, page_size, capacity))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 112, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_equals_its_torch_definition_at_real_sizes(dim: int, dtype: torch.dtype) -> None:
    """What runs by default, steps and chunks; and bits of rows alone against k + 1 rows."""
    for name in RULES if dim in (64, 128) else ("scale", "all"):
        for window, queries in ((None, 5), (100, 60)):
            given = ruled(
                case("cuda", lengths=[789, 300], queries=queries, heads=8, kv_heads=2, dim=dim, dtype=dtype), name
            )
            assert_as_defined(given, window, 256)
        step = ruled(case("cuda", lengths=[789, 300, 5], queries=5, heads=8, kv_heads=2, dim=dim, dtype=dtype), name)
        whole = run_in_steps(step, 5)
        assert_same(run_in_steps(step, 1), whole)
        assert torch.equal(attend(rows_of(copied(step), [1])), whole[0][[1]])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_long_rows_of_real_sizes(dim: int) -> None:
    """Rows that the TMA kernel decodes, beside rows that it does not."""
    for name in RULES:
        for window in (None, 1000):
            shape: dict[str, Any] = {"lengths": [6000, 300, 4353], "queries": 3, "heads": 8, "kv_heads": 2, "dim": dim}
            given = ruled(case("cuda", page_size=64, dtype=torch.bfloat16, **shape), name)
            assert_as_defined(given, window)
            whole = run_in_steps(given, 3, window=window)
            assert_same(run_in_steps(given, 1, window=window), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [3, 40])
def test_kernels_are_as_the_definition_on_a_gpu(queries: int) -> None:
    """The torch definition and the kernels, on the same device and tensors."""
    for name in RULES:
        given = ruled(case("cuda", lengths=[300, 90], queries=queries, heads=8, kv_heads=2, dim=96), name)
        ours, wide = attend(copied(given)), twin(copied(given))
        # sums of fp32 in another order: scores of up to 20 and outputs near one
        torch.testing.assert_close(ours, wide, rtol=0, atol=1e-5)
