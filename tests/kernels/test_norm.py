"""The norm that stands alone: RMSNorm and LayerNorm, rounded first or last; no row depends on its neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastspec.kernels import reference
from tests.helpers.devices import devices

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.norm import MAX_WIDTH, add_norm, norm

BF16, F32 = torch.bfloat16, torch.float32
# width, dtype of x and of the weight, bias, centred
CASES = [
    (64, F32, F32, False, False),
    (96, BF16, BF16, False, False),
    (2048, BF16, F32, False, False),
    (300, torch.float16, F32, True, True),
    (5000, F32, F32, False, True),
]


def inputs(width: int, dtype: torch.dtype, weight: torch.dtype, biased: bool, device: str) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(2, 3, width, generator=generator) * 2 + 1  # a mean that centring takes off
    gamma, beta = (1 + 0.3 * torch.randn(width, generator=generator) for _ in range(2))
    return [x.to(dtype).to(device), gamma.to(weight).to(device), beta.to(weight).to(device) if biased else None]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("width", "dtype", "weight", "biased", "centred"), CASES)
def test_it_is_its_definition(
    width: int, dtype: torch.dtype, weight: torch.dtype, biased: bool, centred: bool, device: str
) -> None:
    x, gamma, beta = inputs(width, dtype, weight, biased, device)
    assert x is not None
    assert gamma is not None
    found = norm(x, gamma, 1e-5, bias=beta, centred=centred)
    expected = reference.norm(x, gamma, 1e-5, bias=beta, centred=centred)
    # sums in another order: a rounding or two of x's dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    assert found.dtype is dtype
    alone = torch.cat(
        [norm(row[None].contiguous(), gamma, 1e-5, bias=beta, centred=centred) for row in x.flatten(0, 1)]
    )
    assert torch.equal(found.flatten(0, 1), alone)


@pytest.mark.parametrize("device", devices())
def test_the_last_position_of_several(device: str) -> None:
    """As a draft asks for it, whose first pass has two positions: a view with rows between its rows."""
    x, gamma, _ = inputs(96, BF16, F32, False, device)
    assert x is not None
    assert gamma is not None
    assert not x[:, -1].is_contiguous()
    assert torch.equal(norm(x[:, -1], gamma, 1e-5), norm(x, gamma, 1e-5)[:, -1])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("dtype", "weight"), [(F32, F32), (BF16, BF16), (BF16, F32)])
def test_two_norms_and_a_sum_are_those_one_by_one(dtype: torch.dtype, weight: torch.dtype, device: str) -> None:
    """To the bit: the kernels sum a row in the same order. Only the interpreter rounds bf16 otherwise than torch."""
    added, first, _ = inputs(300, dtype, weight, False, device)
    assert added is not None
    assert first is not None
    x, second = added.flip(0), first.flip(0)
    total, following = add_norm(added, x, first, second, 1e-5)
    assert following is not None
    if device == "cuda" or dtype == F32:
        assert torch.equal(total, x + norm(added, first, 1e-5))
        assert torch.equal(following, norm(total, second, 1e-5))
    alone, nothing = add_norm(added[1:, 1:2], x[1:, 1:2], first, None, 1e-5)
    assert torch.equal(alone[0, 0], total[1, 1])
    assert nothing is None
    expected = reference.add_norm(added, x, first, second, 1e-5)
    eps = 4 * torch.finfo(dtype).eps  # up to four roundings of what is about 1
    torch.testing.assert_close((total, following), expected, rtol=eps, atol=eps)
    for bad in ((added, x[:1], first, None), (added, x, first[1:], None), (added, x, first, second[1:])):
        with pytest.raises(ValueError, match="wanted"):
            add_norm(*bad, 1e-5)


def test_the_definition_is_that_of_torch_and_of_llama() -> None:
    x, gamma, beta = inputs(96, BF16, F32, True, "cpu")
    assert x is not None
    assert gamma is not None
    assert beta is not None
    expected = torch.nn.functional.layer_norm(x.float(), (96,), gamma, beta, 1e-5).to(BF16)
    torch.testing.assert_close(reference.norm(x, gamma, 1e-5, bias=beta, centred=True), expected, rtol=2**-7, atol=0.0)
    same = gamma.to(BF16)
    assert torch.equal(reference.norm(x, same, 1e-5), reference.rms_norm(x, same, 1e-5))
    assert not torch.equal(reference.norm(x, same.float(), 1e-5), reference.rms_norm(x, same, 1e-5)), "rounded once"


def test_what_it_cannot_take_is_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.ones(8)
    wide = torch.zeros(1, MAX_WIDTH + 1), torch.ones(MAX_WIDTH + 1)
    for bad in ((x, torch.ones(16)[::2]), (x, torch.ones(7)), wide):
        with pytest.raises(ValueError, match="and contiguous"):
            norm(*bad, 1e-5)
    with pytest.raises(ValueError, match="bias is"):
        norm(x, weight, 1e-5, bias=torch.ones(8, dtype=BF16))
