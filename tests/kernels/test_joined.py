"""An embedding and a hidden state, normed, side by side: as the kernels that stand alone make them, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.weights import Weight
from tests.helpers.devices import devices
from tests.helpers.packed_codes import on_device, random_codes, stored
from tests.kernels.test_embed import packed, table

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.embed import embed
from fastspec.kernels.joined import joined_norms
from fastspec.kernels.norm import norm

BF16, F32 = torch.bfloat16, torch.float32
CASES = [(64, F32, F32), (96, BF16, BF16), (2048, BF16, F32), (160, torch.float16, torch.float16)]


def inputs(width: int, dtype: torch.dtype, gamma: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Any]:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(2, 3, width, generator=generator).to(dtype).to(device)
    norms = [(1 + 0.3 * torch.randn(width, generator=generator)).to(gamma).to(device) for _ in range(2)]
    ids = torch.tensor([[0, 47, 17], [16, -1, 99]], device=device)  # the last two are clamped
    return table(48, width, dtype, device), ids, x, tuple(norms)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("x_first", [False, True])
@pytest.mark.parametrize(("width", "dtype", "gamma"), CASES)
def test_it_is_what_four_kernels_make(
    width: int, dtype: torch.dtype, gamma: torch.dtype, x_first: bool, device: str
) -> None:
    rows, ids, x, norms = inputs(width, dtype, gamma, device)
    for plain in (Weight(rows), packed(rows)):
        found = joined_norms(plain, ids, x, norms, 1e-5, x_first=x_first)
        parts = norm(embed(plain, ids), norms[0], 1e-5), norm(x, norms[1], 1e-5)
        assert torch.equal(found, torch.cat(parts[::-1] if x_first else parts, -1))
        expected = reference.joined_norms(plain, ids, x, norms, 1e-5, x_first=x_first)
        # sums in another order: a rounding or two of x's dtype
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


def test_what_it_cannot_read_is_refused() -> None:
    rows, ids, x, norms = inputs(64, F32, F32, "cpu")
    for change, said in (
        ({"x": x[..., :32]}, "x is"),
        ({"x": x.bfloat16()}, "wanted a contiguous embedding without quantisation"),
        ({"ids": ids.int()}, "ids is"),
        ({"norms": (norms[0], norms[1][:32])}, "norm is"),
    ):
        given = {"table": Weight(rows), "ids": ids, "x": x, "norms": norms, "eps": 1e-5, **change}
        with pytest.raises(ValueError, match=said):
            joined_norms(**given, x_first=False)


@pytest.mark.parametrize("device", devices())
def test_a_quantised_table_is_read_by_its_own_kernel(device: str) -> None:
    from fastspec.kernels.triton_ops import TRITON_OPS

    _, ids, x, norms = inputs(128, BF16, BF16, device)
    quantised = stored(on_device(random_codes("int8", 48, 128), device))
    found = TRITON_OPS.joined_norms(quantised, ids, x, norms, 1e-5)
    parts = norm(embed(quantised, ids), norms[0], 1e-5), norm(x, norms[1], 1e-5)
    assert torch.equal(found, torch.cat(parts, -1))
