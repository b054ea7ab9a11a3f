from __future__ import annotations

import pytest
import torch

from fastspec.kernels.common.codes import E2M1, Codes, CodesKind, join


def made(kind: CodesKind, shape: tuple[int, int]) -> Codes:
    top = 16 if kind.format in ("int4", "fp4") else 127  # 127: no NaN of e4m3
    codes = torch.randint(top, shape, dtype=torch.uint8)
    scales = torch.rand(kind.scales_shape(shape)) + 0.5
    zeros = torch.randint(16, kind.scales_shape(shape), dtype=torch.uint8) if kind.format == "int4" else None
    return Codes(kind, codes, scales, zeros)


def number(kind: str, code: int) -> float:
    if kind == "int8":
        return float(code - 256 if code > 127 else code)
    if kind == "int4":
        return float(code)
    if kind == "fp4":
        return (-1) ** (code >> 3) * E2M1[code & 7]
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 0:
        return (-1) ** sign * mantissa / 8 * 2.0**-6
    return (-1) ** sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "fp4"])
def test_every_code_has_the_value_of_its_format(kind: str) -> None:
    top = 16 if kind in ("int4", "fp4") else 256
    codes = torch.arange(top, dtype=torch.uint8)[None]
    zeros = torch.tensor([[3]], dtype=torch.uint8) if kind == "int4" else None
    values = Codes(CodesKind(kind, (1, top)), codes, torch.tensor([[0.25]]), zeros).dequantise(torch.float32)
    wanted = [0.25 * (number(kind, code) - (3 if kind == "int4" else 0)) for code in range(top)]
    nan = {0x7F, 0xFF} if kind == "fp8" else set()
    assert [value for at, value in enumerate(values[0].tolist()) if at not in nan] == [
        value for at, value in enumerate(wanted) if at not in nan
    ]


@pytest.mark.parametrize("block", [(1, 24), (1, 8), (1, 7), (4, 8), (3, 7)])
def test_a_block_shares_its_scale_and_edge_blocks_are_cut(block: tuple[int, int]) -> None:
    codes = made(CodesKind("int8", block), (10, 24))
    values, signed = codes.dequantise(torch.float32), codes.codes.view(torch.int8)
    for n in range(10):
        for k in range(24):
            assert values[n, k] == signed[n, k].float() * codes.scales[n // block[0], k // block[1]]
    assert torch.equal(codes.by_rows().dequantise(torch.float32), values)


def test_fp4_is_fp32_whatever_the_callers_default() -> None:
    codes = made(CodesKind("fp4", (1, 8)), (6, 16))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert codes.decoded().dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_values_are_rounded_once() -> None:
    codes = made(CodesKind("int4", (1, 8)), (6, 16))
    wide = codes.dequantise(torch.float64)
    assert torch.equal(codes.dequantise(torch.bfloat16), wide.to(torch.bfloat16))


@pytest.mark.parametrize("rows", [(8, 4, 4), (8, 6, 4), (6, 8, 4), (8, 4, 6)])
def test_joined_matrices_keep_their_values(rows: tuple[int, ...]) -> None:
    parts = [made(CodesKind("fp8", (4, 8)), (each, 16)) for each in rows]
    joined = join(parts)
    assert torch.equal(joined.dequantise(torch.float32), torch.cat([each.dequantise(torch.float32) for each in parts]))
    assert joined.kind.block[0] == (4 if all(each % 4 == 0 for each in rows[:-1]) else 1)


def test_parts_of_other_formats_are_not_joined() -> None:
    with pytest.raises(ValueError, match="one format"):
        join([made(CodesKind("fp8", (1, 8)), (4, 16)), made(CodesKind("int8", (1, 8)), (4, 16))])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codes": torch.zeros(4, 16)}, "wanted uint8"),
        ({"scales": torch.zeros(4, 3)}, "wants"),
        ({"zeros": None}, "has zero points"),
        ({"zeros": torch.zeros(4, 3, dtype=torch.uint8)}, "zeros are"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, object], said: str) -> None:
    codes = made(CodesKind("int4", (1, 8)), (4, 16))
    given = {"codes": codes.codes, "scales": codes.scales, "zeros": codes.zeros, **change}
    with pytest.raises(ValueError, match=said):
        Codes(codes.kind, **given)
