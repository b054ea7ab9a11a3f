"""The activation that stands alone, against its definition."""

from __future__ import annotations

import pytest
import torch

from fastspec.kernels import reference
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.gelu import gelu_tanh_mul


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_its_definition(dtype: torch.dtype, device: str) -> None:
    """Large values of either sign and nothing at all among them; NaN stays where it is."""
    generator = torch.Generator().manual_seed(0)
    gate_up = 3 * torch.randn(2, 3, 2400, generator=generator)
    gate_up[0, 0, :4] = torch.tensor([0.0, 8.0, -8.0, -5.0])
    gate_up[1, 2, 5] = float("nan")
    given = gate_up.to(device, dtype)
    found, expected = gelu_tanh_mul(given), reference.gelu_tanh_mul(given)
    eps = 4 * torch.finfo(dtype).eps  # two roundings; the definition's 1 + tanh cancels, of values up to 12 times 12
    torch.testing.assert_close(found, expected, rtol=eps, atol=max(eps, 2e-5), equal_nan=True)
    assert torch.equal(gelu_tanh_mul(given[:, 1:2])[:, 0], found[:, 1])
    interleaved = given.unflatten(-1, (2, -1, 8)).transpose(-3, -2).flatten(-3)  # 8 of the gate, 8 of up
    assert torch.equal(gelu_tanh_mul(interleaved, interleaved=True).nan_to_num(), found.nan_to_num())
    assert gelu_tanh_mul(given[:0]).shape == (0, 3, 1200)
