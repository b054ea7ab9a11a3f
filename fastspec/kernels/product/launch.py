"""Launches the packed products with the plans of `plan`: the norm before, the product, and the sum of splits after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from fastspec.kernels.common.launch import described, launch
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.gpu import gpu_of
from fastspec.kernels.product import plan
from fastspec.kernels.product.few_rows import few_rows_kernel
from fastspec.kernels.product.many_rows import many_rows_kernel
from fastspec.kernels.product.norm import norm_rows
from fastspec.kernels.product.plan import FewRows, Split, Tile, Tma
from fastspec.kernels.product.quantised import plan as quantised
from fastspec.kernels.product.split_k import Parts, add_up, permuted_rows
from fastspec.kernels.product.tma_sm90 import tma_kernel

GLUON_TYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
Norm = tuple[Tensor, float]  # weight [K] and epsilon


def tile_for(weight: Weight, rows: int, *, whole: bool = False, gated: bool = False) -> Tile:
    """Returns `plan.tile_of` for a weight on its device."""
    return plan.tile_of(*weight.shape, rows, gpu_of(weight.device), whole, gated, split_for(weight))


def split_for(weight: Weight) -> Split:
    """Returns how a product with this weight splits its sum over K."""
    if weight.codes is not None:
        return quantised.split_of(weight.codes.form, *weight.shape)
    tree = weight.tree and gpu_of(weight.device).hopper
    return plan.split_for(weight.shape, weight.whole, tree)


# Groups of kernel arguments. Triton compiles a kernel again if an integer inside a tuple becomes 1 or a multiple of 16,
# or stops being so. So integers that differ between passes are separate parameters.


class Rows(NamedTuple):
    """The rows that are multiplied with a weight, and the norm before the product.

    Attributes:
        x_ptr: int32 words [M, K / 2].
        gamma_ptr: int32 words [K / 2]; the kernel computes the norm itself. None: it does not.
        scale_ptr: fp32 [M], factors of rows if x is already multiplied with gamma. None: no factors.
        eps: epsilon of the norm.
    """

    x_ptr: Any
    gamma_ptr: Any
    scale_ptr: Any
    eps: Any


class Epilogue(NamedTuple):
    """Operations on complete sums: bias, residual, gate, argmax.

    Attributes:
        bias_ptr: [N]; None: no bias.
        residual_ptr: [M, width]; None: no residual.
        out_ptr: [M, width]. With `keys_ptr`: int64 ids or uint64 keys, with a stride.
        keys_ptr: int64 [M + 1] for an argmax; None: sums are stored.
        parts_ptr: fp32 [S / PAIRWISE, M, N]; if given, only partial sums are stored, there. TMA kernel only.
    """

    bias_ptr: Any
    residual_ptr: Any
    out_ptr: Any
    keys_ptr: Any
    parts_ptr: Any = None


class TmaSums(NamedTuple):
    """How the sum over K is split; see `Split`. One CTA adds PAIRWISE neighbouring splits first."""

    K: int
    S: int
    KT: int
    PAIRWISE: int


class TmaTile(NamedTuple):
    """Tile of a CTA; see `Tma`.

    Attributes:
        R: weight rows in shared memory: a power of two, because wgmma multiplies 64.
        OWN: weight rows that the CTA has. Sums of the others are not stored.
        GROUP, REST: rows of x in the first product, and in a second product; REST 0: no second one.
        STAGES, WARPS: steps of K in the pipeline, and number of multiplying warps.
    """

    R: int
    OWN: int
    GROUP: int
    REST: int
    STAGES: int
    WARPS: int


@dataclass(frozen=True, slots=True)
class Call:
    """Operands of one product, with x [M, K] contiguous. None: the operand is absent."""

    x: Tensor
    weight: Weight
    out: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    argmax_keys: Tensor | None = None
    limit: int = 0
    gated: bool = False
    gelu: bool = False

    @property
    def gate(self) -> int:
        """GATED of kernels: 0 for no gate, 1 for silu, 2 for gelu."""
        return self.gated + (self.gated and self.gelu)


def _constants(call: Call, split: Split, pdl: bool) -> dict[str, Any]:
    """Returns the constexpr arguments that all kernels of products have."""
    k = call.x.shape[1]
    cut = {"K": k, "S": split.split_k, "KT": split.tile_of_k(k), "PAIRWISE": split.pairwise}
    return {**cut, "GATED": call.gate, "PDL": pdl, "DTYPE": GLUON_TYPE[call.x.dtype]}


def run(call: Call, pdl: bool, tile: Tile | None = None) -> None:
    """Launches a product, and before it its norm, if the product's kernel does not compute it."""
    rows, k = call.x.shape
    n, _ = call.weight.shape
    tile = tile or tile_for(call.weight, rows, whole=call.argmax_keys is not None, gated=call.gated)
    split = split_for(call.weight)
    if isinstance(tile, Tma):
        _, regrouped, squares = permuted_for(call.weight, call.x, call.norm, pdl)
        launch_tma_and_sum(tile, replace(call, x=regrouped), squares, pdl)
        return
    gamma = scale = None
    if call.norm is not None and isinstance(tile, FewRows) and tile.rows <= plan.FUSED_ROWS:
        gamma = call.norm[0].view(torch.int32)
    elif call.norm is not None:
        x, scale = norm_rows(call.x, *call.norm, split.split_k, split.k_tile, GLUON_TYPE[call.x.dtype], pdl)
        call = replace(call, x=x)
    epilogue = Epilogue(call.bias, call.residual, call.out, call.argmax_keys)
    inputs = Rows(call.x.view(torch.int32), gamma, scale, 0.0 if call.norm is None else call.norm[1])
    numbers = (call.limit, 0 if call.argmax_keys is None else call.out.stride(0))
    shape = _constants(call, split, pdl) | {"R": tile.weight_rows, "D": tile.depth}
    # no fused multiply-add except where kernels ask for it: two kernels must round equally
    options: dict[str, Any] = {"launch_pdl": pdl, "enable_fp_fusion": False}
    operands = (inputs, call.weight.words(), epilogue, rows, n)
    steps = plan.cdiv(k, split.split_k * split.k_tile)
    if isinstance(tile, FewRows):
        grid = (plan.cdiv(n, tile.weight_rows), plan.cdiv(rows, tile.rows))
        loops = max(0, (steps - tile.depth - 1) // tile.depth)
        shape |= {
            "KT": split.k_tile,
            "PAIRWISE": split.kernel_pairwise,
            "BM": tile.rows,
            "XD": tile.row_depth,
            "AHEAD": tile.ahead,
            "num_warps": split.split_k,
        }
        if (n, k) in plan.L1_FIRST:
            options["least_shared"] = 0
        launch(few_rows_kernel, grid, *operands, *numbers, loops, **shape, **options)
        return
    grid = (plan.cdiv(n, tile.weight_rows), plan.cdiv(rows, tile.rows * tile.groups))
    turns = plan.cdiv(steps * (split.k_tile // plan.STEP), tile.depth)
    shape |= {"GROUP": tile.rows, "GROUPS": tile.groups, "WARPS": tile.warps}
    options |= {"num_warps": tile.warps}
    launch(many_rows_kernel, grid, *operands, *numbers, turns, **shape, **options)


def permuted_for(
    weight: Weight, x: Tensor, norm: Norm | None, pdl: bool, parts: Parts | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Calls `permuted_rows` for a product of the TMA kernel with `weight`."""
    split = split_for(weight)
    cut = split.split_k, split.k_tile
    return permuted_rows(x, norm, cut, GLUON_TYPE[x.dtype], pdl, parts, bias, reads_raised(weight))


def reads_raised(weight: Weight) -> bool:
    """True if the weight has 8-bit codes. Its TMA kernel then reads rows of x multiplied by 2^64."""
    return weight.codes is not None and weight.codes.form in quantised.WIDE


def launch_tma_and_sum(tile: Tma, call: Call, squares: Tensor | None, pdl: bool) -> None:
    """Calls `launch_tma`; if it leaves partial sums, adds them with another kernel."""
    parts = launch_tma(tile, call, squares, pdl)
    if parts is not None:
        add_up(parts, squares, call.norm, call.bias, call.residual, call.out, pdl)


def launch_tma(tile: Tma, call: Call, squares: Tensor | None, pdl: bool, regroup_out: bool = False) -> Parts | None:
    """Launches the TMA kernel.

    Args:
        call: operands; x is the result of `permuted_for`.
        squares: sums of squares from `permuted_for`.
        regroup_out: True if the result shall be regrouped as x is.

    Returns:
        None, or the partial sums of splits. `add_up` adds these and applies the rest of `call`.
    """
    rows = len(call.x)
    n, k = call.weight.shape
    split = split_for(call.weight)
    splits, parts = split.pairwise, None
    if tile.split_k is not None:
        splits = tile.split_k
        sums = call.x.new_empty(split.split_k // splits, rows, n, dtype=torch.float32)
        parts = Parts(sums, split.kernel_pairwise // splits)
    blocks = plan.cdiv(n, tile.weight_rows), plan.cdiv(rows, tile.rows + tile.rest)
    eps = 0.0 if call.norm is None else call.norm[1]
    stride = 0 if call.argmax_keys is None else call.out.stride(0)
    words = call.weight.words(n // 16, k // 4, 32)
    constants = _constants(call, split, pdl)
    sums_of_k = TmaSums(k, constants.pop("S"), constants.pop("KT"), splits)
    del constants["K"], constants["PAIRWISE"]
    places = TmaTile(tile.room, tile.weight_rows, tile.rows, tile.rest, tile.stages, tile.warps)
    launch(
        tma_kernel,
        (tile.programs or blocks[0], blocks[1], 1 if parts is None else len(parts.sums)),
        described(call.x, [tile.rows, 64]),
        described(call.x, [tile.rest, 64]) if tile.rest else None,
        *[described(words, [box // 16, 16, 32]) if box else None for box in tile.boxes],
        squares if parts is None else None,
        Epilogue(call.bias, call.residual, call.out, call.argmax_keys, None if parts is None else parts.sums),
        *(rows, n, eps, call.limit, stride),
        SUMS=sums_of_k,
        TILE=places,
        STAY=tile.programs is not None,
        REGROUP=regroup_out,
        **constants,
        num_warps=tile.warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
        maxnreg=tile.registers,
    )
    return parts
