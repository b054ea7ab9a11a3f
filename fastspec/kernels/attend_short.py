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
BATCH_SPLITS = 8  # of a program at most
# heads of 128, from 4 sequences of 8 key heads on: so many programs run at a time, and share out the splits that are
# there; tiles of which there are few are halved, down to HALVED groups
AT_ONCE, MEASURED_PAIRS, MANY_TILES, HALVED = 2 * MULTIPROCESSORS, 32, 128, 2
# elsewhere, by head_dim: tiles from which on a program takes all the splits that it may
BATCH_TILES = {64: 128, 128: 192}


def short_launch(
    num_rows: int, dim: int, split_keys: int, pairs: int, splits: int
) -> tuple[Any, int, dict[str, int], dict[str, Any]]:
    """(kernel, shares, constants, options) of a pass: programs that share out a tile's splits, 0 where each takes one.

    Args:
        num_rows: Q * H / Hkv. dim: of a head. split_keys: of the cache. pairs: B * Hkv.
        splits: that the pass has room for.
    """
    one_block = split_keys <= PARTS * KEYS.value
    groups, tiles = _tiles(num_rows, dim, pairs, splits, one_block)
    constants = {"SPLIT": split_keys, "D": dim, "G": groups, "S": PARTS}
    options = {"num_warps": PARTS, "maxnreg": REGISTERS[dim]}
    shares = shares_of(dim, pairs, tiles, splits) if one_block else 0
    if shares:
        return batch_kernel, shares, {**constants, "MOST": BATCH_SPLITS}, options
    if tiles * splits <= ALONE_PROGRAMS:
        options = {"num_warps": 2 * PARTS, "maxnreg": MAX_REGISTERS}
    return fragment_kernel, 0, constants, options


def _tiles(num_rows: int, dim: int, pairs: int, splits: int, one_block: bool) -> tuple[int, int]:
    """(groups of 8 rows in a program, tiles of as many in all): K and V are read once for each tile."""
    eights = triton.cdiv(num_rows, 8)
    most = GROUPS if one_block else 2  # from block to block, the sums of no more fit into registers
    groups = groups_of(num_rows, most)
    tiles = pairs * triton.cdiv(eights, groups)
    if pairs * eights * splits <= FEW_PROGRAMS and tiles * splits < ENOUGH_PROGRAMS:
        return 1, pairs * eights
    if one_block and dim == 128 and pairs >= MEASURED_PAIRS and groups > HALVED and tiles < MANY_TILES:
        return HALVED, pairs * triton.cdiv(eights, HALVED)
    return groups, tiles


def shares_of(dim: int, pairs: int, tiles: int, splits: int) -> int:
    """How many programs share out the splits of a tile; 0 where every split has a program of its own."""
    if dim == 128 and pairs >= MEASURED_PAIRS:
        return max(1, AT_ONCE // tiles) if tiles * splits > AT_ONCE else 0
    return int(tiles >= BATCH_TILES[dim])
