"""Launch entries of attention, for compile_kernels: decoding, prompt chunks, rotation with K/V append."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton.experimental.gluon.language import NVMMASharedLayout

from fastspec.kernels.attention import plan, prefill, rope
from fastspec.kernels.attention.arguments import NewTokens, PagedCache, WorkArea
from fastspec.kernels.attention.combine import gather_kernel
from fastspec.kernels.attention.decode import _decode_kernel
from fastspec.kernels.attention.decode_mma import fragment_kernel
from fastspec.kernels.attention.decode_mma_batch import batch_kernel
from fastspec.kernels.attention.decode_tma_sm90 import shares_kernel
from fastspec.kernels.attention.tma_parts import WIDTH, piece_of
from tests.helpers.compile_kernels import PDL_FROM, Entry

KERNELS = {each.__name__: each for each in (fragment_kernel, batch_kernel, shares_kernel, gather_kernel)}
SMS = 132  # of the GPU that is planned for
ELEMENT = {2: "*bf16", 4: "*fp32"}
TMA_ARCH = 90  # the one whose warp groups multiply
LARGE_ON = (90, 100)  # blocks of these may have LARGE_SHARED bytes

POINTERS = {"partial_ptr": "*fp32", "position_ptr": "*i64", "scale": "fp32"}
COUNTS = ("num_queries", "num_pairs", "split_keys", "splits", "limit")
# (rows, pairs, splits) of every launch of `plan.early_plan`: few CTAs, one for each split, several splits to a
# CTA one after the other, and two at once
SHORT = (
    (8, 8, 2),
    *((8, 8, 16), (16, 192, 1), (24, 192, 1), (32, 192, 1)),
    *((8, 8, 64), (16, 192, 64), (24, 192, 64), (32, 192, 64)),
    *((8, 128, 64), (16, 64, 64), (24, 128, 64), (32, 128, 64)),
)
# (window, norm, page_size, how much narrower than a power of two)
PLAIN = (0, False, 64, 0)
FULL = (4096, True, 80, 1)


def entries(arch: int) -> Iterator[Entry]:
    """(kernel, signature, constants, options, element size) of every launch on a GPU of this architecture."""
    gpu = plan.Gpu((arch // 10, arch % 10), SMS)
    for size, block_d in plan.TILES:
        for variant in (PLAIN, FULL):
            yield from _of_heads(size, block_d, variant, arch)
    for dim in (64, 128) if arch >= PDL_FROM else ():
        for rows, pairs, splits in SHORT:
            planned = plan.early_plan(gpu, plan.Pass(rows, pairs, dim), splits)
            for variant, regroup in ((PLAIN, arch == TMA_ARCH), (FULL, False)):
                constants = {**planned.constants, "REGROUP": regroup}
                yield _entry(KERNELS[planned.kernel], 2, constants, planned.options, variant, arch)
    for dim in (64, 128) if arch == TMA_ARCH else ():
        late = [plan.late_plan(gpu, plan.Pass(4, pairs, dim), 64) for pairs in (8, 64)]
        for planned in (plan.gather_plan(plan.Pass(4, 8, dim)), *late):
            for variant in (PLAIN, FULL):
                yield _entry(KERNELS[planned.kernel], 2, planned.constants, planned.options, variant, arch)


def _of_heads(size: int, block_d: int, variant: tuple[int, bool, int, int], arch: int) -> Iterator[Entry]:
    narrow = variant[3] * block_d // 4
    planned = plan.tiles_plan(plan.Pass(4, 8, block_d - narrow), size, 2)
    yield _entry(_decode_kernel, size, planned.constants, planned.options, variant, arch)
    heads = {"HEAD_DIM": block_d - narrow, "BLOCK_D": block_d}
    yield _entry(rope._rotate_kernel, size, heads, {"num_warps": rope.NUM_WARPS}, variant, arch)
    launches = [prefill.LAUNCH[size, block_d]]
    if arch in LARGE_ON and (size, block_d) in prefill.LARGE:
        launches.append(prefill.LARGE[size, block_d])
    for launch in launches:
        tiles = {"ROWS": launch.rows, "BLOCK_N": launch.block_n, "STAGES": launch.num_stages}
        options = {"num_warps": launch.num_warps, "maxnreg": plan.MAX_REGISTERS}
        yield _entry(prefill._flash_kernel, size, {**heads, **tiles}, options, variant, arch)


def _entry(
    kernel: Any,
    size: int,
    constants: dict[str, Any],
    options: dict[str, Any],
    variant: tuple[int, bool, int, int],
    arch: int,
) -> Entry:
    window, norm, page_size, _narrow = variant
    pdl = arch >= PDL_FROM
    given = {"WINDOW": window, "PAGE_SIZE": page_size, "KV_HEADS": 8, "GROUP": 4, "PDL": pdl, **constants}
    given = {name: value for name, value in given.items() if name in kernel.arg_names}
    element, heads = ELEMENT[size], ELEMENT[size] if norm else "constexpr"
    known = {**dict.fromkeys(("out_ptr", "query_ptr"), element), **POINTERS, **dict.fromkeys(COUNTS, "i32")}
    known["tokens"] = NewTokens(element, "*i64", "*i1", "*fp32", "*fp32", heads, heads, "i32", "fp32")
    known |= {"cache": PagedCache(element, element, "*i64", "i32", "i32", "i32"), "work": WorkArea("*fp32", "*i32")}
    block = [piece_of(page_size, constants.get("KEYS", 64)), WIDTH.value]
    slots = f"tensordesc<bf16{block},{NVMMASharedLayout(128, 16, 2)!r}>"
    known |= dict.fromkeys(("key_desc", "value_desc"), slots)
    signature = {name: known[name] for name in kernel.arg_names if name not in given}
    if not norm and "tokens" in signature:
        given |= {"tokens.q_norm": None, "tokens.k_norm": None}
    if kernel is not prefill._flash_kernel:
        options = {**options, "enable_fp_fusion": False}
    return kernel, signature, given, {**options, "launch_pdl": pdl}, size
