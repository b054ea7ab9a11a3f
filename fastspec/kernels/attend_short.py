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

# by head_dim: registers of a thread, and programs that share a multiprocessor for that
REGISTERS, BESIDE = {64: 168, 128: MAX_REGISTERS}, {64: 3, 128: 2}
GROUPS = 4  # of 8 query rows in a program at most
MULTIPROCESSORS = 132  # of the H200 on which these were measured (perf/results/tried.jsonl)
# up to so many programs have two warps for each part of a block, and a multiprocessor to themselves: what starts early
# beside fewer threads slows them down
ALONE_PROGRAMS = MULTIPROCESSORS // 2
# up to so many groups of 8 rows a program has one; and two at most where with more there are fewer tiles than FEW_TILES
# (or as many, of an even number of groups)
FEW_EIGHTS, FEW_TILES, HALVED = 64, 128, 2


def short_launch(
    num_rows: int, dim: int, split_keys: int, pairs: int, splits: int
) -> tuple[Any, tuple[int, int], dict[str, int], dict[str, Any]]:
    """(kernel, (tiles, programs to each), constants, options) of a pass.

    Args:
        num_rows: Q * H / Hkv. dim: of a head. split_keys: of the cache. pairs: B * Hkv.
        splits: that the pass has room for.
    """
    one_block = split_keys <= PARTS * KEYS.value
    groups = tile_groups(num_rows, pairs, one_block=one_block)
    tiles = pairs * triton.cdiv(triton.cdiv(num_rows, 8), groups)
    shares = shares_of(dim, tiles, splits)
    constants = {"SPLIT": split_keys, "D": dim, "G": groups, "S": PARTS}
    options = {"num_warps": PARTS, "maxnreg": REGISTERS[dim]}
    if shares:
        return batch_kernel, (tiles, shares), constants, options
    if one_block and tiles * splits <= ALONE_PROGRAMS:
        options = {"num_warps": 2 * PARTS, "maxnreg": MAX_REGISTERS}
    return fragment_kernel, (tiles, splits), constants, options


def tile_groups(num_rows: int, pairs: int, *, one_block: bool) -> int:
    """Groups of 8 of a key head's `num_rows` query rows for which a program reads K and V once.

    Args:
        one_block: a split is one block of keys: from block to block, the sums of no more than two groups fit into
            registers.
    """
    eights = triton.cdiv(num_rows, 8)
    if one_block and pairs * eights <= FEW_EIGHTS:
        return 1
    groups = groups_of(num_rows, GROUPS if one_block else HALVED)
    tiles = pairs * triton.cdiv(eights, groups)
    few = tiles < FEW_TILES or (tiles == FEW_TILES and eights % 2 == 0)
    return min(groups, HALVED) if few else groups


def shares_of(dim: int, tiles: int, splits: int) -> int:
    """How many programs share out a tile's splits, so that all run at a time; 0 where as many as splits would."""
    at_once = MULTIPROCESSORS * BESIDE[dim]
    return max(1, at_once // tiles) if tiles * splits > at_once else 0
