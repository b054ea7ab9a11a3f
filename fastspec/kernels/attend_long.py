"""Decoding passes over long caches, by attend_stream.py: which caches, where their keys are split, the two launches."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from fastspec.kernels.attend_gather import FANS, gather_kernel
from fastspec.kernels.attend_stream import stream_kernel
from fastspec.kernels.device import launch

__all__ = ["gather_kernel", "rungs", "splits_for", "stream", "stream_kernel", "stream_launch", "streams"]

STREAMED = 512  # keys of a split, as `split_keys_for` gives a cache, from which on it is a long one
# (first position, keys of a split from there on): whole splits of whole blocks, 64 keys, up to the next position.
# The bits of a row depend on all of it but not on how long a cache or a pass is
LADDER: tuple[tuple[int, int], ...] = (
    (0, 128),
    (4096, 256),
    (8192, 512),
    (16384, 1024),
    (32768, 2048),
    (65536, 4096),
)
STREAM_WARPS = 4  # along the keys; part of the bits as well
# by groups of 8 query rows in a program: registers, which say how many programs share a multiprocessor
STREAM_REGISTERS = {1: 168, 2: 255, 3: 255}
GATHER_REGISTERS = 168  # several such programs fit beside one of those that they wait for


def streams(split_keys: int) -> bool:
    """Whether what `uses_fragments` names runs as attend_stream.py: never by how much of a cache is in use."""
    return split_keys >= STREAMED


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


def stream_launch(num_rows: int, dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(constants, options) of attend_stream.py for num_rows = Q * H / Hkv; all give a row the same bits."""
    groups = groups_of(num_rows, max(STREAM_REGISTERS))
    constants = {"RUNGS": rungs(), "D": dim, "G": groups, "S": STREAM_WARPS}
    return constants, {"num_warps": STREAM_WARPS, "maxnreg": STREAM_REGISTERS[groups]}


def gather_launch(tile: int, dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(constants, options) of attend_gather.py behind tiles of `tile` rows."""
    return {"RUNGS": rungs(), "D": dim, "TILE": tile}, {"num_warps": FANS.value, "maxnreg": GATHER_REGISTERS}


def stream(
    tensors: tuple[Any, ...],
    out: Tensor,
    partials: Tensor,
    sizes: tuple[float, ...],
    splits: int,
    window: int | None,
    pdl: bool,
) -> None:
    """Launches stream_kernel, then gather_kernel where there is more than one split.

    Args:
        tensors: `attend`'s, in its order.
        out: [B, Q, H * D], written.
        partials: fp32, with room for B * Q * H * splits * (D + 1) where splits > 1; written.
        sizes: what follows in the arguments of stream_kernel.
        splits: of the longest row that the pass has room for.
    """
    keys, positions = tensors[5], tensors[8]
    (batch, num_queries), (_pages, page_size, kv_heads, dim) = positions.shape, keys.shape
    group = out.shape[2] // (kv_heads * dim)
    constants, options = stream_launch(num_queries * group, dim)
    tile = constants["G"] * 8
    common: dict[str, Any] = {"WINDOW": window or 0, "KV_HEADS": kv_heads, "GROUP": group, "PDL": pdl}
    common |= {"enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}
    tiles, rows = batch * kv_heads * triton.cdiv(num_queries * group, tile), batch * kv_heads * group * num_queries
    given = {"PAGE_SIZE": page_size, **constants, **common, **options}
    launch(stream_kernel, (tiles, splits), *tensors, out, partials, *sizes, **given)
    if splits > 1:
        constants, options = gather_launch(tile, dim)
        counts = (num_queries, batch * kv_heads, splits)
        launch(gather_kernel, (rows,), positions, out, partials, *counts, **constants, **common, **options)
