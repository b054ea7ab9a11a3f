"""The rotation that stands alone, against its definition: to the bit, for every rounding is in it."""

from __future__ import annotations

import pytest
import torch

from fastspec.kernels import reference
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.rotate import rotate


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 64), (torch.float16, 80), (torch.bfloat16, 128)])
def test_it_is_its_definition(dtype: torch.dtype, dim: int, shared: bool, device: str) -> None:
    """Heads lie as a product leaves them; angles are of each row, or of all."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, heads, dim, generator=generator).to(device, dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn(1 if shared else 2, 3, dim, generator=generator).to(device, dtype) for _ in range(2))
    found, expected = rotate(q, k, cos, sin), reference.rotate(q, k, cos, sin)
    for ours, theirs in zip(found, expected, strict=True):
        if device == "cpu" and dtype == torch.bfloat16:  # Triton's interpreter cuts off where it should round
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.03)
        else:
            assert torch.equal(ours, theirs)
        assert ours.transpose(1, 2).is_contiguous()


def test_what_does_not_go_together_is_refused() -> None:
    q, k, angles = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 3, 8), torch.zeros(2, 3, 8)
    for bad in ((q, k[..., :6], angles, angles), (q, k.half(), angles, angles), (q, k, angles[:, :2], angles)):
        with pytest.raises(ValueError, match="of one dtype"):
            rotate(*bad)
    with pytest.raises(ValueError, match="for 2 rows"):
        rotate(q, k, angles, angles[:1])
