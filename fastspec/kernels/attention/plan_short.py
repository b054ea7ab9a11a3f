"""Decoding passes over rows that are not long: which of two kernels runs, and how; both give a row the same bits."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from fastspec.kernels.attention import plan_long
from fastspec.kernels.attention.decode_mma import fragment_kernel
from fastspec.kernels.attention.decode_mma_batch import batch_kernel
from fastspec.kernels.attention.mma_layouts import PARTS
from fastspec.kernels.attention.mma_tiles import KEYS
from fastspec.kernels.attention.prefill import MAX_REGISTERS
from fastspec.kernels.common.launch import launch

__all__ = ["batch_kernel", "fragment_kernel", "near_and_far", "short", "short_launch", "splits_for", "sums"]

SPLIT: int = PARTS * KEYS.value  # keys of one partial sum
# by head_dim: registers of a thread, and programs that share a multiprocessor for that
REGISTERS, BESIDE = {64: 168, 128: MAX_REGISTERS}, {64: 3, 128: 2}
GROUPS = 4  # of 8 query rows in a program at most
MULTIPROCESSORS = 132  # of the H200 and the H100 on which these were measured (perf/results/tried.jsonl)
# up to so many programs have two warps for each part of a split, and a multiprocessor to themselves: what starts early
# beside fewer threads slows them down
ALONE_PROGRAMS = MULTIPROCESSORS // 2
FEW_EIGHTS = {64: 64, 128: 63}  # by head_dim: up to so many groups of 8 rows in all a program has one
# splits that a program with a multiprocessor to itself reads at once, each by warps of its own: fewer programs leave
# sums to be added up, and where one has all of a tile's splits none does
AT_ONCE = 2


def splits_for(room: int) -> int:
    """Splits that the positions below `room` lie in."""
    splits: int = triton.cdiv(room, SPLIT)
    return splits


def near_and_far(begin: int, room: int) -> tuple[int, int]:
    """Splits of rows at begin .. room-1: of those decoded here, of those that plan_long.py decodes; 0 for no rows."""
    near = splits_for(min(room, plan_long.FROM)) if begin < plan_long.FROM else 0
    return near, plan_long.splits_for(room) if room > plan_long.FROM else 0


def sums(*splits: int) -> int:
    """Partial sums that are left of a row: as many as the most splits, none of a single one."""
    return max(each if each > 1 else 0 for each in splits)


def short_launch(
    num_rows: int, dim: int, pairs: int, splits: int
) -> tuple[Any, tuple[int, int], dict[str, int], dict[str, Any]]:
    """(kernel, (tiles, programs to each), constants, options) of a pass.

    Args:
        num_rows: Q * H / Hkv. dim: of a head. pairs: B * Hkv.
        splits: that the pass has room for.
    """
    groups = tile_groups(num_rows, dim, pairs)
    tiles = pairs * triton.cdiv(triton.cdiv(num_rows, 8), groups)
    constants = {"D": dim, "G": groups, "S": PARTS}
    several = reads_several(dim, tiles, groups, splits)
    shares = shares_of(dim, tiles, splits, several)
    at_once, registers = (AT_ONCE, MAX_REGISTERS) if several else (1, REGISTERS[dim])
    options = {"num_warps": at_once * PARTS, "maxnreg": registers}
    if shares:
        return batch_kernel, (tiles, shares), {**constants, "AT_ONCE": at_once}, options
    if tiles * splits <= ALONE_PROGRAMS:
        options = {"num_warps": 2 * PARTS, "maxnreg": MAX_REGISTERS}
    return fragment_kernel, (tiles, splits), constants, options


def tile_groups(num_rows: int, dim: int, pairs: int) -> int:
    """Groups of 8 of a key head's `num_rows` query rows for which a program reads K and V once.

    As few of 2 .. GROUPS as leave no more tiles than multiprocessors, or GROUPS; tiles of about the same size.
    """
    eights = triton.cdiv(num_rows, 8)
    if eights == 1 or pairs * eights <= FEW_EIGHTS[dim]:
        return 1
    enough = (groups for groups in range(2, GROUPS + 1) if pairs * triton.cdiv(eights, groups) <= MULTIPROCESSORS)
    return next(enough, plan_long.groups_of(num_rows, GROUPS))


def reads_several(dim: int, tiles: int, groups: int, splits: int) -> bool:
    """Whether programs read AT_ONCE splits at once, each with a multiprocessor to itself.

    They do where one then has all of a tile's splits, or where as many warps run otherwise, too. Not those of few tiles
    of one group, which are faster with more programs. Nor where there is room for AT_ONCE splits alone: what they gain
    with all of them they lose with the first.
    """
    as_many = groups > 1 and BESIDE[dim] <= AT_ONCE
    return splits > AT_ONCE and tiles <= MULTIPROCESSORS and (as_many or tiles > MULTIPROCESSORS // 2)


def shares_of(dim: int, tiles: int, splits: int, several: bool) -> int:
    """How many programs share out a tile's splits, so that all run at a time; 0 where as many as splits would.

    Args:
        several: they read AT_ONCE splits at once. Then they do share, and tiles are no more than multiprocessors.
    """
    if several:
        blocks: int = triton.cdiv(splits, AT_ONCE)
        return min(blocks, MULTIPROCESSORS // tiles)
    at_once = MULTIPROCESSORS * BESIDE[dim]
    return max(1, at_once // tiles) if tiles * splits > at_once else 0


def short(
    tensors: tuple[Any, ...],
    out: Tensor,
    work: tuple[Tensor, Tensor],
    sizes: tuple[float, ...],
    splits: int,
    window: int | None,
    pdl: bool,
    regroup: bool,
) -> None:
    """Launches fragment_kernel or batch_kernel. Rows of the pass that lie beyond the splits are left as junk.

    Args:
        tensors: `attend`'s, in its order.
        out: [B, Q, H * D], written.
        work: partial sums, fp32, with room for B * Q * H * splits * (D + 1) where splits > 1, written; and counters.
        sizes: what follows in the arguments of the kernels.
        splits: that the pass has room for.
        regroup: rows of out are left as the ring's product reads them.
    """
    keys, positions = tensors[5], tensors[8]
    (batch, num_queries), (_pages, page_size, kv_heads, dim) = positions.shape, keys.shape
    group = out.shape[2] // (kv_heads * dim)
    kernel, grid, constants, options = short_launch(num_queries * group, dim, batch * kv_heads, splits)
    launch(kernel, grid, *tensors, out, *work, *sizes, splits,
        WINDOW=window or 0, KV_HEADS=kv_heads, GROUP=group, PAGE_SIZE=page_size, REGROUP=regroup, PDL=pdl,
        enable_fp_fusion=False, **constants, **options, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
