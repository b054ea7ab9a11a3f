"""What lies between two attentions, as one chain of packed products against the same products one by one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.distributed.exchange import add_rounded, sum_parts
from fastspec.kernels import reference
from fastspec.kernels.common import packing
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.gpu import Gpu
from fastspec.shapes import UNTILED
from tests.helpers.limits import HANGS
from tests.helpers.products import product_case
from tests.kernels.product.test_dispatch import modules


def a_layer(
    hidden: int, inner: int, heads: int, qkv: int, device: str, seed: int, dtype: torch.dtype, biases: bool
) -> SimpleNamespace:
    """A layer's norms and packed weights: `heads` columns come out of attention, `qkv` go in."""

    def product(n: int, k: int, place: int, epilogue: str = "bias") -> tuple[Weight, Tensor | None]:
        _, weight, given = product_case(1, n, k, dtype, device, epilogue, seed=10 * seed + place)
        return Weight.pack(weight, "gated" in epilogue), given["bias"] if biases else None

    generator = torch.Generator().manual_seed(seed)
    norms = [(torch.rand(hidden, generator=generator) + 0.5).to(device, dtype) for _ in range(2)]
    o, gate_up = product(hidden, heads, 0), product(2 * inner, hidden, 1, "gated+bias")
    down, fed = product(hidden, inner, 2), product(qkv, hidden, 3)
    names = [
        "input_norm",
        "post_norm",
        "o",
        "o_bias",
        "gate_up",
        "gate_up_bias",
        "down",
        "down_bias",
        "qkv",
        "qkv_bias",
    ]
    return SimpleNamespace(**dict(zip(names, [*norms, *o, *gate_up, *down, *fed], strict=True)))


def inputs(layer: SimpleNamespace, rows: int) -> tuple[Tensor, Tensor]:
    """What attention left, and the residual stream, [1, rows, ...]."""
    hidden, heads = layer.o.shape
    like = layer.input_norm
    widths = (heads, hidden)
    attended, x = (product_case(rows, 16, width, like.dtype, str(like.device), seed=width)[0][None] for width in widths)
    return attended, x


def both(packed: Any, layers: list[SimpleNamespace], attended: Tensor, x: Tensor, pdl: bool) -> list[Any]:
    """(x, qkv) of the chain and of products one by one, for layers one and two of which the second may be missing."""
    rows = x.shape[1]
    next_layer = layers[1] if len(layers) > 1 else None

    def linear(x: Tensor, weight: Weight, bias: Tensor | None, tiling: Any, **options: Any) -> Tensor:
        found: Tensor = packed.dispatch.packed_linear(x, weight, bias, pdl=pdl, **options)
        return found

    weights = [layers[0].o, layers[0].gate_up, layers[0].down, layers[-1].qkv]
    assert packed.layer_tail.runs_on_tma(weights, rows)
    chain = packed.layer_tail.layer_tail(attended, x, layers[0], next_layer, 1e-5, pdl)
    if attended.dim() == 4:
        attended = packing.in_order(attended)
    one_by_one = reference.layer_tail(linear, attended, x, layers[0], next_layer, 1e-5, UNTILED)
    return [*chain, *one_by_one]


def regrouped(rows: Tensor) -> Tensor:
    """Rows [..., K] as attention may leave them, [..., K/64, 64]."""
    return rows.unflatten(-1, (-1, 2, 4, 4, 2)).movedim(-2, -4).flatten(-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biases", [False, True])
def test_is_the_products_one_by_one(biases: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit; sums over ways of their own and complete ones, K tiles that fill a row and that do not."""
    with modules("cpu") as packed:
        cases = [(9, 128, 384, 16384), (18, 128, 384, 16384), (40, 384, 256, 16384), (70, 256, 128, 256)]
        for rows, hidden, inner, many in cases:
            gpu = Gpu((9, 0), 132 if many > 256 else 2)
            monkeypatch.setattr(packed.launch, "gpu_of", lambda device, gpu=gpu: gpu)
            layers = [a_layer(hidden, inner, 256, 272, "cpu", seed, dtype, biases) for seed in range(2)]
            for some in (layers, layers[:1]):
                attended, given = inputs(layers[0], rows)
                x, qkv, wanted_x, wanted_qkv = both(packed, some, attended, given, True)
                assert torch.equal(both(packed, some, regrouped(attended), given, True)[0], x)
                assert torch.equal(x, wanted_x)
                assert (qkv is None) == (wanted_qkv is None) == (len(some) == 1)
                assert qkv is None or torch.equal(qkv, wanted_qkv)


def test_rows_that_came_regrouped_go_to_any_products() -> None:
    """What attention left for one product in a layer whose others are not packed."""
    from fastspec.kernels.triton_ops import TRITON_OPS

    layer = a_layer(128, 256, 256, 272, "cpu", 0, torch.bfloat16, True)
    attended, x = inputs(layer, 18)
    assert torch.equal(packing.in_order(regrouped(attended)), attended)
    for name in ("o", "gate_up", "down", "qkv"):
        setattr(layer, name, Weight(getattr(layer, name).unpack()))
    given = (x, layer, layer, 1e-5, UNTILED)
    plain = TRITON_OPS.layer_tail(reference.linear, attended, *given)
    for ours, theirs in zip(TRITON_OPS.layer_tail(reference.linear, regrouped(attended), *given), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_few_rows_and_other_weights_go_elsewhere() -> None:
    with modules("cpu") as packed:
        weight = Weight.pack(torch.zeros(128, 128, dtype=torch.bfloat16))
        assert packed.layer_tail.runs_on_tma([weight], 9)
        assert not packed.layer_tail.runs_on_tma([weight], 8)
        assert not packed.layer_tail.runs_on_tma([weight, Weight(weight.unpack())], 17)
    with modules("cpu", (8, 0)) as packed:
        assert not packed.layer_tail.runs_on_tma([weight], 17)


def half_of(layer: SimpleNamespace, half: int) -> SimpleNamespace:
    """What one of two devices has of a layer: rows of qkv and of gate and up, columns of o and of down."""
    columns = {name: getattr(layer, name).unpack().chunk(2, 1)[half] for name in ("o", "down")}
    gate, up = layer.gate_up.unpack().chunk(2)
    gate_up = torch.cat([gate.chunk(2)[half], up.chunk(2)[half]])
    gate_bias, up_bias = layer.gate_up_bias.chunk(2)
    matrices = {**columns, "gate_up": gate_up, "qkv": layer.qkv.unpack().chunk(2)[half]}
    packed = {name: Weight.pack(matrix, name == "gate_up") for name, matrix in matrices.items()}
    biases = {
        "gate_up_bias": torch.cat([gate_bias.chunk(2)[half], up_bias.chunk(2)[half]]),
        "qkv_bias": layer.qkv_bias.chunk(2)[half],
    }
    return SimpleNamespace(**{**vars(layer), **packed, **biases})


class SumOfTwo:
    """An all-reduce of two threads."""

    def __init__(self) -> None:
        self.given: list[Any] = [None, None]
        self.barrier = threading.Barrier(2, timeout=HANGS)

    def __call__(self, half: int, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        assert partial.dtype == torch.float32
        self.given[half] = sum_parts(partial, residual)
        self.barrier.wait()
        total = self.given[0] + self.given[1]
        self.barrier.wait()  # nobody gives the next product before both have read these
        return add_rounded(total, bias, residual)


def on_two_devices(tail: Callable[..., Any], layers: list[SimpleNamespace], attended: Tensor, x: Tensor) -> list[Any]:
    """What tail(attended, x, layer, next_layer, reduce) gives each of two threads that have half of the layers."""
    summed = SumOfTwo()

    def one(half: int) -> Any:
        mine = [half_of(layer, half) for layer in layers]
        next_layer = mine[1] if len(mine) > 1 else None
        try:
            return tail(attended.chunk(2, -1)[half], x, mine[0], next_layer, partial(summed, half))
        except BaseException:
            summed.barrier.abort()  # or the other half waits for this one
            raise

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


@pytest.mark.parametrize("last", [False, True])
def test_two_halves_and_a_sum_are_the_whole_layer(last: bool) -> None:
    """In torch, whose sums have an order of their own, so results are close and not the same."""
    layers = [a_layer(256, 512, 256, 512, "cpu", seed, torch.bfloat16, True) for seed in range(1 if last else 2)]
    attended, x = inputs(layers[0], 5)

    def tail(attended: Tensor, x: Tensor, layer: Any, next_layer: Any, reduce: Any = None) -> Any:
        return reference.layer_tail(reference.linear, attended, x, layer, next_layer, 1e-5, UNTILED, reduce)

    whole_x, whole_qkv = tail(attended, x, layers[0], None if last else layers[1])
    (x_0, qkv_0), (x_1, qkv_1) = on_two_devices(tail, layers, attended, x)
    assert torch.equal(x_0, x_1)
    torch.testing.assert_close(x_0, whole_x, rtol=0.02, atol=0.05)
    if last:
        assert qkv_0 is qkv_1 is whole_qkv is None
    else:
        torch.testing.assert_close(torch.cat([qkv_0, qkv_1], -1), whole_qkv, rtol=0.02, atol=0.1)


def test_a_sum_over_devices_goes_behind_o_and_behind_down() -> None:
    """Of the chain of kernels: what `reduce` is given, and that its result goes on, to the bits of single products."""
    layers = [a_layer(128, 384, 256, 272, "cpu", seed, torch.bfloat16, True) for seed in range(2)]
    attended, x = inputs(layers[0], 18)
    with modules("cpu") as packed:

        def linear(x: Tensor, weight: Weight, bias: Tensor | None, tiling: Any, **options: Any) -> Tensor:
            found: Tensor = packed.dispatch.packed_linear(x, weight, bias, pdl=True, **options)
            return found

        seen: list[list[Tensor]] = [[], []]

        def reduce(given: Tensor, bias: Tensor | None, residual: Tensor, calls: list[Tensor]) -> Tensor:
            calls.append(sum_parts(given, residual).clone())
            return add_rounded(calls[-1] * 3, bias, residual)

        for next_layer in (layers[1], None):
            chain = packed.layer_tail.layer_tail(
                attended, x, layers[0], next_layer, 1e-5, True, partial(reduce, calls=seen[0])
            )
            given = (linear, attended, x, layers[0], next_layer, 1e-5, UNTILED)
            wanted = reference.layer_tail(*given, partial(reduce, calls=seen[1]))
            assert torch.equal(chain[0], wanted[0])
            assert (chain[1] is None) == (next_layer is None)
            assert next_layer is None or torch.equal(chain[1], wanted[1])
    assert len(seen[0]) == len(seen[1]) == 4
    assert all(torch.equal(ours.view(theirs.shape), theirs) for ours, theirs in zip(*seen, strict=True))


class Roomy:
    """A sum of three devices that have the same, with memory for so many elements."""

    def __init__(self, elements: int) -> None:
        self.elements, self.calls = elements, 0

    def __call__(self, given: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        self.calls += 1
        return add_rounded(sum_parts(given, residual) * 3, bias, residual)

    def room_for(self, elements: int) -> Any:
        return self if elements <= self.elements else None


def test_sums_with_room_are_one_kernel_with_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a norm follows, where their elements have room; the others call what adds."""
    layers = [a_layer(128, 384, 256, 272, "cpu", seed, torch.bfloat16, True) for seed in range(2)]
    attended, x = inputs(layers[0], 18)
    with modules("cpu") as packed:
        asked: list[tuple[int, ...]] = []

        def at_once(
            parts: Any, bias: Any, residual: Any, norm: Any, cut: Any, dtype: Any, pdl: Any, room: Any, *rest: Any
        ) -> Any:
            asked.append(cut)
            total = Roomy(0)(parts.sums if len(parts.sums) > 1 else parts.sums[0], bias, residual)
            return packed.launch.permuted_rows(total, norm, cut, dtype, pdl, None, None, *rest)

        kernels = SimpleNamespace(elements_in_room=lambda rows, k, cut: rows * k, sum_ranks_permuted=at_once)
        monkeypatch.setitem(sys.modules, "fastspec.kernels.product.rank_sums", kernels)
        for last in (False, True):
            chains, calls = [], []
            for elements in (18 * 128, 18 * 128 - 1):
                adds = Roomy(elements)
                chain = packed.layer_tail.layer_tail(
                    attended, x, layers[0], None if last else layers[1], 1e-5, True, adds
                )
                chains.append([each for each in chain if each is not None])
                calls.append(adds.calls)
            assert calls == [1 if last else 0, 2]
            assert all(torch.equal(*pair) for pair in zip(*chains, strict=True))
    assert len(asked) == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "qkv"),
    [(4096, 14336, 4096, 6144), (2048, 8192, 2048, 3072), (896, 4864, 896, 1152), (3584, 18944, 3584, 4608)],
)
def test_real_sizes_on_a_gpu(hidden: int, inner: int, heads: int, qkv: int) -> None:
    """To the bit, launched early inside a graph, again and again."""
    from fastspec.kernels.product import dispatch, layer_tail

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the TMA kernel needs sm_90")
    packed = SimpleNamespace(layer_tail=layer_tail, dispatch=dispatch)
    layers = [a_layer(hidden, inner, heads, qkv, "cuda", seed, torch.bfloat16, seed == 0) for seed in range(2)]
    for rows in (9, 16, 17, 40, 64, 100, 160):
        attended, x = inputs(layers[0], rows)
        given = regrouped(attended), x
        x, fed, wanted_x, wanted_fed = both(packed, layers, attended, x, False)
        assert torch.equal(x, wanted_x), rows
        assert torch.equal(fed, wanted_fed), rows
        both(packed, layers, *given, True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = both(packed, layers, *given, True)
        for _ in range(50):
            graph.replay()
            assert torch.equal(again[0], wanted_x), rows
            assert torch.equal(again[1], wanted_fed), rows
