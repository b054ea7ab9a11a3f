"""Weights: what each format says of itself, and inside torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight, is_packed


def rows(n: int = 48, k: int = 256, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.parametrize("gated", [False, True])
def test_packed_and_rows_are_the_same_matrix(gated: bool) -> None:
    plain = Weight(rows())
    packed = Weight.pack(plain.data, gated)
    assert (packed.format, packed.gated) == ("packed", gated)
    assert (plain.format, plain.gated) == ("rows", False)
    for weight in (plain, packed):
        assert weight.shape == (48, 256)
        assert weight.dtype == torch.bfloat16
        assert weight.device == torch.device("cpu")
        assert weight.nbytes == 2 * 48 * 256
        assert torch.equal(weight.unpack(), plain.data)
    ids = torch.tensor([[0, 47], [17, 16]])
    assert torch.equal(plain.embed(ids), plain.data[ids])
    assert gated or torch.equal(packed.embed(ids), plain.data[ids])
    assert packed.words().shape == (3, 8, 16, 16)
    assert packed.words(3, 64, 32).shape == (3, 64, 32)


def test_is_packed_wants_16_bit_packed_weights_alone() -> None:
    packed, plain = Weight.pack(rows()), Weight(rows())
    assert is_packed([packed, packed])
    assert not is_packed([packed, plain])
    assert not is_packed([Weight(torch.zeros(1, 1, 16, 32), "packed")])  # no 16-bit values


@pytest.mark.parametrize(
    ("data", "options", "match"),
    [
        (torch.zeros(16), (), r"weights as rows are \[N, K\]"),
        (torch.zeros(1, 1, 16, 32), (), r"weights as rows are \[N, K\]"),
        (torch.zeros(16, 32), ("rows", True), "gated=True"),
        (torch.zeros(16, 32), ("packed",), r"packed weights are contiguous \[N/16, K/32, 16, 32\]"),
        (torch.zeros(1, 1, 32, 16), ("packed",), "packed weights are"),
        (torch.zeros(2, 2, 16, 32).transpose(0, 1), ("packed",), "packed weights are"),
    ],
)
def test_a_shape_that_its_format_does_not_have_is_refused(data: Tensor, options: tuple, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Weight(data, *options)


@pytest.mark.parametrize("form", ["rows", "packed"])
def test_goes_through_torch_compile_as_one_graph(form: str) -> None:
    weight = Weight(rows()) if form == "rows" else Weight.pack(rows())
    x, ids = rows(5), torch.tensor([[3, 99]])

    def product(weight: Weight, x: Tensor) -> Tensor:
        return reference.linear(x, weight) + reference.embed(weight, ids).sum()

    compiled = torch.compile(product, fullgraph=True, dynamic=False, backend="eager")
    assert torch.equal(compiled(weight, x), product(weight, x))
