"""Decoding passes over caches that are not long: which of two kernels runs, and how; all give a row the same bits."""

from __future__ import annotations

from typing import Any

import triton

from fastspec.kernels.attend_batch import batch_kernel
from fastspec.kernels.attend_fragment_layouts import PARTS
from fastspec.kernels.attend_fragment_parts import KEYS
from fastspec.kernels.attend_fragments import fragment_kernel
from fastspec.kernels.attend_long import groups_of
from fastspec.kernels.paged_attention import MAX_REGISTERS

__all__ = ["batch_kernel", "fragment_kernel", "short_launch"]

REGISTERS = {64: 168, 128: MAX_REGISTERS}  # by head_dim, of a program: three or two of them share a multiprocessor
GROUPS = 4  # of 8 query rows in a program at most
MULTIPROCESSORS = 132  # of the H200 on which these were measured (perf/results/tried.jsonl)
# up to so many programs have two warps for each part, and a multiprocessor to themselves: what starts early beside
# fewer threads slows them down
ALONE_PROGRAMS = MULTIPROCESSORS // 2
# up to so many, groups of 8 rows to themselves are faster than reading K and V once; not so where as many programs as
# ENOUGH_PROGRAMS read them once
FEW_PROGRAMS, ENOUGH_PROGRAMS = 512, 256
# by head_dim: tiles from which on programs take several splits, in rooms of up to ROOMY splits and in larger ones
BATCH_TILES, ROOMY = {64: (128, 128), 128: (192, 128)}, 8
BATCH_SPLITS = 8


def short_launch(
    num_rows: int, dim: int, split_keys: int, pairs: int, splits: int
) -> tuple[Any, dict[str, int], dict[str, Any]]:
    """(kernel, constants, options) of a pass.

    Args:
        num_rows: Q * H / Hkv. dim: of a head. split_keys: of the cache. pairs: B * Hkv.
        splits: that the pass has room for.
    """
    eights, one_block = triton.cdiv(num_rows, 8), split_keys <= PARTS * KEYS.value
    most = GROUPS if one_block else 2  # from block to block, the sums of no more fit into registers
    groups = groups_of(num_rows, most)
    tiles = pairs * triton.cdiv(eights, groups)
    if pairs * eights * splits <= FEW_PROGRAMS and tiles * splits < ENOUGH_PROGRAMS:
        groups, tiles = 1, pairs * eights
    constants = {"SPLIT": split_keys, "D": dim, "G": groups, "S": PARTS}
    options = {"num_warps": PARTS, "maxnreg": REGISTERS[dim]}
    if tiles >= BATCH_TILES[dim][splits > ROOMY] and one_block:
        return batch_kernel, {**constants, "CHUNK": BATCH_SPLITS}, options
    if tiles * splits <= ALONE_PROGRAMS:
        options = {"num_warps": 2 * PARTS, "maxnreg": MAX_REGISTERS}
    return fragment_kernel, constants, options
