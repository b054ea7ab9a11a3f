"""Every launch entry of attention: decoding, prompt chunks, rotation with K/V append."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastspec.kernels import attend, paged_attention, rope

Entry = tuple[Any, dict[str, str], dict[str, Any], dict[str, int], int]
ELEMENT = {2: "*bf16", 4: "*fp32"}
QKV = ("qkv_ptr", "q_norm_ptr", "k_norm_ptr", "key_ptr", "value_ptr", "out_ptr")
TABLES = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "table_ptr": "*i64", "position_ptr": "*i64", "write_ptr": "*i1"}
COUNTS = ("num_queries", "split_keys", "limit", "table_stride", "table_width", "num_pages", "num_angles")
SCALARS = {**dict.fromkeys(COUNTS, "i32"), "scale": "fp32", "eps": "fp32"}


def entries(arch: int = 80) -> Iterator[Entry]:
    """(kernel, signature, constants, options, element size) of every launch on a GPU of this architecture."""
    pdl = arch >= 90
    for (size, block_d), entry in attend.LAUNCH.items():
        for window, norm, page_size, narrow in ((0, False, 64, 0), (4096, True, 16, 0), (0, True, 80, block_d // 4)):
            shape = {
                "KV_HEADS": 8,
                "GROUP": 4,
                "HEAD_DIM": block_d - narrow,
                "BLOCK_D": block_d,
                "PAGE_SIZE": page_size,
            }
            flags = {"WINDOW": window, "NORM": norm, "PDL": pdl}
            yield _decode(size, entry, {**shape, **flags})
            for flash in _flash_launches(size, block_d, arch):
                yield _flash(size, flash, {**shape, "WINDOW": window, "PDL": pdl})
            if entry is attend.LAUNCH[size, block_d]:
                yield _rotate(size, {**shape, "NORM": norm, "PDL": pdl})


def _flash_launches(size: int, block_d: int, arch: int) -> list[paged_attention.Launch]:
    large = paged_attention.LARGE.get((size, block_d))
    small = [paged_attention.LAUNCH[size, block_d]]
    return [*small, large] if large and arch in (90, 100) else small


def _tiles(entry: paged_attention.Launch, **more: int) -> dict[str, int]:
    return {"ROWS": entry.rows, "BLOCK_N": entry.block_n, **more}


def _signature(kernel: Any, size: int, constants: dict[str, Any], extra: dict[str, str]) -> dict[str, str]:
    known = {**dict.fromkeys(QKV, ELEMENT[size]), **TABLES, **SCALARS, **extra}
    return {name: known[name] for name in kernel.arg_names if name not in constants}


def _entry(kernel: Any, size: int, constants: dict[str, Any], extra: dict[str, str], options: dict[str, Any]) -> Entry:
    if not constants.get("NORM", True):
        constants = {**constants, "q_norm_ptr": None, "k_norm_ptr": None}
    return kernel, _signature(kernel, size, constants, extra), constants, options, size


def _decode(size: int, entry: paged_attention.Launch, shape: dict[str, Any]) -> Entry:
    extra = {"partial_ptr": "*fp32", "count_ptr": "*i32"}
    options = {"num_warps": entry.num_warps, "enable_fp_fusion": False}
    return _entry(attend._decode_kernel, size, {**shape, **_tiles(entry, STAGES=entry.num_stages)}, extra, options)


def _flash(size: int, entry: paged_attention.Launch, shape: dict[str, Any]) -> Entry:
    extra = {"query_ptr": ELEMENT[size]}
    options = {"num_warps": entry.num_warps}
    shape = {**shape, **_tiles(entry, STAGES=entry.num_stages)}
    return _entry(paged_attention._flash_kernel, size, shape, extra, options)


def _rotate(size: int, shape: dict[str, Any]) -> Entry:
    options = {"num_warps": rope.NUM_WARPS, "enable_fp_fusion": False}
    shape = {name: value for name, value in shape.items() if name != "WINDOW"}
    return _entry(rope._rotate_kernel, size, shape, {}, options)
