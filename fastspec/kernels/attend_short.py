"""Decoding passes over caches that are not long: which of two kernels runs, and how; all give a row the same bits."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from fastspec.kernels.attend_batch import batch_kernel
from fastspec.kernels.attend_fragment_parts import KEYS
from fastspec.kernels.attend_fragments import fragment_kernel
from fastspec.kernels.device import launch
from fastspec.kernels.paged_attention import MAX_REGISTERS

__all__ = ["batch_kernel", "fragment_kernel", "short", "short_launch"]

PARTS = 8  # of a block of keys, KEYS each, with a softmax of their own; part of what the bits of a row depend on
GROUPS = 3  # of 8 query rows in a program at most
MULTIPROCESSORS = 132  # of the H200 on which these were measured (perf/results/tried.jsonl)
# by head_dim: up to so many programs, half of them idle as a rule, have all the registers
ALONE_PROGRAMS = {64: MULTIPROCESSORS, 128: 2 * MULTIPROCESSORS}
FEW_PROGRAMS = 3 * MULTIPROCESSORS  # up to so many, groups of 8 rows to themselves are faster than reading K and V once
SHARED_REGISTERS = 128
# by head_dim: tiles from which on programs take several splits, and registers of such a program of BATCH_WARPS
BATCH_TILES = {64: 128, 128: 192}
BATCH_REGISTERS = {64: 168, 128: MAX_REGISTERS}
BATCH_WARPS, BATCH_SPLITS = 4, 4


def _groups(num_rows: int, most: int) -> int:
    """Groups of 8 rows in a program, at most `most`: tiles of about the same size."""
    eights = -(-num_rows // 8)
    return -(-eights // -(-eights // most))


def short_launch(
    num_rows: int, dim: int, split_keys: int, pairs: int, splits: int
) -> tuple[Any, dict[str, int], dict[str, Any]]:
    """(kernel, constants, options) of a pass.

    Args:
        num_rows: Q * H / Hkv. dim: of a head. split_keys: of the cache. pairs: B * Hkv.
        splits: that the pass has room for.
    """
    eights, one_block = triton.cdiv(num_rows, 8), split_keys <= PARTS * KEYS.value
    groups = _groups(num_rows, GROUPS if pairs * eights * splits > FEW_PROGRAMS else 1)
    tiles = pairs * triton.cdiv(eights, groups)
    constants = {"SPLIT": split_keys, "D": dim, "G": groups, "S": PARTS}
    if tiles >= BATCH_TILES[dim] and one_block:
        constants |= {"CHUNK": BATCH_SPLITS}
        return batch_kernel, constants, {"num_warps": BATCH_WARPS, "maxnreg": BATCH_REGISTERS[dim]}
    constants |= {"AHEAD": 1 if groups > 1 and dim > 64 else 2}  # as far as registers go
    # of larger splits a program has several blocks in flight, and half the registers do not hold them
    alone = tiles * splits <= ALONE_PROGRAMS[dim] or not one_block
    return fragment_kernel, constants, {"num_warps": PARTS, "maxnreg": MAX_REGISTERS if alone else SHARED_REGISTERS}


def tiles_of(num_rows: int, dim: int, split_keys: int, pairs: int, splits: int) -> int:
    """Tiles of a pass."""
    groups = short_launch(num_rows, dim, split_keys, pairs, splits)[1]["G"]
    return pairs * -(-num_rows // (8 * groups))


def short(
    tensors: tuple[Any, ...],
    out: Tensor,
    partials: Tensor,
    counters: Tensor,
    sizes: tuple[float, ...],
    splits: int,
    split_keys: int,
    window: int | None,
    pdl: bool,
) -> None:
    """Launches the kernel of a pass.

    Args:
        tensors: `attend`'s, in its order.
        out: [B, Q, H * D], written.
        partials, counters: of AttendWork, large enough.
        sizes: what follows in the arguments of the kernels, but for `splits`.
        splits: of `split_keys` keys, of the longest row that the pass has room for.
    """
    keys, positions = tensors[5], tensors[8]
    (batch, num_queries), (_pages, page_size, kv_heads, dim) = positions.shape, keys.shape
    group = out.shape[2] // (kv_heads * dim)
    shape = (num_queries * group, dim, split_keys, batch * kv_heads, splits)
    kernel, constants, options = short_launch(*shape)
    launch(
        kernel,
        (tiles_of(*shape), triton.cdiv(splits, constants.get("CHUNK", 1))),
        *tensors,
        out,
        partials,
        counters,
        *sizes,
        splits,
        WINDOW=window or 0,
        KV_HEADS=kv_heads,
        GROUP=group,
        PAGE_SIZE=page_size,
        PDL=pdl,
        enable_fp_fusion=False,
        **constants,
        **options,
        **({"launch_pdl": True} if pdl else {}),
    )
