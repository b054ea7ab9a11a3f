"""Launches the kernels of experts: tiles by the number of rows; many rows are sorted by expert first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fastspec.kernels.common.checks import check
from fastspec.kernels.common.experts import ExpertStack, ExpertWeights
from fastspec.kernels.common.launch import launch, pdl_options
from fastspec.kernels.experts.products import expert_kernel, sum_kernel
from fastspec.shapes import ClampedGate


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of one program.

    Attributes:
        rows: pairs of a row and an expert.
        block_n: rows of the weight.
        num_warps, num_stages: as in Triton.
        runs: for mxfp4, at most so many runs of 64 values in one iteration of the loop.
    """

    rows: int
    block_n: int
    num_warps: int
    num_stages: int
    runs: int = 1


# by element size of values, 1 for mxfp4: the first tile that holds a call's rows, else the last. A row's bits do not
# depend on the tile; fp32 has one alone, for there they would
LAUNCH = {
    1: (Tile(8, 16, 1, 4, 5), Tile(16, 16, 1, 5, 3), Tile(32, 32, 2, 4), Tile(64, 32, 4, 4)),
    2: (Tile(8, 16, 1, 6), Tile(16, 16, 1, 5), Tile(32, 32, 2, 4), Tile(64, 32, 4, 3)),
    4: (Tile(8, 16, 4, 3),),
}
BLOCK_K = {2: 128, 4: 64}  # by element size of values: it sets the order of sums, so it is the same for all rows
DIRECT_ROWS = 64  # up to so many rows each program searches all of them for its expert; more are sorted by expert first
SUM_BLOCK = 512


class Sorted(NamedTuple):
    """Pairs (row, expert) sorted by expert.

    Attributes:
        order: int32 [R * chosen], numbers of pairs.
        starts: int32 [E + 1], where each expert's pairs begin in `order`.
        ends: int32 [E], the number of tiles up to each expert's last one.
    """

    order: Tensor
    starts: Tensor
    ends: Tensor


def keeps_experts(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels read a stack of such matrices (N, K) in mxfp4, with activations of `dtype`."""
    return dtype in (torch.bfloat16, torch.float16) and shape[1] % 64 == 0


def experts(
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    weights: ExpertWeights,
    clamp: ClampedGate | None,
    *,
    shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
    residual: Tensor,
    pdl: bool = False,
) -> Tensor:
    """As `reference.experts`, which defines it, but the residual is added before the result is rounded.

    Args:
        x, ids, factors, weights, clamp, shared, shared_logits, residual: as there.
        pdl: launch programmatically dependent (sm_90 on).

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit each other.
    """
    count, double, hidden = weights.gate_up.shape
    rows = x.reshape(-1, hidden).contiguous()
    num_rows, chosen = ids.shape
    if weights.down.shape != (count, hidden, double // 2) or rows.shape[0] != num_rows or x.dtype != weights.down.dtype:
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)}, ids {list(ids.shape)}, experts {weights.gate_up.shape} and "
            f"{weights.down.shape} for {weights.down.dtype}; wanted [..., K], [R, chosen], [E, 2 I, K] and [E, K, I]"
        )
    check("ids", ids, (num_rows, chosen), torch.int32)
    check("factors", factors, (num_rows, chosen), torch.float32)
    if num_rows == 0:
        return residual
    itemsize = 1 if weights.gate_up.scales is not None else x.element_size()
    tile = _tile(itemsize, num_rows)
    by_expert = _sorted(ids, count, tile.rows) if num_rows > DIRECT_ROWS else None
    inner = _product(rows, weights.gate_up, weights.gate_up_bias, ids, by_expert, gated=True, clamp=clamp, pdl=pdl)
    given = _product(inner, weights.down, weights.down_bias, ids, by_expert, gated=False, clamp=None, pdl=pdl)
    out = torch.empty_like(rows)
    added = [None if each is None else each.reshape(num_rows, -1).contiguous() for each in (shared, shared_logits)]
    grid = (num_rows, triton.cdiv(hidden, SUM_BLOCK))
    launch(
        sum_kernel, grid, given, factors, *added, residual.reshape(rows.shape).contiguous(), out,
        K=hidden, CHOSEN=chosen, BLOCK=SUM_BLOCK, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    return out.view(x.shape)


def _tile(itemsize: int, rows: int) -> Tile:
    tiles = LAUNCH[itemsize]
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


def _runs(k: int, tile: Tile) -> int:
    """Runs of 64 values in one iteration of the loop: the largest divisor of K / 64 that is at most `tile.runs`."""
    return next(runs for runs in range(tile.runs, 0, -1) if k // 64 % runs == 0)


def _product(
    x: Tensor,
    stack: ExpertStack,
    bias: Tensor | None,
    ids: Tensor,
    by_expert: Sorted | None,
    *,
    gated: bool,
    clamp: ClampedGate | None,
    pdl: bool,
) -> Tensor:
    """[R * chosen, N], or N / 2: the gated product of rows, or the product of pairs."""
    (num_rows, chosen), (count, double, k) = ids.shape, stack.shape
    width, pairs = double // 2 if gated else double, num_rows * chosen
    itemsize = 1 if stack.scales is not None else x.element_size()
    tile = _tile(itemsize, num_rows)
    out = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    columns = triton.cdiv(width, tile.block_n)
    if by_expert is None:
        grid = (columns, min(pairs, count), triton.cdiv(num_rows, tile.rows))
    else:
        grid = (columns, triton.cdiv(pairs, tile.rows) + count, 1)
    alpha, limit = (0.0, 0.0) if clamp is None else clamp
    launch(
        expert_kernel, grid, x, stack.data, stack.scales, bias, ids, *(by_expert or (None, None, None)), out,
        num_rows, alpha, limit,
        E=count, WIDTH=width, K=k, CHOSEN=chosen, ROWS=tile.rows, BLOCK_N=tile.block_n,
        BLOCK_K=BLOCK_K[x.element_size()], RUNS=_runs(k, tile), PLACES=triton.next_power_of_2(chosen),
        SLOTS=triton.next_power_of_2(min(pairs, count)), EXPERTS=triton.next_power_of_2(count),
        GATED=gated, CLAMPED=clamp is not None, OF_PAIRS=not gated, BY_EXPERT=pairs >= count,
        SORTED=by_expert is not None, num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(pdl),
    )  # fmt: skip
    return out


def _sorted(ids: Tensor, count: int, rows: int) -> Sorted:
    """Pairs by expert, in tiles of `rows`; nothing is read on the host."""
    pairs = ids.flatten()
    order = pairs.sort(stable=True).indices.int()
    each = torch.zeros(count, dtype=torch.int32, device=ids.device)
    each = each.scatter_add(0, pairs.long(), torch.ones_like(pairs))
    zero = torch.zeros(1, dtype=torch.int32, device=ids.device)
    starts = torch.cat((zero, each.cumsum(0, dtype=torch.int32)))
    return Sorted(order, starts, ((each + rows - 1) // rows).cumsum(0, dtype=torch.int32))
