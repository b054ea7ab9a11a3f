"""Every launch of the packed products compiles, without a GPU, to the instructions it is meant to be made of."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.common.carveout import RESERVED
from tests.helpers.budgets import SHARED_LIMIT, fits
from tests.helpers.modules import module_output

MULTIPROCESSOR = 233_472  # bytes of shared memory that an H200's has
# bytes of a thread that may wait in memory, by kernel, architecture and where the table first reaches the launch
SPILLS = {
    ("narrow_kernel", 80, "10240x8192 norm+bias 1"): 32,
    ("narrow_kernel", 120, "10240x8192 norm+bias 1"): 40,
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_every_launch_compiles_to_what_it_is_meant_to_be(arch: int) -> None:
    reports = module_output("tests.helpers.compile_packed_linear", str(arch))
    kernels = {"ring_kernel", "given_kernel", "sum_kernel"} if arch == 90 else {"wide_kernel", "norm_kernel"}
    assert {report["kernel"] for report in reports} == kernels | {"narrow_kernel"}
    for report in reports:
        assert fits(report, arch, SPILLS.get((report["kernel"], arch, report["name"]), 0)), report
        _check_order(report, arch)
        if report["kernel"] == "given_kernel" and report["norm"]:  # few of its programs share a multiprocessor
            programs = MULTIPROCESSOR // (report["shared"] + RESERVED)
            assert programs == (3 if report["programs"] <= 264 else 6), report
        if report["kernel"] == "ring_kernel":
            # of those with fewer registers two share a multiprocessor, and no value leaves alone
            assert MULTIPROCESSOR // (report["shared"] + RESERVED) >= 1 + report["shares"], report
            assert report["waits"] == 1 + report["factors"], report  # the warp that makes factors waits for itself
            assert report["single_stores"] == 0, report
        if report["mma"] is not None:
            _check_product(report, arch)


def _check_order(report: dict[str, Any], arch: int) -> None:
    """When a kernel begins, lets the next one begin, and what it leaves for it."""
    assert report["starts_early"] == (arch >= 90), report
    # a product whose ways are left apart lets the next kernel begin behind what it asks for, all others at once
    later = report["kernel"] == "ring_kernel" and report["apart"]
    assert report["lets_next"] == ("no" if arch < 90 else "later" if later else "first"), report
    # what products and sums leave for the next kernel stays in the L2 cache; logits are too many, tokens too few
    assert report["stays"] == (report["kernel"] != "norm_kernel" and not report["last"]), report


def _check_product(report: dict[str, Any], arch: int) -> None:
    """Every weight by 16 bytes, the first ones before the wait, and nothing but weights there."""
    assert report["mma"], report
    assert report["wide_loads"] > 0, report
    assert report["narrow_loads"] == 0, report
    if arch >= 90:
        assert report["weights_before"] > 0, report
        assert report["others_before"] == 0, report
