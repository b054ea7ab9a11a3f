from __future__ import annotations

import pytest
import torch

from fastspec.kernels.common import rounding
from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.rounding import FORMATS, kind_for, rounded


@pytest.mark.parametrize("form", FORMATS)
def test_no_other_scale_of_those_tried_fits_better(form: str) -> None:
    """The error of each group is at most that of the scale that reaches the largest magnitude."""
    torch.manual_seed(0)
    values = torch.randn(48, 256) * torch.logspace(-3, 2, 48)[:, None]
    kind = kind_for(form, (48, 256))
    codes = rounded(values, kind)
    assert codes.kind == kind
    groups = values.unflatten(1, (-1, kind.block[1]))
    largest = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[form]
    plain = (groups.abs().amax(-1) / largest).bfloat16().float()[..., None]
    near = groups / plain
    if form == "fp8":
        near = near.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    else:
        near = near.round().clamp(*{"int8": (-127, 127), "int4": (-8, 7)}[form])
    unsearched = ((near * plain) - groups).square().sum(-1)
    found = (codes.dequantise(torch.float32) - values).unflatten(1, (-1, kind.block[1])).square().sum(-1)
    assert bool((found <= unsearched * (1 + 1e-6)).all())  # sums of up to 256 squares in two orders: 256 * 2^-24 < 2e-5
    if form == "int4":
        assert float(found.sum() / unsearched.sum()) < 0.95  # of Gaussian values in groups of 128 a smaller scale wins


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_representable_stays_as_it_is(form: str) -> None:
    kind = kind_for(form, (16, 128))
    first = rounded(torch.randn(16, 128), kind).dequantise(torch.float32)
    again = rounded(first, kind).dequantise(torch.float32)
    error = (again - first).abs().amax()
    assert float(error) <= float(first.abs().amax()) * {"fp8": 2**-4, "int8": 1 / 127, "int4": 1 / 7}[form]
    assert torch.equal(rounded(torch.zeros(16, 128), kind).dequantise(torch.float32), torch.zeros(16, 128))
    exact = torch.full((16, 128), 0.5)
    exact[:, 0] = 3.5 if form == "int4" else 63.5 if form == "int8" else 224.0
    assert torch.equal(rounded(exact, kind).dequantise(torch.float32), exact)


@pytest.mark.parametrize("form", FORMATS)
def test_scales_do_not_depend_on_the_order_of_values(form: str) -> None:
    """Sums of squares are exact: so kernels, which add up in another order, choose the same scales."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 128, generator=generator)
    order = torch.randperm(128, generator=generator)
    kind = kind_for(form, (64, 128))
    one, other = rounded(values, kind), rounded(values[:, order], kind)
    assert torch.equal(one.scales, other.scales)
    assert torch.equal(one.codes[:, order], other.codes)


@pytest.mark.parametrize("form", FORMATS)
def test_squares_are_counted_in_whole_numbers_of_fp32(form: str) -> None:
    """The largest square that there can be is below 2^23 steps, and values as large as all others are not cut off."""
    furthest = rounding.LARGEST[form] * (1 / (min(rounding.SHRINK) * (1 - 2**-8)) - 1)
    assert furthest**2 * rounding.STEPS[form] < 2**23
    values = torch.randn(16, 128).sign()
    codes = rounded(values, kind_for(form, (16, 128)))
    assert bool(((codes.dequantise(torch.float32) - values).abs() < 2**-8).all())


@pytest.mark.parametrize("nothing", [0.0, 1e-39])
def test_a_group_of_zeros_leaves_scales_in_16_bits(nothing: float) -> None:
    """Beside weights as small as models have; what is smaller than any 16-bit scale counts as zero."""
    values = torch.randn(16, 256) * 1e-3
    values[3, :128] = nothing
    kind = kind_for("int4", (16, 256))
    place = PackedCodes.empty((16, 256), kind, False, torch.device("cpu"))
    planned = place.nbytes
    place.fill_rounded([(0, values)], rounding.pack_rounded)
    assert place.scales is not None
    assert place.scales.dtype == torch.int32
    assert place.nbytes == planned
    assert torch.equal(place.dequantise(torch.float32), rounded(values, kind).dequantise(torch.float32))
    assert not place.dequantise(torch.float32)[3, :128].any()


def test_slices_do_not_change_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(40, 64)
    whole = rounded(values, CodesKind("int4", (1, 32)))
    monkeypatch.setattr("fastspec.kernels.common.rounding.VALUES", 3 * 64)
    parts = rounded(values, CodesKind("int4", (1, 32)))
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)


def test_groups_of_int4_divide_k() -> None:
    kinds = [kind_for("int4", (8, columns)) for columns in (256, 192, 96, 40)]
    assert [kind and kind.block[1] for kind in kinds] == [128, 64, 32, None]
