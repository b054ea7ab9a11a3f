"""Every kernel at every launch entry compiles to machine code for the GPUs named here, without one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

from tests.helpers.budgets import fits
from tests.helpers.modules import module_output

pytestmark = pytest.mark.long

ARCHITECTURES = [80, 90, 100]
EVERY_DAY = 90
AS_80 = 86  # launches what sm_80 does, but for what a test below compiles
AS_86 = 89  # launches what sm_86 does, as another has it

# bytes of a thread that may wait in memory, by (kernel, registers): measured faster than fewer programs on a
# multiprocessor, or, for what runs once and waits for its instructions, than fewer threads
SPILLS = {
    ("_delta_kernel", None): 320,  # of fp32, where it is not timed; up to 80 in 16 bits
    ("_prepare_kernel", None): 80,  # of fp32, on sm_80; not timed
    ("solve_kernel", None): 1760,  # what is multiplied lies in registers, by halves; 1080 where it was timed
    ("_scan_kernel", None): 32,
    ("fragment_kernel", 168): 16,  # on sm_100, 8 on sm_90: not timed there
    ("fragment_kernel", 255): 16,
    ("batch_kernel", 168): 24,
    ("batch_kernel", 255): 48,  # three groups, two splits at once, on sm_100; 40 on sm_90
    ("shares_kernel", 128): 112,  # of heads of 64; 96 without a window: with one not timed
    ("_flash_kernel", 255): 56,  # heads of 96 and 128
    ("chunk_kernel", 168): 232,  # heads of 256 with a window, 168 without; of 128 112 and 8; outside of the loops
    ("chunk_kernel", 240): 72,  # heads of 256
    ("_look_up_kernel", None): 16,  # of 16 warps: faster than 8 without
    ("_groups_kernel", 80): 16,
    ("_groups_kernel", None): 32,
    ("_distribution_kernel", None): 72,
    ("_distribution_kernel", 64): 376,
}
# the delta rule with a decay of each element of a key, by kernel and bytes of an element: not timed
CHANNELS_SPILLS = {("_delta_kernel", 4): 560, ("_scan_kernel", 2): 72}
# three groups of query rows, heads of 128, norms, and pages of no multiple of 32 keys, each of which is looked up then
UNEVEN_PAGES_SPILL = 64
# a softcap, heads of 64, four groups of query rows, on sm_100; 24 on sm_90
SOFTCAP_SPILL = 32
# long rows over K and V in 8 bits, heads of 64, with a window; so that two programs share a multiprocessor
NARROW_SPILL = 192
# heads of 512 in fp32, multiplied without tensor cores: not timed
WIDE_HEAD_SPILL = 360
# of products whose K leaves single elements, so that every load is masked: by kernel, what is fused, rows of x and of
# the weight in a tile
RAGGED_SPILLS = {
    ("tile_kernel", "gated+norm", 8, 16): 16,
    ("tile_kernel", "gated+norm", 8, 32): 96,
    ("tile_kernel", "gated+norm", 16, 32): 288,
    ("tile_argmax_kernel", "", 8, 32): 136,
}
ATTENTION = {"_decode_kernel", "_flash_kernel", "fragment_kernel", "batch_kernel", "shares_kernel", "chunk_kernel"}
PRODUCTS = {"tile_kernel", "tile_argmax_kernel", "_prefill_kernel"}  # that read by 16 bytes where K lets them
OF_EXPERTS = {"expert_kernel"}  # as these


GROUPS = (
    *("short_64", "short_128", "short_64_full", "short_128_full"),  # the longest first
    *("sampled_32000", "sampled_128256", "sampled_256000", "sampled_otherwise"),
    *("attention_16_bits", "attention_32_bits", "attention_long", "attention_prompt"),
    *("attention_ruled", "attention_cached_in_8_bits", "recurrent", "experts"),
    *("portable_whole", "portable_pieces", "portable_single", "prompts", "steps"),
)


# launches of kernels that other groups launch with other options or sizes, or that no measured path of sm_90 takes
ALIKE = {
    *("sampled_128256", "sampled_256000", "short_64_full", "short_128_full"),
    *("attention_32_bits", "attention_cached_in_8_bits"),
}


def _late(group: str) -> bool:
    """Whether kernels are there from sm_90 on: those for short caches, and of e4m3."""
    return group.startswith("short") or group == "attention_cached_in_8_bits"


def _daily(arch: int, group: str) -> bool:
    """True if every launch of the group compiles every day, else one of each kernel does."""
    return arch == EVERY_DAY and group not in ALIKE


def _groups(arch: int) -> list[str]:
    """The groups that launch anything there."""
    return [group for group in GROUPS if not _late(group) or arch in {90, 100}]


CASES: list[Any] = [
    pytest.param(arch, group, marks=[] if _daily(arch, group) else [pytest.mark.slow])
    for arch in (*ARCHITECTURES, AS_80, AS_86)
    for group in _groups(arch)
]


@pytest.mark.parametrize(("arch", "group"), CASES)
def test_every_group_of_kernels_compiles_for_every_gpu(arch: int, group: str) -> None:
    reports = module_output("tests.helpers.compile_launches", str(arch), group)
    assert len(reports) >= 2
    if group == "portable_whole":
        _check_order_of_sums(reports)
    if group == "experts":
        orders = {tuple(report["order"]) for report in reports if report["order"] is not None}
        assert orders == {("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",)}  # whatever the tile
    if group == "recurrent":
        _check_order_of_keys(reports)
    _check(reports, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_one_launch_of_each_kernel_compiles(arch: int) -> None:
    """Every day, of the groups that do not compile whole."""
    whole = [group for group in GROUPS if _daily(arch, group)]
    others = [group for group in _groups(arch) if group not in whole]
    beside = [",".join(whole)] if whole else []
    reports = module_output("tests.helpers.compile_launches", str(arch), ",".join(others), "--sample", *beside)
    assert reports
    _check(reports, arch)


def _check(reports: list[dict[str, Any]], arch: int) -> None:
    for report in reports:
        kernel, k = report["kernel"], report["constants"].get("K", 0)
        assert fits(report, arch, _spills(report)), report
        if kernel in ATTENTION | PRODUCTS | OF_EXPERTS and report["element"] == 2:
            assert report["mma"], report  # the tensor cores are used
        if report["element"] == 4:
            assert not report["tf32"], report  # fp32 products are IEEE's
        if kernel == "_embed_kernel" and arch >= 90:
            assert report["waits_first"], report  # attention reads what was fed before it waits
        if kernel in PRODUCTS | OF_EXPERTS and k % 8 == 0:
            assert report["vector"], report  # 16 bytes at a time
        if kernel == "_hopper_kernel":
            assert report["shared"] <= 232_448, report  # of a Hopper block (CUDA programming guide)
            assert report["mma"], report  # whole warp groups multiply
            # results leave 16 bytes at a time, sums of parts of K as threads have them
            assert report["vector"] or report["constants"]["PARTS"] > 1, report


@pytest.mark.slow
def test_what_one_architecture_launches_beside_another_compiles() -> None:
    reports = module_output("tests.helpers.compile_launches", str(AS_80), ",".join(GROUPS), "80")
    assert {report["kernel"] for report in reports} == {"_prefill_kernel"}  # which has less shared memory there
    _check(reports, AS_80)


def test_one_architecture_launches_what_another_does() -> None:
    reports = module_output("tests.helpers.launches", "86", str(AS_86), "90")
    same, found, other = (report["launches"] for report in reports)
    assert same == found != other


def _check_order_of_sums(reports: list[dict[str, Any]]) -> None:
    """What row invariance stands on, where no test of bits can run: one instruction, or one layout, of every tile."""
    products = [report for report in reports if report["order"] is not None]
    for element, rows in ((2, {8, 16, 32, 64}), (4, {1, 2, 4, 8})):
        of_element = [report for report in products if report["element"] == element]
        assert {report["constants"]["ROWS"] for report in of_element} == rows
        (order,) = {tuple(report["order"]) for report in of_element}
        assert len(order) == 1, order
    (instruction,) = {report["order"][0] for report in products if report["element"] == 2}
    assert instruction == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _check_order_of_keys(reports: list[dict[str, Any]]) -> None:
    """A plain step and one with drafts, one row and several: lanes have the same elements of a key, in one warp."""
    steps = [report for report in reports if report["kernel"] == "_delta_kernel"]
    assert {report["constants"]["TOKENS"] for report in steps} == {2, 8}
    for element, order in ((2, "8 16 1"), (4, "4 32 1")):
        assert {tuple(report["order"]) for report in steps if report["element"] == element} == {(order,)}


def _spills(report: dict[str, Any]) -> int:
    kernel, constants = report["kernel"], report["constants"]  # with None for tensors that are not there
    if kernel.startswith("tile_") and constants["K"] % 8:
        fused = ["gated"] * constants.get("GATED", False) + ["norm"] * ("gamma_ptr" not in constants)
        return RAGGED_SPILLS.get((kernel, "+".join(fused), constants["ROWS"], constants["BLOCK_N"]), 0)
    if kernel == "batch_kernel" and constants["PAGE_SIZE"] % 32 and (constants["G"], constants["D"]) == (3, 128):
        return UNEVEN_PAGES_SPILL
    if kernel == "batch_kernel" and "cap" not in constants and constants["D"] == 64:
        return SOFTCAP_SPILL
    if kernel == "shares_kernel" and report["element"] == 1:
        return NARROW_SPILL
    if kernel == "_decode_kernel" and constants["BLOCK_D"] == 512 and report["element"] == 4:
        return WIDE_HEAD_SPILL
    if constants.get("DECAY", "head") != "head" and (kernel, report["element"]) in CHANNELS_SPILLS:
        return CHANNELS_SPILLS[kernel, report["element"]]
    return SPILLS.get((kernel, report["registers"]), 0)


@pytest.mark.slow
def test_plain_kernels_compile_for_amd() -> None:
    reports = module_output("tests.helpers.compile_for_amd")
    assert {report["kernel"] for report in reports} > {"_decode_kernel", "_flash_kernel", "_verify_kernel", *PRODUCTS}
    for report in reports:
        assert report["compiled"], report
        assert report["shared"] <= 65_536, report  # of a workgroup (CDNA 3 instruction set architecture, LDS)
