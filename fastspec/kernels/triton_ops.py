"""The ops as Triton kernels: what a step runs on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels import Ops, reference
from fastspec.kernels.attend import AttendWork, attend_work, attend_work_bytes
from fastspec.kernels.attend import attend as attend_paged
from fastspec.kernels.commit import commit, scratch_of
from fastspec.kernels.device import compiling, has_pdl
from fastspec.kernels.embed import embed
from fastspec.kernels.feed_rows import feed_rows
from fastspec.kernels.publish import publish
from fastspec.kernels.reference import UNTILED, Tiling
from fastspec.kernels.tile_linear import tile_linear, tile_pick
from fastspec.kernels.verify_commit import verify_commit

DECODE_ROWS = 64  # products of more rows at once are a prompt's


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the passes of one model work in; every kernel leaves its part as it found it.

    Attributes:
        attend: of `attend`.
        pick: int64 [batch + 1] zeros, of the pick.
    """

    attend: AttendWork
    pick: Tensor


def workspace(
    device: torch.device, batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]
) -> Workspace:
    """Allocates the work area of a model; arguments as in `Ops.workspace`."""
    pick = torch.zeros(batch + 1, dtype=torch.int64, device=device)
    return Workspace(attend_work(device, batch * max_queries, max_positions, heads), pick)


def workspace_bytes(batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]) -> int:
    """Bytes of `workspace`."""
    return 8 * (batch + 1) + attend_work_bytes(batch * max_queries, max_positions, heads)


def attend(*tensors: Tensor, work: Workspace, **options: Any) -> Tensor:
    """As `reference.attend`, which defines it."""
    return attend_paged(*tensors, work=work.attend, **options)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tiling: Tiling = UNTILED, **options: Any) -> Tensor:
    """As `reference.linear`, which defines it; `tiling.rows` says whether the rows are a prompt's or a step's.

    A library's product is as good for a prompt's many rows, and for fp32, padded to always as many rows.
    """
    if x.dtype == torch.float32 or tiling.rows is None or tiling.rows > DECODE_ROWS:
        return reference.linear(x, weight, bias, tiling, **options)
    return tile_linear(x, weight, bias, pdl=has_pdl(x.device), **options)


def pick(
    x: Tensor,
    weight: Tensor,
    limit: int,
    tiling: Tiling = UNTILED,
    *,
    norm: tuple[Tensor, float] | None = None,
    work: Workspace,
    out: Tensor,
) -> None:
    """As `reference.pick`, which defines it."""
    if x.dtype == torch.float32 or tiling.rows is None:
        reference.pick(x, weight, limit, tiling, norm=norm, out=out)
    else:
        out.copy_(tile_pick(x, weight, limit, work.pick, norm=norm, pdl=has_pdl(x.device)))


TRITON_OPS = Ops(
    name="triton",
    store=lambda weight, gated: weight,
    workspace=workspace,
    workspace_bytes=workspace_bytes,
    commit_scratch=scratch_of,
    feed_rows=feed_rows,
    embed=embed,
    linear=linear,
    attend=attend,
    pick=pick,
    verify_commit=verify_commit,
    commit=commit,
    publish=publish,
    compiling=compiling,
)
