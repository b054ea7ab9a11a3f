"""Products with quantised weights against the exact definition: on a GPU for real, elsewhere by stand-ins for Gluon."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastspec.kernels.common.codes import Codes
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.product.plan import FewRows, Wide
from fastspec.kernels.product.quantised import plan
from tests.helpers import gluon_simulator
from tests.helpers.devices import devices
from tests.helpers.gluon_values import Values, widened
from tests.helpers.packed_codes import KINDS, magnitudes, modules, on_device, random_codes, stored
from tests.helpers.products import product_case

PDL = {"cpu": True, "cuda": False}
ROWS = 70  # more than one CTA takes


def case(
    name: str, rows: int, n: int, k: int, device: str, epilogue: str = "fp32"
) -> tuple[Tensor, Codes, Weight, dict[str, Any]]:
    """x, codes, weight and keyword arguments of one call."""
    x, _, given = product_case(rows, n, k, torch.bfloat16, device, epilogue)
    codes = on_device(random_codes(name, n, k), device)
    return x, codes, stored(codes, "gated" in given), given


def exact(x: Tensor, codes: Codes, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The product in fp64, and what it may be off by.

    Every 16 values of K and every way are one rounding in fp32, of sums no larger than all magnitudes together; a scale
    is one more, and so is the factor of a row. The tensor core cuts off where it could round: twice as much.
    """
    wide, size = x.double(), codes.shape[1] // 16 + 16
    if "norm" in given:
        gamma, eps = given["norm"]
        wide = (x * gamma).double() * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = wide @ codes.dequantise(torch.float32).double().T
    bound = 2.0**-23 * size * (wide.abs() @ magnitudes(codes).T)
    if "bias" in given:
        out = out + given["bias"].double()
    if "gated" in given:
        (gate, up), (gate_bound, up_bound) = out.chunk(2, 1), bound.chunk(2, 1)
        # silu's slope is at most 1.1
        bound = 1.1 * gate_bound * (up.abs() + up_bound) + up_bound * gate.abs() + 1e-6 * (gate * up).abs()
        out = gate * torch.sigmoid(gate) * up
    if "residual" in given:
        out = out + given["residual"].double()
    if given.get("out_dtype") != torch.float32:
        bound = bound + 2.0**-8 * (out.abs() + bound)  # one rounding to bf16
    return out, bound + 1e-6 * out.abs()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", KINDS)
def test_the_kernel_equals_its_torch_definition(name: str, device: str) -> None:
    with modules(device) as found:
        for epilogue in ("fp32", "norm+bias+residual", "norm+gated", "bias+gated+fp32"):
            x, codes, weight, given = case(name, 11, 144, 640, device, epilogue)
            ours = found.dispatch.packed_linear(x, weight, **given, pdl=PDL[device])
            truth, bound = exact(x, codes, given)
            assert ours.dtype == given.get("out_dtype", torch.bfloat16)
            worst = ((ours.double() - truth).abs() - bound).max().item()
            assert worst <= 0, (epilogue, worst)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", KINDS)
def test_every_code_is_exact(name: str, device: str) -> None:
    """One value of x at a time, and scales that are powers of two: each code is what comes out."""
    given = random_codes(name, 256, 128)
    codes = Codes(given.kind, given.codes, torch.full_like(given.scales, 0.25), given.zeros)
    x = torch.eye(128, dtype=torch.bfloat16, device=device)[:, :128]
    with modules(device) as found:
        ours = found.dispatch.packed_linear(
            x, stored(on_device(codes, device)), out_dtype=torch.float32, pdl=PDL[device]
        )
    assert torch.equal(ours.T.cpu(), codes.dequantise(torch.float32))


TILES = [FewRows(*tile) for tile in ((16, 8, 3, 2), (32, 8, 1, 0), (64, 16, 2, 1), (16, 32, 2, 0), (32, 64, 1, 1))]


@pytest.mark.parametrize("name", KINDS)
def test_bits_of_a_row_in_every_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and among others, loops and what is behind them; K that is no multiple of a round of ways."""
    monkeypatch.setattr(plan, "split_of", lambda *given: plan.Split(2, 128))
    x, _, weight, given = case(name, ROWS, 48 if "blocks" not in name else 144, 128 * 13, "cpu")
    with modules("cpu") as found:
        whole = found.dispatch.packed_linear(x, weight, **given, pdl=True)
        for tile, rows in product(TILES, (1, 3, 40)):
            monkeypatch.setattr(plan, "tile_of", lambda *given, tile=tile: tile)
            ours = found.dispatch.packed_linear(x[ROWS - rows :], weight, **given, pdl=True)
            assert torch.equal(ours, whole[ROWS - rows :]), (tile, rows)


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "int8 with -128", "int4", "int4 zeros", "int4 64"])
def test_bits_of_a_row_among_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ring of codes as alone: all passes in a program, some, one; a last K tile that not all ways have."""
    monkeypatch.setattr(plan, "split_of", lambda *given: plan.Split(4, 128))
    x, _, weight, given = case(name, 40, 144, 128 * 8, "cpu", "norm+bias+residual")
    residual, given["out_dtype"] = given.pop("residual"), torch.float32
    with modules("cpu") as found:
        run = found.dispatch.packed_linear
        rows = [slice(i, i + 1) for i in range(0, 40, 3)]
        alone = torch.cat([run(x[at], weight, **given, residual=residual[at], pdl=True) for at in rows])
        for sizes in ((64, 64, 4, 4, 1), (64, 32, 4, 3, 2), (128, 16, 8, 4, 4)):
            tile = Wide(*sizes, 128)
            monkeypatch.setattr(plan, "launch_of", lambda *given, tile=tile: tile)
            ours = run(x, weight, **given, residual=residual, pdl=True)
            assert torch.equal(ours[::3], alone), sizes


@pytest.mark.parametrize("name", ["fp8", "int8", "int8 with -128", "int4", "int4 zeros"])
def test_operands_of_few_and_many_rows_are_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal products are not enough: the tensor core cuts sums off by its operands' exponents, as they stand."""
    monkeypatch.setattr(plan, "split_of", lambda *given: plan.Split(2, 128))
    largest: dict[str, set[tuple[float, float]]] = {}

    def watched(multiply: str) -> Callable[..., Values]:
        real = getattr(gluon_simulator, multiply)

        def run(left: Values, right: Values, *others: Any, **options: Any) -> Values:
            sizes = [float(np.abs(widened(each.array, each.kind)).max()) for each in (left, right)]
            largest.setdefault(multiply, set()).add((sizes[0], sizes[1]))
            return real(left, right, *others, **options)  # type: ignore[no-any-return]

        return run

    for multiply in ("mma", "group_mma"):
        monkeypatch.setattr(gluon_simulator, multiply, watched(multiply))
    x, _, weight, given = case(name, 17, 64, 256, "cpu", "norm")
    x[:] = x[:1]
    with modules("cpu") as found:
        for rows in (1, 17):
            found.dispatch.packed_linear(x[:rows], weight, **given, pdl=True)
    tops = [tuple(max(pair[i] for pair in largest[multiply]) for i in (0, 1)) for multiply in ("mma", "group_mma")]
    assert tops[0] == tops[1]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", ["fp8", "int4 zeros"])
def test_the_largest_logit_of_a_quantised_head(name: str, device: str) -> None:
    with modules(device) as found:
        scratch = torch.zeros(ROWS + 1, dtype=torch.int64, device=device)
        for rows in (1, 12, ROWS):
            x, _, weight, given = case(name, rows, 304, 384, device, "norm")
            logits = found.dispatch.packed_linear(x, weight, **given, out_dtype=torch.float32, pdl=PDL[device])
            for limit in (1, 100, 304):
                picked = found.dispatch.packed_argmax(x, weight, limit, scratch, **given, pdl=PDL[device])
                assert torch.equal(picked, logits[:, :limit].argmax(-1)), (rows, limit)
            assert not scratch.any()


def test_other_activations_are_refused() -> None:
    weight = stored(random_codes("fp8", 32, 256), dtype=torch.float16)
    with modules("cpu") as found, pytest.raises(TypeError, match="must be bfloat16"):
        found.dispatch.packed_linear(torch.zeros(1, 256, dtype=torch.float16), weight, pdl=True)


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (128256, 2048), (4096, 14336), (16, 128)])
def test_every_weight_has_a_launch(n: int, k: int) -> None:
    for form in ("fp8", "int8", "off8", "int4", "fp4"):
        split = plan.split_of(form, n, k)
        for rows in range(1, 130):
            tile = plan.tile_of(form, n, k, rows)
            assert 0 <= tile.row_depth <= tile.depth <= -(-k // (split.split_k * split.k_tile))
            assert min(rows, plan.MAX_ROWS) <= tile.rows <= plan.MAX_ROWS
            for whole in (False, True):
                wide = plan.wide_of(form, n, k, rows, 132, whole)
                assert min(rows, plan.MAX_ROWS) <= wide.rows <= plan.MAX_ROWS
                assert split.split_k % wide.splits == 0
                assert wide.splits == split.split_k or not whole
                assert wide.stages >= 4


SHAPES = [(6144, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (2048, 8192)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_bits_on_a_gpu(name: str) -> None:
    """Rows 1 to 64 and 100, at random places, of shapes of two Llamas; and the definition for all of them."""
    generator = torch.Generator().manual_seed(0)
    with modules("cuda") as found:
        for n, k in SHAPES:
            x, codes, weight, given = case(name, 100, n, k, "cuda")
            alone = [found.dispatch.packed_linear(row, weight, **given, pdl=False) for row in x.split(1)]
            expected = torch.cat(alone)
            truth, bound = exact(x, codes, given)
            assert ((expected.double() - truth).abs() <= bound).all(), (n, k)
            for rows in (*range(1, 65), 100):
                at = torch.randperm(100, generator=generator)[:rows].cuda()
                assert torch.equal(found.dispatch.packed_linear(x[at], weight, **given, pdl=False), expected[at]), rows


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_bits_of_ten_thousand_rows_on_a_gpu(name: str) -> None:
    """Rows alone, and in passes of 1 to 64 rows: with the norm inside the product, and before it."""
    generator, count = torch.Generator().manual_seed(1), 10_000
    sizes = torch.randint(1, 65, (count,), generator=generator).tolist()
    with modules("cuda") as found:
        x, _, weight, given = case(name, count, 3072, 2048, "cuda", "norm")
        x = x * torch.logspace(-3, 3, count, device="cuda", dtype=torch.bfloat16)[:, None]
        alone = torch.cat([found.dispatch.packed_linear(row, weight, **given, pdl=False) for row in x.split(1)])
        first = 0
        while first < count:
            rows = slice(first, first + sizes.pop())
            assert torch.equal(found.dispatch.packed_linear(x[rows], weight, **given, pdl=False), alone[rows]), rows
            first = rows.stop
