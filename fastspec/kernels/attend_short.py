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
# what follows holds for heads of 128, measured from 4 sequences of 8 key heads on. So many programs run at a time, and
# where there would be more, each takes several splits of its tile, up to BATCH_SPLITS
AT_ONCE, MEASURED_PAIRS, BATCH_SPLITS = 2 * MULTIPROCESSORS, 32, 8
# where tiles are few, they are halved to no more than HALVED groups, unless a program would have more splits then
MANY_TILES, HALVED, HALVED_SPLITS = 128, 2, 4
# elsewhere, by head_dim: tiles from which on programs take BATCH_SPLITS
BATCH_TILES = {64: 128, 128: 192}


def short_launch(
    num_rows: int, dim: int, split_keys: int, pairs: int, splits: int
) -> tuple[Any, dict[str, int], dict[str, Any]]:
    """(kernel, constants, options) of a pass.

    Args:
        num_rows: Q * H / Hkv. dim: of a head. split_keys: of the cache. pairs: B * Hkv.
        splits: that the pass has room for.
    """
    one_block = split_keys <= PARTS * KEYS.value
    groups, tiles = _tiles(num_rows, dim, pairs, splits, one_block)
    constants = {"SPLIT": split_keys, "D": dim, "G": groups, "S": PARTS}
    options = {"num_warps": PARTS, "maxnreg": REGISTERS[dim]}
    each = splits_each(dim, pairs, tiles, splits) if one_block else 1
    if each > 1:
        return batch_kernel, {**constants, "CHUNK": each}, options
    if tiles * splits <= ALONE_PROGRAMS:
        options = {"num_warps": 2 * PARTS, "maxnreg": MAX_REGISTERS}
    return fragment_kernel, constants, options


def _tiles(num_rows: int, dim: int, pairs: int, splits: int, one_block: bool) -> tuple[int, int]:
    """(groups of 8 rows in a program, tiles of as many in all): K and V are read once for each tile."""
    eights = triton.cdiv(num_rows, 8)
    most = GROUPS if one_block else 2  # from block to block, the sums of no more fit into registers
    groups = groups_of(num_rows, most)
    tiles, halved = (pairs * triton.cdiv(eights, each) for each in (groups, HALVED))
    if pairs * eights * splits <= FEW_PROGRAMS and tiles * splits < ENOUGH_PROGRAMS:
        return 1, pairs * eights
    measured = one_block and dim == 128 and pairs >= MEASURED_PAIRS
    if measured and groups > HALVED and tiles < MANY_TILES and halved * splits <= HALVED_SPLITS * AT_ONCE:
        return HALVED, halved
    return groups, tiles


def splits_each(dim: int, pairs: int, tiles: int, splits: int) -> int:
    """How many splits of its tile a program takes, one after the other: a power of two."""
    if dim == 128 and pairs >= MEASURED_PAIRS:
        few = (each for each in (1, 2, 4) if tiles * triton.cdiv(splits, each) <= AT_ONCE)
        return next(few, BATCH_SPLITS)
    return BATCH_SPLITS if tiles >= BATCH_TILES[dim] else 1
