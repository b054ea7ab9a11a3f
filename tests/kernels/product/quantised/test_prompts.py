"""Quantised weights where their values are wanted as such: products of prompts, rows of an embedding; and routes."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import reference, triton_ops
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.packing import pack_into
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.compiled_ops import CompiledOps
from fastspec.kernels.embed import embed
from fastspec.kernels.ops import TORCH_OPS
from fastspec.kernels.product.prefill import prefill_linear
from fastspec.kernels.product.quantised import prompts
from fastspec.kernels.triton_ops import TRITON_OPS
from fastspec.shapes import UNTILED
from tests.helpers.devices import devices
from tests.helpers.packed_codes import KINDS, kind_of, modules, on_device, random_codes, stored
from tests.helpers.products import product_case


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_unpack(name: str, device: str) -> None:
    """Rows of an embedding, ids out of range included; and as packed slices, of a gated matrix as well."""
    dtype = {"cpu": torch.float32, "cuda": torch.bfloat16}[device]  # the interpreter cuts off where it could round
    codes = on_device(random_codes(name, 160, 256), device)
    weight = stored(codes, dtype=dtype)
    ids = torch.tensor([[0, 159, 17], [16, 200, -1]], device=device)
    assert torch.equal(embed(weight, ids), weight.unpack()[ids.clamp(0, 159)])
    scratch = torch.empty(48 * 256, dtype=dtype, device=device)
    for gated in (False, True):
        weight = stored(codes, gated, dtype)
        whole = torch.empty(10, 8, 16, 32, dtype=dtype, device=device)
        pack_into(whole, weight.unpack(), gated)
        assert torch.equal(prompts.dequantise(weight, 32, 48, scratch).data, whole[2:5])


@pytest.mark.parametrize("fused", ["plain", "norm+gated", "bias+residual+fp32"])
def test_a_product_in_slices_is_the_product(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "COLUMNS", 64)
    monkeypatch.setattr(prompts, "SLICE_BYTES", 2 * 256 * 64)  # slices of 64 rows
    # in fp16: the interpreter has no bf16 products
    x, _, given = product_case(40, 160, 256, torch.float16, "cpu", fused)
    weight = stored(random_codes("int4 zeros", 160, 256), "gated" in given, torch.float16)
    wanted = prefill_linear(x, Weight.pack(weight.unpack(), "gated" in given), **given)
    assert torch.equal(prompts.prefill_quantised(x, weight, **given), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_products_in_slices_one_after_the_other(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are written while the kernel before runs: none that it reads, whichever weights follow one another."""
    monkeypatch.setattr(prompts, "EARLY", early)
    monkeypatch.setattr(prompts, "SLICE_BYTES", 2 * 2048 * 512)  # slices of 512 rows
    calls = []
    for name, n, fused in (("int4 zeros", 2304, "norm+gated"), ("fp8", 1024, "bias+residual"), ("int8", 4096, "norm")):
        x, _, given = product_case(1500, n, 2048, torch.bfloat16, "cuda", fused)
        weight = stored(on_device(random_codes(name, n, 2048), "cuda"), "gated" in given)
        calls.append((x, weight, given, prefill_linear(x, Weight.pack(weight.unpack(), "gated" in given), **given)))
    for _ in range(20):
        for x, weight, given, wanted in calls:
            assert torch.equal(prompts.prefill_quantised(x, weight, **given), wanted)


def test_buffers_that_became_too_small_are_kept() -> None:
    """Captured CUDA graphs go on writing to them: memory given back would belong to other tensors."""
    buffers, cpu = prompts._Buffers(), torch.device("cpu")
    first, known = buffers.next(64, cpu)
    assert not known
    second, known = buffers.next(32, cpu)
    assert known
    assert first.data_ptr() != second.data_ptr()  # the kernel before may still read `first`
    assert buffers.next(64, cpu)[0].data_ptr() == first.data_ptr()
    held, places = [weakref.ref(each) for each in buffers._held], {each.data_ptr() for each in buffers._held}
    del first, second
    larger, known = buffers.next(65, cpu)
    assert not known
    assert len(larger) >= 128  # at least twice: what is kept takes no more than what is in use
    assert all(each() is not None for each in held)
    assert larger.data_ptr() not in places


def test_slices_fill_their_room() -> None:
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (256, 53248)):
        for rows in (65, 512, 2048, 5000):
            size = prompts.slice_of(n, k, rows, 132)
            assert size == n or (size % prompts.COLUMNS == 0 and 2 * size * k <= prompts.SLICE_BYTES)


def test_only_prompts_of_more_than_64_rows_are_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 64 rows of a prompt are dequantised; fewer, and steps of any size, are not."""
    called = []
    for name in ("prefill_quantised", "packed_linear"):
        monkeypatch.setattr(triton_ops, name, lambda x, *given, name=name, **options: called.append(name))
    weight, bias = stored(random_codes("fp8", 32, 256)), torch.zeros(32, dtype=torch.bfloat16)
    for shape, options in (((1, 80), {}), ((1, 64), {}), ((20, 8), {}), ((1, 80), {"gated": True})):
        TRITON_OPS.linear(torch.zeros(*shape, 256, dtype=torch.bfloat16), weight, bias if options else None, **options)
    TRITON_OPS.linear(torch.zeros(1, 80, 256, dtype=torch.bfloat16), weight, bias, gated=True)
    assert called == ["prefill_quantised", "packed_linear", "packed_linear", "packed_linear", "packed_linear"]


def test_which_kinds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    device, shape = torch.device("cuda"), (256, 512)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert all(TRITON_OPS.keeps_codes(shape, kind_of(name, 512), torch.bfloat16, device) for name in KINDS)
    assert not TRITON_OPS.keeps_codes(shape, kind_of("fp8", 512), torch.float16, device)
    assert not TRITON_OPS.keeps_codes(shape, CodesKind("int4", (1, 256)), torch.bfloat16, device)
    for ops in (TORCH_OPS, CompiledOps(TRITON_OPS)):
        assert not ops.keeps_codes(shape, kind_of("fp8", 512), torch.bfloat16, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not TRITON_OPS.keeps_codes(shape, kind_of("fp8", 512), torch.bfloat16, device)


def test_what_lies_between_two_attentions() -> None:
    """A layer of quantised weights of several kinds: its products one by one."""
    shapes = {"o": (256, 128), "gate_up": (512, 256), "down": (256, 256), "qkv": (384, 256)}
    kinds = ("int4 zeros", "fp8", "int8", "fp8 blocks")
    weights = {
        name: stored(random_codes(kind, *shape), name == "gate_up")
        for kind, (name, shape) in zip(kinds, shapes.items(), strict=True)
    }
    norm = torch.rand(256, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer: Any = SimpleNamespace(
        **weights, **{f"{name}_bias": None for name in shapes}, input_norm=norm, post_norm=norm.flip(0)
    )
    attended, x = (product_case(3, 16, width, torch.bfloat16, "cpu")[0][None] for width in (128, 256))
    with modules("cpu") as found:

        def linear(x: Tensor, weight: Weight, bias: Tensor | None, tiling: Any, **options: Any) -> Tensor:
            result: Tensor = found.dispatch.packed_linear(x, weight, bias, pdl=True, **options)
            return result

        ours = TRITON_OPS.layer_tail(linear, attended, x, layer, layer, 1e-5, UNTILED)
    plain: Any = SimpleNamespace(**{**vars(layer), **{name: Weight(w.unpack()) for name, w in weights.items()}})
    wanted = reference.layer_tail(reference.linear, attended, x, plain, plain, 1e-5, UNTILED)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert theirs is not None
        # values of weights and of what lies between are rounded to 8 bits at other places
        assert (mine - theirs).abs().max() <= 0.03 * theirs.abs().max()
