"""Packed codes: what comes back, what a scale keeps, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fastspec.kernels.common import code_packing
from fastspec.kernels.common.code_packing import FIELDS, can_pack_codes
from fastspec.kernels.common.codes import Codes, CodesKind
from fastspec.kernels.common.weights import Weight
from tests.helpers.packed_codes import KINDS, random_codes, stored


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_what_was_packed_comes_back(name: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_packing, "PART", 16 * 256)  # a tile at a time
    codes = random_codes(name, 272, 256)
    weight, wanted = stored(codes, gated, torch.float32), codes.dequantise(torch.float32)
    assert (weight.shape, weight.dtype, weight.format, weight.gated) == ((272, 256), torch.float32, "codes", gated)
    if name == "nvfp4":  # a scale is two numbers there, whose product is within 2^-22 of it
        torch.testing.assert_close(weight.unpack(), wanted, rtol=2.0**-21, atol=0)
    else:
        assert torch.equal(weight.unpack(), wanted)
    if not gated:
        ids = torch.tensor([[0, 271], [17, 130]])
        assert torch.equal(weight.embed(ids), weight.unpack()[ids])


@pytest.mark.parametrize("name", KINDS)
def test_new_values_of_the_same_kind_lie_where_the_old_ones_did(name: str) -> None:
    """CUDA graphs that were captured before an update read them there."""
    weight, other = stored(random_codes(name, 64, 256)), random_codes(name, 64, 256, seed=1)
    assert weight.codes is not None
    before = weight.codes.layout
    weight.fill_codes(other)
    assert weight.codes.layout == before
    assert torch.equal(weight.unpack(), stored(other).unpack())


@pytest.mark.parametrize(("old", "new"), [("int8", "int8 with -128"), ("int4 zeros", "int4"), ("int4", "int4 zeros")])
def test_values_that_need_another_form_have_another_layout(old: str, new: str) -> None:
    weight, other = stored(random_codes(old, 64, 256)), random_codes(new, 64, 256)
    assert weight.codes is not None
    before = weight.codes.layout
    weight.fill_codes(other)
    assert weight.codes.layout != before
    assert torch.equal(weight.unpack(), stored(other).unpack())


def test_every_bit_of_a_half_belongs_to_one_code() -> None:
    for form, fields in FIELDS.items():
        bits = [place + bit for code in fields for _, count, place in code for bit in range(count)]
        assert sorted(bits) == list(range(16)), form


def test_bytes_of_a_weight() -> None:
    """Codes, a factor in fp32 of each row, and scales of groups: 16 bits where these hold them, 16 for a zero point."""
    n, k = 256, 512
    groups, per_row = n * k // 128, 4 * n
    expected = {
        "fp8": n * k + per_row,
        "fp8 blocks": n * k + per_row + 8 * (n // 16) * (k // 128),
        "int8": n * k + per_row,
        "int4": n * k // 2 + per_row + 2 * groups,
        "int4 zeros": n * k // 2 + per_row + 4 * groups,
        "int4 64": n * k // 2 + per_row + 6 * 2 * groups,  # scales that no 16 bits hold stay fp32
        "mxfp4": n * k // 2 + per_row + 2 * 4 * groups,
    }
    assert {name: stored(random_codes(name, n, k)).nbytes for name in expected} == expected


def test_what_has_no_packed_form_is_refused() -> None:
    row = CodesKind("fp8", (1, 256))
    assert can_pack_codes((32, 256), row)
    for shape, kind in [
        ((24, 256), row),
        ((32, 192), CodesKind("fp8", (1, 192))),
        ((32, 256), CodesKind("fp8", (64, 64))),
        ((32, 256), CodesKind("int4", (1, 256))),
        ((32, 256), CodesKind("int4", (128, 128))),
        ((32, 256), CodesKind("fp4", (1, 64))),
    ]:
        assert not can_pack_codes(shape, kind)
        with pytest.raises(ValueError, match="no packed form"):
            Weight.empty_codes(shape, kind, False, torch.bfloat16, torch.device("cpu"))
    weight = stored(random_codes("fp8", 32, 256))
    with pytest.raises(ValueError, match="there is room for"):
        weight.fill_codes(random_codes("fp8", 48, 256))
    with pytest.raises(ValueError, match="written by `fill_codes`"):
        weight.fill(torch.zeros(32, 256))
    with pytest.raises(ValueError, match=r"make it by `Weight\.empty_codes`"):
        Weight(torch.zeros(32, 256)).fill_codes(random_codes("fp8", 32, 256))


def test_scales_of_fp4_that_no_factor_explains_are_refused() -> None:
    codes = random_codes("nvfp4", 32, 256)
    scales = codes.scales.clone()
    scales[3] = torch.rand(16, generator=torch.Generator().manual_seed(0)) + 0.1
    with pytest.raises(ValueError, match="scales of 1 rows of fp4"):
        stored(Codes(codes.kind, codes.codes, scales))


def test_rows_of_zeros_have_scales() -> None:
    for name in ("int4", "nvfp4"):
        codes = random_codes(name, 32, 256)
        zero = Codes(codes.kind, codes.codes, torch.zeros_like(codes.scales), codes.zeros)
        assert torch.equal(stored(zero).unpack(), torch.zeros(32, 256, dtype=torch.bfloat16))
