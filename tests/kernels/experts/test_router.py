"""The norm before a router and the router's product in one launch: values, bits, and what is refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.experts import router as routers
from fastspec.kernels.experts.router import normed_logits

WIDTH = 80  # no power of two


def operands(rows: int, n: int, device: str, norm_dtype: torch.dtype) -> tuple[Tensor, Tensor, Weight, Tensor]:
    """x, a norm's weight, a router and its bias; x and router in fp16, which the interpreter has, too."""
    generator = torch.Generator().manual_seed(rows + n)
    x = 3 * torch.randn(1, rows, WIDTH, generator=generator)
    weight = 1 + 0.3 * torch.randn(WIDTH, generator=generator)
    router, bias = 0.3 * torch.randn(n, WIDTH, generator=generator), torch.randn(n, generator=generator)
    half = torch.float16
    return (
        x.to(device, half),
        weight.to(device, norm_dtype),
        Weight(router.to(device, half)),
        bias.to(device, half),
    )


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [5, 17])
def test_it_is_its_definition(n: int, norm_dtype: torch.dtype, device: str) -> None:
    x, weight, router, bias = operands(3, n, device, norm_dtype)
    for given in (None, bias):
        normed, logits = normed_logits(x, weight, 1e-5, router, given)
        expected, wanted = reference.normed_logits(x, weight, 1e-5, router, given)
        eps = 2 * torch.finfo(torch.float16).eps  # a rounding or two of what is multiplied
        torch.testing.assert_close(normed, expected, rtol=eps, atol=eps)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, wanted, rtol=2e-3, atol=0.03)  # 80 products of values around 1
        exact = normed.float() @ router.data.float().T + (0 if given is None else given.float())
        torch.testing.assert_close(logits, exact, rtol=1e-5, atol=1e-5)  # of what was stored, in fp32


@pytest.mark.parametrize("device", devices())
def test_a_row_does_not_feel_how_many_there_are(device: str) -> None:
    """To the bit; also where a program has several rows, and beside a row that is no number."""
    x, weight, router, _ = operands(9, 17, device, torch.float32)
    x[0, 4] = float("nan")
    alone = [normed_logits(x[:, row : row + 1], weight, 1e-5, router, None) for row in range(9)]
    for programs in (1, 12, 1024):
        with mock.patch.object(routers, "PROGRAMS", programs):
            normed, logits = normed_logits(x, weight, 1e-5, router, None)
        for row in (0, 3, 5, 8):
            assert torch.equal(normed[:, row], alone[row][0][:, 0])
            assert torch.equal(logits[:, row], alone[row][1][:, 0])
        assert bool(logits[:, 4].isnan().all())


def test_what_does_not_fit_is_refused() -> None:
    x, weight, router, bias = operands(2, 5, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"wanted \[\.\.\., K\] and rows"):
        normed_logits(x.float(), weight, 1e-5, router, bias)
    with pytest.raises(ValueError, match="weight is float32"):
        normed_logits(x, weight[1:], 1e-5, router, bias)
    with pytest.raises(ValueError, match="bias is float16"):
        normed_logits(x, weight, 1e-5, router, bias[1:])
    normed, logits = normed_logits(x[:, :0], weight, 1e-5, router, bias)
    assert (normed.shape, logits.shape) == ((1, 0, WIDTH), (1, 0, 5))
