"""Rounding in one launch, against its definition."""

from __future__ import annotations

import pytest
import torch

from fastspec.kernels.common import rounding
from fastspec.kernels.common.codes import CodesKind
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.round_codes import rounded


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        CodesKind("int4", (1, 32)),
        CodesKind("int4", (1, 128)),
        CodesKind("int8", (1, 256)),
        CodesKind("fp8", (1, 256)),
    ],
    ids=str,
)
def test_it_is_its_definition(kind: CodesKind, dtype: torch.dtype, device: str) -> None:
    """Of rows of all sizes, one of zeros, one with an outlier and one of tiny values among them."""
    generator = torch.Generator().manual_seed(0)
    width = 256
    values = torch.randn(11, width, generator=generator) * torch.logspace(-6, 3, 11)[:, None]
    values[3], values[5, 7], values[9] = 0.0, 40.0, 1e-36
    given = values.to(device, dtype)
    found, wanted = rounded(given, kind), rounding.rounded(given, kind)
    same = found.scales == wanted.scales
    # two scales may be as good but for the order of the sum of squares
    assert same.float().mean() > 0.97
    where = same.repeat_interleave(kind.block[1], 1)
    assert torch.equal(found.codes[where], wanted.codes[where])
    exact = given.float()
    errors = [(each.dequantise(torch.float32) - exact).unflatten(1, (-1, kind.block[1])) for each in (found, wanted)]
    squares = [each.double().square().sum(-1) for each in errors]
    assert bool((squares[0] <= squares[1] * (1 + 1e-5)).all())
    assert (found.zeros is None) == (wanted.zeros is None)
    again = rounded(given, kind)
    assert torch.equal(again.codes, found.codes)
    assert torch.equal(again.scales, found.scales)
