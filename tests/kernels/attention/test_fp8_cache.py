"""K and V in 8 bits: what is stored, to the bit, and attention over it, against a formula of its own in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.kv_scales import FP8, KVScales, as_stored
from fastspec.kernels.gpu import Gpu
from fastspec.shapes import AttentionRule
from tests.helpers.attention import TENSORS, case, copied, rows_of
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

import triton
import triton.language as tl

from fastspec.kernels.attention import dispatch
from fastspec.kernels.attention.plan import described
from fastspec.kernels.attention.rope import as_stored as kernel_as_stored
from tests.kernels.attention.test_dispatch import choose, dtype_for, work_for

SCALES = KVScales(0.125, 3.0)


@triton.jit
def _store(x_ptr, out_ptr, factor, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out_ptr + at, kernel_as_stored(tl.load(x_ptr + at), factor, out_ptr.dtype.element_ty))


@pytest.mark.parametrize("scale", [1.0, 3.0, 0.01])
@pytest.mark.parametrize("device", devices())
def test_what_is_stored_is_torchs_to_the_bit(device: str, scale: float) -> None:
    """Of every bf16 number, NaN, infinities and the smallest among them, and of many in fp32."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    odd = torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 5, 2**16)
    halfway = (torch.arange(2**16) % 1024 + 0.5) * 2.0**-9
    for x in (every, odd, halfway, -halfway * 64):
        x = x.to(device)
        out = torch.zeros(len(x), device=device).to(FP8)
        _store[(len(x) // 4096,)](x, out, 1.0 / scale, 4096)
        wanted = as_stored(x, FP8, scale)
        # one NaN may have either sign
        same = (out.view(torch.uint8) == wanted.view(torch.uint8)) | (out.float().isnan() & wanted.float().isnan())
        assert bool(same.all()), (x[~same][:5], out[~same][:5].float(), wanted[~same][:5].float())


def in_8_bits(given: dict[str, Any], scales: KVScales) -> dict[str, Any]:
    """A case whose cache has 8 bits; the slots that hold NaN still do."""
    kept = zip(("keys", "values"), scales, strict=True)
    return {**given, **{name: as_stored(given[name].float(), FP8, scale) for name, scale in kept}}


def options(given: dict[str, Any], window: int | None, scales: KVScales) -> dict[str, Any]:
    names = ("num_heads", "num_blocks")
    rule = given.get("rule", AttentionRule())._replace(window=window)
    norms = None if given["q_norm"] is None else (given["q_norm"], given["k_norm"], given["eps"])
    return {
        **{name: given[name] for name in names},
        "rule": rule,
        "norms": norms,
        "sinks": given.get("sinks"),
        "kv_scales": scales,
    }


def cloned(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}


def by_definition(given: dict[str, Any], window: int | None, scales: KVScales) -> Tensor:
    return reference.attend(reference.AttendCall(*(given[name] for name in TENSORS), **options(given, window, scales)))


def by_kernels(given: dict[str, Any], window: int | None, scales: KVScales) -> Tensor:
    call = reference.AttendCall(*(given[name] for name in TENSORS), **options(given, window, scales))
    return dispatch.attend(call, work_for(given))


def straight(given: dict[str, Any], window: int | None, scales: KVScales) -> Tensor:
    """Attention of the first row by its formula, in fp64, over a cache that already has all keys: [Q, H * D]."""
    rule, heads, dim = given.get("rule", AttentionRule()), given["num_heads"], given["keys"].shape[3]
    positions = given["positions"][0]
    query = given["qkv"][:1].unflatten(-1, (-1, dim))[:, :, :heads]
    at = torch.arange(int(positions.max()) + 1, device=query.device)
    pages, page_size = given["block_table"][0], given["keys"].shape[1]
    keys, values = (
        given[name].view(torch.uint8)[pages[at // page_size], at % page_size].view(FP8).double() * scale
        for name, scale in zip(("keys", "values"), scales, strict=True)
    )
    cos, sin = (given[name][given["positions"][:1]][:, :, None] for name in ("cos", "sin"))
    query = reference.rope(query, cos, sin)[0].double()
    group = heads // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * rule.factor(dim)
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    seen = at <= positions[:, None]
    if window is not None:
        seen &= at > positions[:, None] - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if given.get("sinks") is not None:
        sinks = given["sinks"].double()[:, None, None].expand(-1, len(positions), 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def ruled_by(given: dict[str, Any], device: str) -> dict[str, Any]:
    """The same with a scale, a softcap and sinks."""
    rule, sinks = AttentionRule(scale=0.4, softcap=3.0), torch.linspace(-4, 2, given["num_heads"], device=device)
    return given | {"rule": rule, "sinks": sinks}


def stored_alike(given: dict[str, Any], window: int | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What kernels give, what the definition gives, and its cache, whose bits the kernels' cache has."""
    mine, theirs = cloned(given), cloned(given)
    out, wanted = by_kernels(mine, window, SCALES), by_definition(theirs, window, SCALES)
    for name in ("keys", "values"):
        assert torch.equal(mine[name][1:].view(torch.uint8), theirs[name][1:].view(torch.uint8)), name
    return out, wanted, theirs


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("queries", "window", "ruled", "dim"),
    [(3, None, False, 32), (5, 40, False, 48), (2, None, True, 64), (40, None, False, 32), (33, 50, True, 32)],
)
def test_attention_over_8_bits(device: str, queries: int, window: int | None, ruled: bool, dim: int) -> None:
    """Decoding passes and prompt chunks: the cache has the definition's bits, the result is the formula's."""
    given = case(device, lengths=[300, 61], queries=queries, dim=dim)
    given = in_8_bits(ruled_by(given, device) if ruled else given, SCALES)
    out, wanted, theirs = stored_alike(given, window)
    # fp32 sums of some hundred products in another order
    torch.testing.assert_close(out, wanted, rtol=2e-4, atol=2e-5)
    exact = straight(theirs, window, SCALES)
    assert (wanted[0].double() - exact).abs().max() < 2e-5
    assert (out[0].double() - exact).abs().max() < (2e-5 if device == "cpu" else 2e-4)
    one = by_definition(cloned(given), window, KVScales())
    assert (one - wanted).abs().max() > 1e-2, "scales do nothing here"


@pytest.mark.parametrize("device", devices())
def test_a_row_alone_and_token_by_token_has_the_same_bits(device: str) -> None:
    given = in_8_bits(case(device, lengths=[200, 70, 5], queries=4, norm=True), SCALES)
    together = by_kernels(cloned(given), None, SCALES)
    for row in range(3):
        cache = cloned(given)
        alone = [
            by_kernels(rows_of(cache, slice(row, row + 1), slice(query, query + 1)), None, SCALES) for query in range(4)
        ]
        assert torch.equal(torch.cat(alone, dim=1)[0], together[row])


def test_scales_without_8_bits_are_refused() -> None:
    given = case("cpu", lengths=[20], queries=2)
    for attend in (by_kernels, by_definition):
        with pytest.raises(ValueError, match=r"kv_scales=KVScales\(k=0.125, v=3.0\), but keys are torch.float32"):
            attend(copied(given), None, SCALES)
    mixed = {**in_8_bits(given, SCALES), "qkv": given["qkv"].double()}
    with pytest.raises(ValueError, match="qkv is float64"):
        by_kernels(mixed, None, SCALES)


@pytest.mark.parametrize(
    ("kind", "lengths", "queries", "dim", "window", "ruled"),
    [
        ("batch", [300, 61], 3, 64, None, False),
        ("concurrent", [700, 5], 2, 128, 90, True),
        ("tma", [300, 61], 3, 64, None, False),
        ("tma", [900, 2], 2, 128, 90, True),
    ],
)
def test_tensor_core_kernels_over_8_bits(
    kind: str, lengths: list[int], queries: int, dim: int, window: int | None, ruled: bool, monkeypatch: Any
) -> None:
    """They store what the definition stores, and are as near to the formula as products of 16 bits allow."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choose(kind, monkeypatch)
    given = case(device, lengths=lengths, queries=queries, dim=dim, dtype=dtype_for(device, kind), norm=ruled)
    given = in_8_bits(ruled_by(given, device) if ruled else given, SCALES)
    out, wanted, _ = stored_alike(given, window)
    # weights of values are rounded to the dtype of queries, and so is the result
    eps = torch.finfo(out.dtype).eps if out.dtype != torch.float32 else 1e-5
    assert (out.float() - wanted.float()).abs().max() <= 4 * eps * wanted.float().abs().max()
    cache = cloned(given)
    alone = [
        by_kernels(rows_of(cache, slice(0, 1), slice(query, query + 1)), window, SCALES) for query in range(queries)
    ]
    assert torch.equal(torch.cat(alone, dim=1)[0], out[0])


def test_which_kernels_read_8_bits() -> None:
    hopper = Gpu((9, 0), 132)
    said = described(hopper, 2, 128, 64, 32768, FP8.itemsize)
    assert said == ("tensor-core kernels (decode_mma_batch, K and V in 8 bits, from position 4352 on decode_tma_sm90)")
    said = described(hopper, 4, 128, 64, 32768, FP8.itemsize)
    assert said == "the portable kernel (decode): the tensor-core kernels take only queries of 16 bits"
    assert "head_dim is 96" in described(hopper, 2, 96, 64, 32768, FP8.itemsize)
