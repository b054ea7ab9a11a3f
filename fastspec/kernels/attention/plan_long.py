"""Decoding passes over long rows on sm_90: which rows, where their keys are split, and the two launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fastspec.kernels.attention.combine import GATHER_WARPS, gather_kernel
from fastspec.kernels.attention.decode_tma_sm90 import ROWS, WARPS, shares_kernel
from fastspec.kernels.attention.tma_parts import WIDTH, piece_of
from fastspec.kernels.common.launch import described, has_warp_groups, launch, multiprocessors
from fastspec.shapes import EARLY_BLOCKS, KEY_BLOCK

__all__ = [
    "gather_kernel",
    "long",
    "rungs",
    "shares_kernel",
    "splits_for",
]

# position: rows at this one and later ones are decoded here, earlier ones by plan_short.py alone. A block behind
# 4096, so that with max_length 4096 the drafts of a last step are early, too
FROM = EARLY_BLOCKS * KEY_BLOCK
# (first position, keys of a split from there on): whole splits of whole blocks, 128 keys, up to the next position.
# The bits of a row depend on all of it but not on how long a cache or a pass is
LADDER: tuple[tuple[int, int], ...] = ((0, 128), (1024, 256), (4096, 512), (16384, 1024), (65536, 2048))
RING_KEYS = {64: 128, 128: 64}  # of a tile by head_dim; splits are whole tiles. Part of the bits as well
# (programs on a multiprocessor, bytes of keys and values on their way to each): for passes of up to FEW_TILES tiles,
# which have few splits for many programs, and of more, where one of two reads while the other one begins or ends
RINGS, FEW_TILES = ((1, 112 * 1024), (2, 64 * 1024)), 31
RING_REGISTERS = 128  # of five warps; the one that fetches leaves most of its own to the others
MOST_SHARES = 8  # of a tile, where there are not too few tiles for the device
START = 0.02  # of a tile's keys: what a program takes before and after its share
GATHER_REGISTERS = 255  # of warps that have twice EACH partial sums on their way


def rungs() -> tuple[tuple[int, int, int], ...]:
    """LADDER as (first position, keys of a split, number of the first split)."""
    found: list[tuple[int, int, int]] = []
    for position, keys in LADDER:
        before = found[-1] if found else (0, 1, 0)
        found.append((position, keys, before[2] + (position - before[0]) // before[1]))
    return tuple(found)


def splits_for(room: int) -> int:
    """Splits that the positions below `room` lie in."""
    position, keys, number = [rung for rung in rungs() if rung[0] < room][-1]
    return number + -(-(room - position) // keys)


def groups_of(num_rows: int, most: int) -> int:
    """Groups of 8 rows in a program, at most `most`: tiles of about the same size."""
    eights = -(-num_rows // 8)
    return -(-eights // -(-eights // most))


def gather_launch(dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(constants, options) of combine.py."""
    constants = {"RUNGS": rungs(), "FROM": FROM, "D": dim, "TILE": ROWS.value}
    return constants, {"num_warps": GATHER_WARPS.value, "maxnreg": GATHER_REGISTERS}


def rings(device: torch.device, page_size: int) -> bool:
    """Whether decode_tma_sm90.py can read a cache: the copy engine brings 8 keys or more of a page at a time."""
    return page_size % 8 == 0 and has_warp_groups(device)


def ring_launch(dim: int, tiles: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(programs on a multiprocessor, constants, options) of decode_tma_sm90.py for so many tiles, each of one kv
    head.
    """
    keys = RING_KEYS[dim]
    programs, held = RINGS[tiles > FEW_TILES]
    constants = {"RUNGS": rungs(), "FROM": FROM, "D": dim, "KEYS": keys, "STAGES": held // (keys * dim * 2)}
    return programs, constants, {"num_warps": WARPS.value, "maxnreg": RING_REGISTERS}


def shares_of(tiles: int, programs: int) -> int:
    """Programs for each tile, `programs` of all running at once: by rounds of them, and what a program costs anyway."""
    most = max(programs // tiles, MOST_SHARES)
    return min(range(1, most + 1), key=lambda shares: -(-tiles * shares // programs) * (1 / shares + START))


def long(
    tensors: tuple[Any, ...],
    out: Tensor,
    partials: Tensor,
    sizes: tuple[float, ...],
    splits: int,
    window: int | None,
    pdl: bool,
) -> None:
    """Launches shares_kernel, then gather_kernel where there is more than one split.

    Args:
        tensors: `attend`'s, in its order.
        out: [B, Q, H * D], written.
        partials: fp32, with room for B * Q * H * splits * (D + 1) where splits > 1; written.
        sizes: what follows `splits` in the arguments of shares_kernel.
        splits: of the longest row that the pass has room for.
    """
    keys, values, positions = tensors[5], tensors[6], tensors[8]
    (batch, num_queries), (_pages, page_size, kv_heads, dim) = positions.shape, keys.shape
    group = out.shape[2] // (kv_heads * dim)
    num_rows, pairs = num_queries * group, batch * kv_heads
    common: dict[str, Any] = {"WINDOW": window or 0, "KV_HEADS": kv_heads, "GROUP": group, "PDL": pdl}
    common |= {"enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}
    tiles = pairs * triton.cdiv(num_rows, ROWS.value)
    programs, constants, options = ring_launch(dim, tiles)
    grid = tiles, min(splits, shares_of(tiles, programs * multiprocessors(keys.device)))
    block = [piece_of(page_size, constants["KEYS"]), WIDTH.value]
    slots = [described(cache.view(-1, kv_heads * dim), block) for cache in (keys, values)]
    launch(shares_kernel, grid, *slots, *tensors, out, partials, splits, *sizes,
        PAGE_SIZE=page_size, **constants, **common, **options,
    )  # fmt: skip
    if splits > 1:
        constants, options = gather_launch(dim)
        counts = (num_queries, pairs, splits)
        launch(gather_kernel, (pairs * num_rows,), positions, out, partials, *counts, **constants, **common, **options)
