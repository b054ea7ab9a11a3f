"""The products of chosen experts against their torch definition: values, bits, and what is not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.codes import Codes
from fastspec.kernels.common.experts import MXFP4, ExpertStack, ExpertWeights, power_of_two
from fastspec.kernels.common.weights import Weight
from fastspec.shapes import ClampedGate, SquaredRelu
from tests.helpers import gluon_simulator as simulator
from tests.helpers.devices import devices
from tests.helpers.gluon_simulator import experts_in_codes
from tests.helpers.packed_codes import KINDS, on_device, random_codes

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.common.launch import launch
from fastspec.kernels.experts import dispatch
from fastspec.kernels.experts.codes import codes_kernel
from fastspec.kernels.experts.products import expert_kernel

EXPERTS, CHOSEN, HIDDEN, INNER = 5, 2, 64, 64
CLAMP = ClampedGate(1.7, 1.0)
# the interpreter has no bf16 products
DTYPES = {"cpu": [torch.float32, torch.float16], "cuda": [torch.float32, torch.float16, torch.bfloat16]}


def dtypes(form: str, device: str) -> list[torch.dtype]:
    return [torch.bfloat16] if "mxfp4" in form else DTYPES[device]


@pytest.fixture(autouse=True, scope="module")
def stand_ins() -> Iterator[None]:
    """Off the GPU the kernel in Gluon is run by stand-ins, the others by Triton's interpreter."""
    if torch.cuda.is_available():
        yield
        return
    simulated = experts_in_codes()

    def either(kernel: Any, *given: Any, **options: Any) -> None:
        if kernel is codes_kernel:
            simulator.launch(simulated, *given, **{"PDL": False, **options})
        else:
            launch(kernel, *given, **options)

    with mock.patch.object(dispatch, "launch", either):
        yield


def stack(shape: tuple[int, ...], scale: float, dtype: torch.dtype, device: str, seed: int) -> ExpertStack:
    values = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return ExpertStack.of(values.to(device, dtype))


def in_mxfp4(shape: tuple[int, int, int], dtype: torch.dtype, device: str, seed: int, gated: bool) -> ExpertStack:
    """A stack of random codes and of scales around 2^-3."""
    generator = torch.Generator().manual_seed(seed)
    made = ExpertStack.empty_codes(shape, MXFP4, dtype, torch.device(device), gated)
    for expert in range(shape[0]):
        codes = torch.randint(16, shape[1:], generator=generator, dtype=torch.uint8)
        exponents = torch.randint(122, 126, (shape[1], shape[2] // 32), generator=generator, dtype=torch.uint8)
        made.fill_codes(expert, 0, Codes(MXFP4, codes.to(device), power_of_two(exponents).to(device)))
    return made


def weights_of(form: str, dtype: torch.dtype, device: str, hidden: int = HIDDEN, inner: int = INNER) -> ExpertWeights:
    """Experts of random numbers; `form`: "plain", "bias", "mxfp4", and without a gate "relu2" or "mxfp4 relu2"."""
    router = Weight(torch.zeros(EXPERTS, hidden, dtype=dtype, device=device))
    first = inner if "relu2" in form else 2 * inner
    if "mxfp4" in form:
        up = in_mxfp4((EXPERTS, first, hidden), dtype, device, 1, first > inner)
        down = in_mxfp4((EXPERTS, hidden, inner), dtype, device, 2, False)
    else:
        up = stack((EXPERTS, first, hidden), 0.1, dtype, device, 1)
        down = stack((EXPERTS, hidden, inner), 0.1, dtype, device, 2)
    made = ExpertWeights(router, up, down)
    if form == "plain" or first == inner:
        return made
    up_bias = stack((EXPERTS, 2 * inner), 0.5, dtype, device, 3).data
    return replace(made, gate_up_bias=up_bias, down_bias=stack((EXPERTS, hidden), 0.5, dtype, device, 4).data)


def in_codes(name: str, hidden: int, inner: int, gated: bool, device: str) -> tuple[ExpertWeights, ExpertWeights]:
    """Experts in codes of one of `KINDS`, and their values in fp32, the gate's rows first."""
    made, meant = [], []
    for shape, gate in (((2 * inner if gated else inner, hidden), gated), ((hidden, inner), False)):
        codes = [on_device(random_codes(name, *shape, seed=expert), device) for expert in range(EXPERTS)]
        made.append(
            ExpertStack.empty_codes((EXPERTS, *shape), codes[0].kind, torch.bfloat16, torch.device(device), gate)
        )
        made[-1].fill_all(codes)
        meant.append(ExpertStack.of(torch.stack([each.dequantise(torch.float32) for each in codes])))
    router = Weight(torch.zeros(EXPERTS, hidden, device=device))
    return ExpertWeights(router, made[0], made[1]), ExpertWeights(router, meant[0], meant[1])


def rows_of(count: int, dtype: torch.dtype, device: str, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids, factors and a residual of so many rows."""
    generator = torch.Generator().manual_seed(7)
    x, residual = (torch.randn(count, hidden, generator=generator) for _ in range(2))
    logits = torch.randn(count, EXPERTS, generator=generator)
    factors, ids = logits.softmax(-1).topk(CHOSEN)
    return x.to(device, dtype), ids.int().to(device), factors.to(device), residual.to(device, dtype)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", ["plain", "bias", "mxfp4", "relu2", "mxfp4 relu2"])
@pytest.mark.parametrize(("count", "hidden", "inner"), [(1, 128, 64), (2, 192, 64), (9, 64, 64), (70, 64, 64)])
def test_the_kernel_equals_its_torch_definition(count: int, hidden: int, inner: int, form: str, device: str) -> None:
    for dtype in dtypes(form, device):
        weights = weights_of(form, dtype, device, hidden, inner)
        x, ids, factors, residual = rows_of(count, dtype, device, hidden)
        x = x / 4 if "relu2" in form else x  # squares are small enough for the bound below
        clamp = SquaredRelu() if "relu2" in form else None if form == "plain" else CLAMP
        shared = {"shared": residual.flip(0), "shared_logits": factors[:, :1]} if form == "bias" else {}
        found = dispatch.experts(x, ids, factors, weights, clamp, residual=residual, **shared)
        expected = reference.experts(x, ids, factors, weights, clamp, residual=residual, **shared)
        # of 16 bits both round what an expert gives, and the result: a few units in the last place of values up to 16
        bound = 2e-5 if dtype == torch.float32 else {torch.float16: 0.03, torch.bfloat16: 0.25}[dtype]
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", [name for name in KINDS if name != "mxfp4"])
def test_codes_give_the_products_of_their_values(name: str, device: str) -> None:
    """Of a last chunk of K that is half there; without a gate, half of the forms. A row alone has the same bits."""
    gated = name in ("fp8", "fp8 groups", "int8", "int4", "int4 32")
    hidden, inner = (128, 64) if gated else (192, 128)
    weights, meant = in_codes(name, hidden, inner, gated, device)
    for stack, values in ((weights.gate_up, meant.gate_up), (weights.down, meant.down)):
        assert stack.shape == values.shape
        assert torch.equal(stack.values(2), values.values(2).bfloat16())
        assert torch.equal(stack.values(torch.tensor([1, 2]))[1], stack.values(2))
    x, ids, factors, _ = rows_of(5, torch.bfloat16, device, hidden)
    clamp = None if gated else SquaredRelu()
    found = dispatch.experts(x, ids, factors, weights, clamp, residual=None)
    expected = reference.experts(x.float(), ids, factors, meant, clamp, residual=None)
    # the kernel rounds an expert's first product and its output, both to 2^-9, and some forms their scales
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-7 * float(expected.abs().max()))
    alone = dispatch.experts(x[4:5], ids[4:5], factors[4:5], weights, clamp, residual=None)
    assert torch.equal(alone[0], found[4])


def partly_in_codes(quantised: str, device: str) -> tuple[ExpertWeights, ExpertWeights]:
    """Experts of which one stack, `quantised`, is in codes of fp8 and the other in bf16, and their values in fp32."""
    weights, meant = in_codes("fp8", 128, 64, True, device)
    other = "down" if quantised == "gate_up" else "gate_up"
    values: ExpertStack = getattr(meant, other)
    plain = ExpertStack.of(values.data.bfloat16())
    return replace(weights, **{other: plain}), replace(meant, **{other: ExpertStack.of(plain.data.float())})


@pytest.mark.parametrize("quantised", ["gate_up", "down"])
@pytest.mark.parametrize("count", [1, 5, 70])
def test_each_stack_has_the_kernel_of_its_own_form(count: int, quantised: str) -> None:
    """A checkpoint may have only one stack in codes, and the width of an expert may suit only one of them."""
    weights, _ = partly_in_codes(quantised, "cpu")
    x, ids, factors, _ = rows_of(count, torch.bfloat16, "cpu", 128)
    with mock.patch.object(dispatch, "launch") as launched:
        dispatch.experts(x, ids, factors, weights, None, residual=None)
    products = launched.mock_calls[:-1]  # the last one adds up
    wanted = [codes_kernel, expert_kernel] if quantised == "gate_up" else [expert_kernel, codes_kernel]
    assert [call.args[0] for call in products] == wanted
    # pairs of a tile: both products read one list of them
    pairs = [each.get("ROWS") or 8 * each["BLOCKS"] for each in (call.kwargs for call in products)]
    assert pairs[0] == pairs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", ["gate_up", "down"])
@pytest.mark.parametrize("count", [1, 5, 70])
def test_only_one_stack_in_codes(count: int, quantised: str) -> None:
    weights, meant = partly_in_codes(quantised, "cuda")
    x, ids, factors, _ = rows_of(count, torch.bfloat16, "cuda", 128)
    found = dispatch.experts(x, ids, factors, weights, None, residual=None)
    expected = reference.experts(x.float(), ids, factors, meant, None, residual=None)
    # the kernel rounds an expert's first product and its output, both to 2^-9
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-7 * float(expected.abs().max()))
    alone = dispatch.experts(x[:1], ids[:1], factors[:1], weights, None, residual=None)
    assert torch.equal(alone[0], found[0])


def test_codes_of_another_kind_are_refused() -> None:
    weights, _ = in_codes("int4", 128, 64, True, "cpu")
    with pytest.raises(ValueError, match="wanted CodesKind"):
        weights.down.fill_all([random_codes("fp8", 128, 64)] * EXPERTS)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", ["plain", "bias"])
def test_of_a_part_of_the_columns_the_sum_is_in_fp32(form: str, device: str) -> None:
    """Without a residual; the sums of all parts are that of all columns, and a shared expert's part is fp32."""
    weights = weights_of(form, torch.float32, device, HIDDEN, INNER)
    x, ids, factors, residual = rows_of(5, torch.float32, device)
    shared = {"shared": residual.flip(0), "shared_logits": factors[:, :1]} if form == "bias" else {}
    whole = reference.experts(x, ids, factors, weights, CLAMP, residual=residual, **shared)
    found = dispatch.experts(x, ids, factors, weights, CLAMP, residual=None, **shared)
    torch.testing.assert_close(found, whole - residual, rtol=2e-5, atol=2e-5)
    halves = [slice(INNER // 2), slice(INNER // 2, INNER)]
    unbiased = replace(weights, down_bias=None)
    for compiling in (False, True):
        with mock.patch.object(torch.compiler, "is_compiling", return_value=compiling):
            first, second = (
                reference.experts(x, ids, factors, each.columns(half), CLAMP, residual=None, **more)
                for each, half, more in ((weights, halves[0], shared), (unbiased, halves[1], {}))
            )
        torch.testing.assert_close(residual + first + second, whole, rtol=2e-5, atol=2e-5)
    narrow = dispatch.experts(x.half(), ids, factors, weights_of(form, torch.float16, device), CLAMP, residual=None)
    assert narrow.dtype == torch.float32


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32])
def test_the_norm_of_the_sum_beside_it(norm_dtype: torch.dtype, device: str) -> None:
    """The sum has the bits that it has alone, and a row's norm does not depend on others."""
    weights = weights_of("plain", torch.float16, device, 72)
    x, ids, factors, residual = rows_of(5, torch.float16, device, 72)
    norm = (1 + 0.3 * torch.randn(72, generator=torch.Generator().manual_seed(2))).to(device, norm_dtype), 1e-5
    total, normed = dispatch.experts_normed(x, ids, factors, weights, None, residual=residual, norm=norm)
    assert torch.equal(total, dispatch.experts(x, ids, factors, weights, None, residual=residual))
    eps = 2 * torch.finfo(torch.float16).eps  # a rounding or two
    torch.testing.assert_close(normed, reference.norm(total, *norm), rtol=eps, atol=eps)
    at = slice(3, 4)
    alone = dispatch.experts_normed(x[at], ids[at], factors[at], weights, None, residual=residual[at], norm=norm)
    for found, whole in zip(alone, (total, normed), strict=True):
        assert torch.equal(found, whole[at])
    nothing = dispatch.experts_normed(x[:0], ids[:0], factors[:0], weights, None, residual=x[:0], norm=norm)
    assert [len(each) for each in nothing] == [0, 0]
    short = norm[0][1:], 1e-5
    with pytest.raises(ValueError, match="norm's weight is"):
        dispatch.experts_normed(x, ids, factors, weights, None, residual=residual, norm=short)


def whole_numbers(weights: ExpertWeights) -> ExpertWeights:
    """Small whole numbers, of which the interpreter's products have one sum only."""
    up, down = (replace(each, data=(20 * each.data).round()) for each in (weights.gate_up, weights.down))
    return replace(weights, gate_up=up, down=down)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("form", ["plain", "mxfp4"])
def test_a_row_does_not_feel_what_runs_beside_it(form: str, device: str) -> None:
    """To the bit: alone, with few others, and among so many that they are sorted; in any place."""
    count = 300 if device == "cuda" else 70
    for dtype in dtypes(form, device):
        weights = weights_of(form, dtype, device)
        x, ids, factors, residual = rows_of(count, dtype, device)
        if device == "cpu" and form != "mxfp4":
            weights, x = whole_numbers(weights), x.round()
        whole = dispatch.experts(x, ids, factors, weights, None, residual=residual)
        generator = torch.Generator().manual_seed(1)
        for rows in (1, 2, 5, 9, 17, 33, 64) if device == "cuda" else (1, 5, 17):
            at = torch.randperm(count, generator=generator)[:rows].to(device)
            some = dispatch.experts(x[at], ids[at], factors[at], weights, None, residual=residual[at])
            assert torch.equal(some, whole[at]), (dtype, rows)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("count", [1, 4, 70])
def test_experts_that_no_row_has_are_not_read(count: int, device: str) -> None:
    weights = weights_of("bias", torch.float32, device)
    x, ids, factors, residual = rows_of(count, torch.float32, device)
    ids = ids % 4
    ids[:, 1] = (ids[:, 0] + 1) % 4
    clean = dispatch.experts(x, ids, factors, weights, CLAMP, residual=residual)
    for each in (weights.gate_up.data, weights.down.data, weights.gate_up_bias, weights.down_bias):
        assert each is not None
        each[4:] = float("nan")
    found = dispatch.experts(x, ids, factors, weights, CLAMP, residual=residual)
    assert torch.equal(found, clean)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("count", [2, 70])
def test_rows_that_are_no_numbers_stay_alone(count: int) -> None:
    weights = weights_of("bias", torch.float32, "cpu")
    x, ids, factors, residual = rows_of(count, torch.float32, "cpu")
    clean = dispatch.experts(x, ids, factors, weights, CLAMP, residual=residual)
    x[1] = float("nan")
    found = dispatch.experts(x, ids, factors, weights, CLAMP, residual=residual)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[2:], clean[2:])


def test_the_sum_is_in_the_order_of_the_row_and_the_pairs_of_a_graph_give_the_same() -> None:
    weights = weights_of("bias", torch.float32, "cpu")
    x, ids, factors, residual = rows_of(11, torch.float32, "cpu")
    expected = reference.experts(x, ids, factors, weights, CLAMP, residual=residual)
    pairs = torch.compile(reference.experts, backend="eager", fullgraph=True)
    found = pairs(x, ids, factors, weights, CLAMP, residual=residual)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    weights = weights_of("plain", torch.float32, "cpu")
    x, ids, factors, residual = rows_of(2, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        dispatch.experts(x.half(), ids, factors, weights, None, residual=residual)
    with pytest.raises(ValueError, match="ids is int64"):
        dispatch.experts(x, ids.long(), factors, weights, None, residual=residual)
