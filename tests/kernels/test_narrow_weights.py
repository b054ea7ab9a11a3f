"""Products with weights of too few rows to be packed: a prompt's token has the same bits in a pass of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from fastspec.shapes import UNTILED, Tiling
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels import triton_ops

WIDTH = 64


def operands(rows: int, n: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Weight]:
    generator = torch.Generator().manual_seed(n)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((1, rows, WIDTH), (n, WIDTH)))
    return x.to(device, dtype), Weight(weight.to(device, dtype))


def of(x: Tensor, weight: Weight, tiling: Tiling) -> Tensor:
    return triton_ops.TRITON_OPS.linear(x, weight, None, tiling, out_dtype=torch.float32)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("n", [1, 8])
def test_passes_of_all_sizes_leave_the_same_bits(n: int, device: str) -> None:
    sizes, dtype = ((32, 96), torch.float16) if device == "cpu" else ((64, 128, 512, 2048), torch.bfloat16)
    x, weight = operands(sizes[-1], n, dtype, device)
    whole = of(x, weight, Tiling(sizes[-1], sizes[-1]))
    exact = x.double() @ weight.data.double().T
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-4)
    for size in sizes[:-1]:
        parts = [of(part, weight, Tiling(size, size)) for part in x.split(size, dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole), size


def test_which_products_a_library_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of more rows, of fp32, and where no bits are promised."""
    made: list[str] = []

    def recorded(name: str, result: Tensor) -> Any:
        def call(*given: Any, **options: Any) -> Tensor:
            made.append(name)
            return result

        return call

    monkeypatch.setattr(reference, "linear", recorded("library", torch.zeros(1)))
    monkeypatch.setattr(triton_ops, "tile_linear", recorded("tiles", torch.zeros(1)))
    prompt = Tiling(256, 256)
    for n, dtype, tiling in (
        (1, torch.float16, prompt),
        (15, torch.float16, prompt),
        (17, torch.float16, prompt),
        (1, torch.float32, prompt),
        (1, torch.float16, UNTILED),
    ):
        triton_ops.TRITON_OPS.linear(*operands(20, n, dtype), None, tiling)
    assert made == ["tiles", "tiles", "library", "library", "library"]
