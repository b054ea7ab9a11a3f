"""Launches of products with quantised weights compile, without a GPU, to what they are meant to be made of."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from tests.helpers.budgets import fits
from tests.helpers.modules import module_output

pytestmark = pytest.mark.long

# bytes of a thread that may wait in memory, by call and architecture: with 64 rows of x faster, as measured on
# sm_90, than tiles of half the weight rows, which read x twice as often
SPILLS = {
    **{("fp8 4096 64", arch): 224 for arch in (80, 86, 89)},
    **{("fp8 4096 64", arch): 184 for arch in (100, 120)},
    ("int8 with -128 4096 4096 64", 90): 16,  # four registers' worth; not timed
}
ARCHITECTURES = [80, 90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (86, 89, 100, 120))]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kind_compiles(arch: int) -> None:
    reports = module_output("tests.helpers.compile_launches", str(arch), "quantised")
    products = [report for report in reports if report["product"]]
    assert len(products) == (13 if arch == 90 else 16)  # there, many rows have a kernel of their own
    for report in products:
        assert fits(report, arch, SPILLS.get((report["call"], arch), 0)), report
        assert report["mma"], report
        # codes by 16 bytes, the first of them before the wait
        assert report["wide_loads"] > 0, report
        assert report["narrow_loads"] == 0, report
        assert report["starts_early"] == (arch >= 90), report
        assert report["lets_next"] == ("no" if arch < 90 else "first"), report
        if arch >= 90:
            assert report["weights_before"] > 0, report


def test_the_ring_of_codes_compiles() -> None:
    reports = module_output("tests.helpers.compile_launches", "90", "quantised_wide")
    rings = [report for report in reports if report["kernel"] == "codes_tma_kernel"]
    assert len(rings) == 9
    for report in reports:
        assert fits(report, 90, SPILLS.get((report["call"], 90), 0)), report
    for report in rings:
        assert report["mma"], report
        assert report["shared"] <= 232_448, report  # of a Hopper block (CUDA programming guide)


@pytest.mark.parametrize("arch", [80, 90])
def test_values_compile(arch: int) -> None:
    reports = module_output("tests.helpers.compile_launches", str(arch), "quantised_values")
    assert {report["kernel"] for report in reports} == {"_embed_codes_kernel", "_dequantise_kernel"}
    for report in reports:
        assert fits(report, arch, 0), report
        if report["kernel"] == "_embed_codes_kernel" and arch >= 90:
            assert report["waits_first"], report  # attention reads what was fed before it waits
