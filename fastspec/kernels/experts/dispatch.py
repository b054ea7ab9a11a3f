"""Launches the kernels of an MoE layer's experts, and chooses the tile of a CTA for each launch.

A pair is a row of x and one of its chosen experts. Pairs are sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fastspec.kernels.common.checks import check
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.experts import ExpertStack, ExpertWeights, can_stack_codes
from fastspec.kernels.common.launch import launch
from fastspec.kernels.experts.codes import ExpertEpilogue, codes_kernel
from fastspec.kernels.experts.lists import lists_of
from fastspec.kernels.experts.products import Chosen, Norm, Stack, expert_kernel, sum_kernel
from fastspec.kernels.gpu import generation_of
from fastspec.kernels.product.reader import WeightParts, parts_of_codes
from fastspec.shapes import ClampedGate, SquaredRelu


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Tile of one CTA for 16-bit or fp32 expert weights.

    Attributes:
        rows: largest number of pairs (row of x, chosen expert).
        block_n: number of rows of the weight.
        num_warps, num_stages: launch options of Triton.
    """

    rows: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class CodesTile:
    """Tile of one CTA for quantised expert weights (codes). It has 16 rows of the weight.

    Attributes:
        rows: largest number of pairs (row of x, chosen expert): 8 times a power of two.
        depth: number of chunks of weights that a warp loads ahead.
    """

    rows: int
    depth: int


# by bytes of a weight; see `tile_of`. A row's bits do not depend on the tile. In fp32 they would, so fp32 has only one
# tile. In 16 bits the numbers of pairs are those of `CODES_LAUNCH`: if only one of a layer's two stacks is quantised,
# both products read the same list of pairs
LAUNCH = {
    2: (ExpertTile(8, 16, 1, 6), ExpertTile(16, 16, 1, 5), ExpertTile(32, 32, 2, 4), ExpertTile(64, 32, 4, 3)),
    4: (ExpertTile(8, 16, 4, 3),),
}
CODES_LAUNCH = (CodesTile(8, 1), CodesTile(16, 1), CodesTile(32, 1), CodesTile(64, 1))
CODES_ROWS = 16  # rows of the weight per CTA
# by bytes of a weight: values of K in a step. It determines the order of sums, so it is the same for any number of rows
BLOCK_K = {2: 128, 4: 64}
SPLIT_K = 4  # for codes: number of parts of K, with one warp each; it determines the order of sums
SUM_BLOCK = 512  # columns of a CTA that sums expert outputs without a norm
NO_CLAMP = ClampedGate(0.0, 0.0)  # arguments of kernels that do not read them
# for a single row of x: largest number of bytes of a weight row with which the second product loads all its weights
# before it waits for x. More do not fit into a warp's registers. With several rows only the first CTAs wait, so this is
# not needed
AHEAD_BYTES = 1536


def keeps_experts(shape: tuple[int, int], kind: CodesKind, dtype: torch.dtype, device: torch.device) -> bool:
    """True if these kernels can multiply quantised experts of shape (N, K) and of this kind.

    dtype: dtype of the activations. device: device of the experts.
    """
    fits = dtype == torch.bfloat16 and can_stack_codes(shape, kind)
    return fits and (device.type != "cuda" or generation_of(device).supported)


def experts(
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    weights: ExpertWeights,
    clamp: ClampedGate | SquaredRelu | None,
    *,
    shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
    residual: Tensor | None,
) -> Tensor:
    """Sums the outputs of each row's chosen experts, times their factors, as `Ops.experts`.

    Args:
        x, ids, factors, weights, clamp, shared, shared_logits, residual: see `Ops.experts`.

    Returns:
        The sums, in the shape of x. Without a residual they are fp32. With a residual, it is added before the sum is
        rounded to x's dtype.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit each other.
    """
    outputs = _expert_outputs(x, ids, factors, weights, clamp)
    if outputs is None:
        return x.float() if residual is None else residual
    out = torch.empty(x.shape, dtype=torch.float32 if residual is None else x.dtype, device=x.device)
    _add_up(outputs, factors, (shared, shared_logits, residual), out, None)
    return out


def experts_normed(
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    weights: ExpertWeights,
    clamp: ClampedGate | SquaredRelu | None,
    *,
    shared: Tensor | None = None,
    shared_logits: Tensor | None = None,
    residual: Tensor,
    norm: tuple[Tensor, float],
) -> tuple[Tensor, Tensor]:
    """Computes `experts` with a residual, and the RMSNorm of the result, as `Ops.experts_normed`.

    Args:
        x, ids, factors, weights, clamp, shared, shared_logits, residual, norm: see `Ops.experts_normed`.

    Returns:
        The sum and its norm, both in the shape and dtype of x.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit each other.
    """
    outputs = _expert_outputs(x, ids, factors, weights, clamp)
    check("norm's weight", norm[0], x.shape[-1:])
    if outputs is None:
        return residual, x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    after = Norm(norm[0], torch.empty_like(out), norm[1])
    _add_up(outputs, factors, (shared, shared_logits, residual), out, after)
    return out, after.out


def _expert_outputs(
    x: Tensor, ids: Tensor, factors: Tensor, weights: ExpertWeights, clamp: ClampedGate | SquaredRelu | None
) -> Tensor | None:
    """Returns the expert's output for each pair (row of x, chosen expert), [R * chosen, K]. None if x has no rows."""
    gated = not isinstance(clamp, SquaredRelu)
    count, first, hidden = weights.gate_up.shape
    inner = first // 2 if gated else first
    rows = x.reshape(-1, hidden).contiguous()
    num_rows, chosen = ids.shape
    if weights.down.shape != (count, hidden, inner) or rows.shape[0] != num_rows or x.dtype != weights.down.dtype:
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)}, ids {list(ids.shape)}, experts {weights.gate_up.shape} and "
            f"{weights.down.shape} for {weights.down.dtype}; wanted [..., K], [R, chosen], [E, 2 I, K] or without a "
            "gate [E, I, K], and [E, K, I]"
        )
    check("ids", ids, (num_rows, chosen), torch.int32)
    check("factors", factors, (num_rows, chosen), torch.float32)
    if num_rows == 0:
        return None
    tiles = tile_of(weights.gate_up, ids), tile_of(weights.down, ids)
    of = _chosen(ids, count, tiles[0].rows)
    activation = "relu2" if isinstance(clamp, SquaredRelu) else "silu" if clamp is None else "clamped"
    limits = clamp if isinstance(clamp, ClampedGate) else NO_CLAMP
    first_out = _product(rows, weights.gate_up, weights.gate_up_bias, of, tiles[0], chosen, activation, limits)
    return _product(first_out, weights.down, weights.down_bias, of, tiles[1], chosen, None, NO_CLAMP)


def _add_up(
    outputs: Tensor, factors: Tensor, others: tuple[Tensor | None, ...], out: Tensor, norm: Norm | None
) -> None:
    """Writes each row's sum of expert outputs, times their factors, to `out`.

    With `norm`, also writes the RMSNorm of each sum to `norm.out`. others: (shared, shared_logits, residual) of
    `experts`, which are part of the sum.
    """
    (rows, chosen), hidden = factors.shape, outputs.shape[1]
    added = [None if each is None else each.reshape(rows, -1).contiguous() for each in others]
    block = SUM_BLOCK if norm is None else triton.next_power_of_2(hidden)
    launch(
        sum_kernel, (rows, triton.cdiv(hidden, block)), outputs, factors, *added, out, norm or Norm(None, None, 0.0),
        K=hidden, CHOSEN=chosen, BLOCK=block, ROUND_FIRST=norm is not None and norm.weight.dtype == out.dtype,
        num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip


def tile_of(stack: ExpertStack, ids: Tensor) -> ExpertTile | CodesTile:
    """Returns the smallest tile that holds twice the average number of pairs of an expert, or the largest tile.

    ids: int32 [R, chosen], the chosen experts of each row.
    """
    likely = min(len(ids), 2 * triton.cdiv(ids.numel(), stack.shape[0]))
    tiles: tuple[ExpertTile | CodesTile, ...] = CODES_LAUNCH if stack.in_codes else LAUNCH[stack.dtype.itemsize]
    return next((tile for tile in tiles if likely <= tile.rows), tiles[-1])


def _chosen(ids: Tensor, experts: int, each: int) -> Chosen:
    """Assigns pairs (row of x, chosen expert) to CTAs.

    Pairs of several rows are sorted by expert, with up to `each` pairs in a tile (lists.py). With a single row, each
    pair has CTAs of its own. experts: number of experts.
    """
    if len(ids) == 1:
        return Chosen(ids, None, None)
    return Chosen(ids, *lists_of(ids, experts, each))


def _product(
    x: Tensor,
    stack: ExpertStack,
    bias: Tensor | None,
    of: Chosen,
    tile: ExpertTile | CodesTile,
    chosen: int,
    activation: str | None,
    clamp: ClampedGate,
) -> Tensor:
    """Computes one of the two products of each pair (row of x, chosen expert), and the activation after the first.

    Returns [R * chosen, N], or [R * chosen, N / 2] with a gate.

    Args:
        x: for the first product the layer's input [R, K]. For the second [R * chosen, K], a row for each pair.
        stack, bias: weights [E, N, K], and bias [E, N] or None.
        of: assignment of pairs to CTAs, from `_chosen`.
        tile: tile of a CTA.
        chosen: number of chosen experts of a row.
        activation: "silu" or "clamped" (with a gate), or "relu2", for the first product. None: the second product.
        clamp: parameters of "clamped".
    """
    _, n, k = stack.shape
    gated, of_pairs = activation in ("silu", "clamped"), activation is None
    pairs = of.ids.numel()
    out = torch.empty(pairs, n // 2 if gated else n, dtype=x.dtype, device=x.device)
    tiles = pairs if of.tiles is None else len(of.tiles)
    options: dict[str, Any] = {"K": k, "CHOSEN": chosen, "GATED": gated, "ACTIVATION": activation}
    options |= {"OF_PAIRS": of_pairs}
    if isinstance(tile, CodesTile):
        parts, form = _parts_of(stack)
        launch(
            codes_kernel, (n // CODES_ROWS, tiles), x.view(torch.int32), parts, of, ExpertEpilogue(bias, out), *clamp,
            N=n, S=SPLIT_K, R=CODES_ROWS, BLOCKS=tile.rows // 8, D=tile.depth, **form, **options,
            num_warps=SPLIT_K, enable_fp_fusion=False,
        )  # fmt: skip
        return out
    width, size = out.shape[1], x.element_size()
    ahead = of_pairs and size == 2 and of.tiles is None and k * size <= AHEAD_BYTES
    launch(
        expert_kernel, (triton.cdiv(width, tile.block_n), tiles), Stack(x, stack.data, bias), of, out, *clamp,
        WIDTH=width, ROWS=tile.rows, BLOCK_N=tile.block_n, BLOCK_K=BLOCK_K[size], AHEAD=ahead,
        **options, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _parts_of(stack: ExpertStack) -> tuple[WeightParts, dict[str, Any]]:
    """Returns the tensors that `codes_kernel` reads, and its constexpr arguments FORM, GROUP and PER."""
    if stack.codes is None:
        return WeightParts(stack.data, scales=stack.scales), {"FORM": "mxfp4", "GROUP": 0, "PER": 0}
    return parts_of_codes(stack.codes)
