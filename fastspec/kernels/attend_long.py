"""Which caches attend_stream.py decodes over, and its two launches."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from fastspec.kernels.attend_gather import FANS, gather_kernel
from fastspec.kernels.attend_stream import stream_kernel
from fastspec.kernels.device import launch

__all__ = ["gather", "stream_kernel", "stream_launch", "streams"]

# (positions, keys of a split): caches of rows of more positions run as attend_stream.py, with such splits
STREAM: tuple[int, int] | None = None
STREAM_WARPS = 4  # along the keys; like the split, part of what the bits of a row depend on
STREAM_FAR = 2  # blocks of STREAM_WARPS * 16 keys that are on their way into L2
STREAM_APART = True  # whether a second launch adds up the partial sums; part of the bits as well
# by groups of 8 query rows in a program: registers, which say how many programs share a multiprocessor
STREAM_REGISTERS = {1: 168, 2: 255, 3: 255}
GATHER_REGISTERS = 168  # several such programs fit beside one of those that they wait for


def streams(split_keys: int) -> bool:
    """Whether what `uses_fragments` names runs as attend_stream.py instead: told by the split, as `split_keys_for`."""
    return STREAM is not None and split_keys >= STREAM[1]


def stream_launch(num_rows: int, dim: int, split_keys: int) -> tuple[dict[str, int], dict[str, Any]]:
    """(constants, options) of attend_stream.py for num_rows = Q * H / Hkv; all give a row the same bits."""
    eights = triton.cdiv(num_rows, 8)
    groups = triton.cdiv(eights, triton.cdiv(eights, max(STREAM_REGISTERS)))  # tiles of about the same size
    constants = {"SPLIT": split_keys, "D": dim, "G": groups, "S": STREAM_WARPS, "FAR": STREAM_FAR}
    options = {"num_warps": STREAM_WARPS, "maxnreg": STREAM_REGISTERS[groups]}
    return {**constants, "APART": STREAM_APART}, options


def gather(
    positions: Tensor,
    out: Tensor,
    partials: Tensor,
    splits: int,
    split_keys: int,
    tile: int,
    heads: tuple[int, int, int],
    window: int | None,
    pdl: bool,
) -> None:
    """Launches gather_kernel behind stream_kernel.

    Args:
        positions: [B, Q]. out: [B, Q, H * D], where rows of one split are already.
        partials: as stream_kernel left them, of `splits` splits and of tiles of `tile` rows.
        heads: (key heads, query heads to each, head_dim).
    """
    (batch, num_queries), (kv_heads, group, dim) = positions.shape, heads
    launch(
        gather_kernel,
        (batch * kv_heads * group * num_queries,),
        positions,
        out,
        partials,
        num_queries,
        batch * kv_heads,
        splits,
        SPLIT=split_keys,
        WINDOW=window or 0,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        TILE=tile,
        PDL=pdl,
        num_warps=FANS.value,
        maxnreg=GATHER_REGISTERS,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if pdl else {}),
    )
