"""Every launch of the packed products compiles, without a GPU, to the instructions it is meant to be made of."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.common.carveout import RESERVED
from tests.helpers.budgets import SHARED_LIMIT, fits
from tests.helpers.modules import module_output

pytestmark = pytest.mark.long

MULTIPROCESSOR = 233_472  # bytes of shared memory that an H200's has
# bytes of a thread that may wait in memory, by kernel, architecture and where the table first reaches the launch
SPILLS = {
    ("few_rows_kernel", 80, "10240x8192 norm+bias 1"): 32,
    ("few_rows_kernel", 120, "10240x8192 norm+bias 1"): 40,
}


LAYERS = [f"products_{first}" for first in range(0, 15, 3)]
AS_80 = 86  # launches what sm_80 does, but for what a test below compiles
PRODUCTS = (*LAYERS, "products_fp16")
OF_HOPPER = ("tails_4096", "tails_2048", "tails_896", "products_trees")
# compile whole every day, and of the others those that have a tile of their own or do something else with sums
DAILY = {80: ("products_0",), 90: ("products_0", "tails_4096"), 100: ("products_0",)}
CASES = [
    pytest.param(arch, group, marks=[] if group in DAILY.get(arch, ()) else [pytest.mark.slow])
    for arch in SHARED_LIMIT
    for group in (*PRODUCTS, *(OF_HOPPER if arch == 90 else ()))
]


@pytest.mark.parametrize(("arch", "group"), CASES)
def test_every_launch_compiles_to_what_it_is_meant_to_be(arch: int, group: str) -> None:
    _check(module_output("tests.helpers.compile_launches", str(arch), group), arch)


def test_every_tile_compiles_to_what_it_is_meant_to_be() -> None:
    others = [group for group in (*PRODUCTS, *OF_HOPPER) if group not in DAILY[90]]
    given = ",".join(others), "--sample", ",".join(DAILY[90])
    _check(module_output("tests.helpers.compile_launches", "90", *given), 90)


@pytest.mark.slow
def test_what_one_architecture_launches_beside_another_compiles() -> None:
    _check(module_output("tests.helpers.compile_launches", str(AS_80), ",".join(PRODUCTS), "80"), AS_80)


def _check(reports: list[dict[str, Any]], arch: int) -> None:
    kernels = {"tma_kernel", "regroup_kernel", "sum_kernel"} if arch == 90 else {"many_rows_kernel", "norm_kernel"}
    assert {report["kernel"] for report in reports} <= kernels | {"few_rows_kernel"}
    assert any(report["product"] for report in reports)
    for report in reports:
        assert fits(report, arch, SPILLS.get((report["kernel"], arch, report["call"]), 0)), report
        _check_order(report, arch)
        if report["kernel"] == "regroup_kernel" and report["norm"]:  # few of its programs share a multiprocessor
            programs = MULTIPROCESSOR // (report["shared"] + RESERVED)
            assert programs == (3 if report["programs"] <= 264 else 6), report
        if report["kernel"] == "tma_kernel":
            # of those with fewer registers two share a multiprocessor, and no value leaves alone
            shares = report["registers"] is not None
            assert MULTIPROCESSOR // (report["shared"] + RESERVED) >= 1 + shares, report
            assert report["waits"] == 1 + report["factors"], report  # the warp that makes factors waits for itself
            assert report["single_stores"] == 0, report
        if report["product"]:
            _check_product(report, arch)


def _check_order(report: dict[str, Any], arch: int) -> None:
    """When a kernel begins, lets the next one begin, and what it leaves for it."""
    assert report["starts_early"] == (arch >= 90), report
    # a product whose ways are left apart lets the next kernel begin behind what it asks for, all others at once
    later = report["kernel"] == "tma_kernel" and report["apart"]
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
