"""Launches packed matrix products with the launch configurations of plan.py.

Some products need two more kernels: one for the norm before the product, and one that adds split-K partial sums after
it.
"""

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
from fastspec.kernels.product.plan import FewRows, Split, Tile, Tma, Wide
from fastspec.kernels.product.quantised import plan as quantised
from fastspec.kernels.product.quantised.wide_sm90 import codes_tma_kernel
from fastspec.kernels.product.reader import WeightParts, parts_of_codes
from fastspec.kernels.product.split_k import Parts, add_up, permuted_rows
from fastspec.kernels.product.tma_sm90 import tma_kernel

GLUON_TYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
Norm = tuple[Tensor, float]  # weight [K] and epsilon


def tile_for(weight: Weight, rows: int, *, whole: bool = False, gated: bool = False) -> Tile:
    """Returns the launch configuration for a weight and `rows` rows of x, on the weight's device.

    For `whole` and `gated` see `plan.tile_of`.
    """
    gpu, codes = gpu_of(weight.device), weight.codes
    if codes is not None:
        return quantised.launch_of(codes.form, codes.group, *weight.shape, rows, gpu, whole or gated)
    return plan.tile_of(*weight.shape, rows, gpu, whole, gated, split_for(weight))


def split_for(weight: Weight) -> Split:
    """Returns the split of the sum over K into partial sums, for products with this weight."""
    if weight.codes is not None:
        return quantised.split_of(weight.codes.form, *weight.shape)
    tree = weight.tree and gpu_of(weight.device).hopper
    return plan.split_for(weight.shape, weight.whole, tree)


# Groups of kernel arguments. Triton compiles a kernel again if an integer inside a tuple becomes 1 or a multiple of 16,
# or stops being so. So integers that differ between passes are separate parameters.


class Rows(NamedTuple):
    """Kernel arguments for the rows of x that are multiplied with a weight, and for the norm before the product.

    Attributes:
        x_ptr: int32 words [M, K / 2], two values each.
        gamma_ptr: int32 words [K / 2] of the norm's weight, if the kernel computes the norm itself. None: it does not.
        scale_ptr: fp32 [M], 1 / sqrt(mean(x^2) + eps) of each row, if x is already multiplied with gamma. None: sums
            are not multiplied by it.
        eps: epsilon of the norm. None with codes, whose norm another kernel computes.
    """

    x_ptr: Any
    gamma_ptr: Any
    scale_ptr: Any
    eps: Any


class Epilogue(NamedTuple):
    """Kernel arguments for the operations on complete sums over K: bias, residual, argmax, output.

    Attributes:
        bias_ptr: [N]; None: no bias.
        residual_ptr: [M, width]; None: no residual. The width of the output is N, or N / 2 if gated.
        out_ptr: [M, width]. With `keys_ptr`: int64 ids or uint64 keys, with a stride.
        keys_ptr: int64 [M + 1], scratch of an argmax. None: no argmax.
        ids_ptr: int64 [N], the id of each logit in an argmax. None: the logit's place.
        parts_ptr: fp32 [S / PAIRWISE, M, N], or [S, M, N] for codes. If given, the kernel stores partial sums there,
            and nothing else. TMA kernels only.
    """

    bias_ptr: Any
    residual_ptr: Any
    out_ptr: Any
    keys_ptr: Any
    ids_ptr: Any = None
    parts_ptr: Any = None


@dataclass(frozen=True, slots=True)
class Call:
    """Operands of one packed product. None: the operand is absent.

    Attributes:
        x: [M, K], contiguous.
        weight: [N, K].
        out: [M, N or N/2]; with `argmax_keys` ids or keys [M].
        bias, norm, residual: see `packed_linear`.
        argmax_keys: int64 [M + 1], scratch of an argmax. None: no argmax.
        limit: only ids below it are compared by an argmax.
        ids: int64 [N], the id of each logit in an argmax. None: the logit's place.
        gated: True if silu(gate) * up follows the product.
        gelu: True for gelu instead of silu.
    """

    x: Tensor
    weight: Weight
    out: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    argmax_keys: Tensor | None = None
    limit: int = 0
    ids: Tensor | None = None
    gated: bool = False
    gelu: bool = False

    @property
    def gate(self) -> int:
        """GATED of the kernels: 0 for no gate, 1 for silu(gate) * up, 2 for gelu(gate) * up."""
        return self.gated + (self.gated and self.gelu)

    @property
    def out_stride(self) -> int:
        """Elements between two ids in `out` of an argmax. 0 without an argmax."""
        return 0 if self.argmax_keys is None else self.out.stride(0)


def run(call: Call, pdl: bool, tile: Tile | None = None) -> None:
    """Launches the kernel of a packed product.

    Also launches kernels for the norm of x and for the sum of partial sums, if the first kernel does not compute them.

    Args:
        call: operands and result.
        pdl: see `packed_linear`.
        tile: launch configuration. None: the result of `tile_for`. The bits of the result do not depend on it.
    """
    rows, (n, k) = len(call.x), call.weight.shape
    tile = tile or tile_for(call.weight, rows, whole=call.argmax_keys is not None, gated=call.gated)
    split, dtype = split_for(call.weight), GLUON_TYPE[call.x.dtype]
    if isinstance(tile, Tma | Wide):
        _, regrouped, squares = permuted_for(call.weight, call.x, call.norm, pdl)
        launch_and_sum(tile, replace(call, x=regrouped), squares, pdl)
        return
    x, gamma, scale = call.x, None, None
    if call.norm is not None and isinstance(tile, FewRows) and tile.norms:
        gamma = call.norm[0].view(torch.int32)
    elif call.norm is not None:
        x, scale = norm_rows(x, *call.norm, split.split_k, split.k_tile, dtype, pdl)
    eps = 0.0 if call.norm is None else call.norm[1]
    inputs = Rows(x.view(torch.int32), gamma, scale, eps if call.weight.codes is None else None)
    epilogue = Epilogue(call.bias, call.residual, call.out, call.argmax_keys, call.ids)
    numbers = rows, n, call.limit, call.out_stride
    shape = {"K": k, "S": split.split_k, "R": tile.weight_rows, "D": tile.depth}
    shape |= {"GATED": call.gate, "PDL": pdl, "DTYPE": dtype}
    # no fused multiply-add except where kernels ask for it: two kernels must round equally
    options: dict[str, Any] = {"launch_pdl": pdl, "enable_fp_fusion": False}
    steps = plan.cdiv(k, split.split_k * split.k_tile)
    if isinstance(tile, FewRows):
        grid = (plan.cdiv(n, tile.weight_rows), plan.cdiv(rows, tile.rows))
        loops = max(0, (steps - tile.depth - 1) // tile.depth)
        shape |= {"KT": split.k_tile, "PAIRWISE": split.kernel_pairwise, "BM": tile.rows, "XD": tile.row_depth}
        shape |= {"AHEAD": tile.ahead, "num_warps": split.split_k}
        if (n, k) in plan.L1_FIRST:
            options["least_shared"] = 0
        weight, form = parts_of(call.weight)
        launch(few_rows_kernel, grid, inputs, weight, epilogue, *numbers, loops, **shape, **form, **options)
        return
    grid = (plan.cdiv(n, tile.weight_rows), plan.cdiv(rows, tile.rows * tile.groups))
    turns = plan.cdiv(steps * (split.k_tile // plan.STEP), tile.depth)
    shape |= {"KT": split.tile_of_k(k), "PAIRWISE": split.pairwise, "num_warps": tile.warps}
    shape |= {"GROUP": tile.rows, "GROUPS": tile.groups, "WARPS": tile.warps}
    launch(many_rows_kernel, grid, inputs, call.weight.words(), epilogue, *numbers, turns, **shape, **options)


def parts_of(weight: Weight) -> tuple[WeightParts, dict[str, Any]]:
    """Returns a weight's tensors, and the constexpr arguments FORM, GROUP and PER with which reader.py loads them."""
    codes = weight.codes
    if codes is None:
        return WeightParts(weight.words()), {"FORM": "values", "GROUP": 0, "PER": 0}
    return parts_of_codes(codes)


def permuted_for(
    weight: Weight, x: Tensor, norm: Norm | None, pdl: bool, parts: Parts | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Prepares the rows of x for a product with `weight` by a TMA kernel.

    For the other arguments and the three results see `permuted_rows`.
    """
    split = split_for(weight)
    cut = split.split_k, split.k_tile
    return permuted_rows(x, norm, cut, GLUON_TYPE[x.dtype], pdl, parts, bias, reads_raised(weight))


def reads_raised(weight: Weight) -> bool:
    """True if the weight has 8-bit codes. Their TMA kernel reads rows of x that are multiplied by 2^64."""
    return weight.codes is not None and weight.codes.form in quantised.EIGHT_BITS


def launch_and_sum(tile: Tma | Wide, call: Call, squares: Tensor | None, pdl: bool) -> None:
    """Launches a TMA kernel, and the kernel that adds its partial sums if it stores any.

    For the arguments see `launch_tma`.
    """
    parts = launch_tma(tile, call, squares, pdl)
    if parts is not None:
        add_up(parts, squares, call.norm, call.bias, call.residual, call.out, pdl)


def launch_tma(
    tile: Tma | Wide,
    call: Call,
    squares: Tensor | None,
    pdl: bool,
    regroup_out: bool = False,
    raise_out: bool = False,
) -> Parts | None:
    """Launches the TMA kernel of `tile`: for 16-bit weights (`Tma`) or for codes (`Wide`).

    Args:
        call: operands; x is the result of `permuted_for`.
        squares: sums of squares of x from `permuted_for`. None: no norm.
        pdl: see `packed_linear`.
        regroup_out: True if the result is stored regrouped, as packing.py describes, like x.
        raise_out: True if a regrouped result is multiplied by 2^64, exactly, for a next product with 8-bit codes. Only
            if the weight of this product has codes.

    Returns:
        Partial sums, if the kernel stores these. `add_up` adds them, and then the bias and residual of `call`. None:
        the kernel has written the complete result to `call.out`.
    """
    n, _ = call.weight.shape
    parts = _parts_for(tile, call)
    sums = None if parts is None else parts.sums
    epilogue = Epilogue(call.bias, call.residual, call.out, call.argmax_keys, call.ids, sums)
    eps = 0.0 if call.norm is None else call.norm[1]
    ends = squares if parts is None else None, epilogue, len(call.x), n, eps, call.limit, call.out_stride
    if isinstance(tile, Tma):
        _launch_values(tile, call, ends, 1 if sums is None else len(sums), regroup_out, pdl)
    else:
        _launch_codes(tile, call, ends, regroup_out, raise_out, pdl)
    return parts


def _tma_options(tile: Tma | Wide, call: Call, regroup_out: bool, pdl: bool) -> dict[str, Any]:
    """Returns the constexpr arguments and launch options that the two TMA kernels have in common."""
    constants = {"GATED": call.gate, "REGROUP": regroup_out, "PDL": pdl, "WARPS": tile.warps, "STAGES": tile.stages}
    options = {"num_warps": tile.warps, "launch_pdl": pdl, "enable_fp_fusion": False, "maxnreg": tile.registers}
    return {**constants, **options}


def _parts_for(tile: Tma | Wide, call: Call) -> Parts | None:
    """Allocates the partial sums that a TMA kernel stores. None if its CTAs sum over all of K."""
    rows, (n, _) = len(call.x), call.weight.shape
    split, codes = split_for(call.weight), call.weight.codes
    if isinstance(tile, Wide):
        if tile.splits == split.split_k:
            return None
        assert codes is not None
        return Parts(call.x.new_empty(split.split_k, rows, n, dtype=torch.float32), 1, codes.factors)
    if tile.split_k is None:
        return None
    sums = call.x.new_empty(split.split_k // tile.split_k, rows, n, dtype=torch.float32)
    return Parts(sums, split.kernel_pairwise // tile.split_k)


def _launch_values(tile: Tma, call: Call, ends: tuple[Any, ...], shares: int, regroup_out: bool, pdl: bool) -> None:
    """Launches the TMA kernel for a 16-bit weight.

    Args:
        ends: last arguments of `tma_kernel` before the constexpr ones, from `squares_ptr` to `out_stride`.
        shares: number of CTAs among which K is divided.
        regroup_out, pdl: see `launch_tma`.
    """
    n, k = call.weight.shape
    split, words = split_for(call.weight), call.weight.words(n // 16, k // 4, 32)
    launch(
        tma_kernel,
        (tile.programs or plan.cdiv(n, tile.weight_rows), plan.cdiv(len(call.x), tile.rows + tile.rest), shares),
        described(call.x, [tile.rows, 64]),
        described(call.x, [tile.rest, 64]) if tile.rest else None,
        *[described(words, [box // 16, 16, 32]) if box else None for box in tile.boxes],
        *ends,
        **{"K": k, "S": split.split_k, "KT": split.tile_of_k(k), "PAIRWISE": tile.split_k or split.pairwise},
        **{"R": tile.room, "OWN": tile.weight_rows, "GROUP": tile.rows, "REST": tile.rest},
        STAY=tile.programs is not None,
        DTYPE=GLUON_TYPE[call.x.dtype],
        **_tma_options(tile, call, regroup_out, pdl),
    )


def _launch_codes(tile: Wide, call: Call, ends: tuple[Any, ...], regroup_out: bool, raise_out: bool, pdl: bool) -> None:
    """Launches the TMA kernel for a quantised weight. For `ends` see `_launch_values`, for the others `launch_tma`."""
    codes = call.weight.codes
    assert codes is not None
    n, k = codes.shape
    splits = quantised.split_of(codes.form, n, k).split_k
    scales = codes.scales
    if scales is not None:
        scales = scales.view(torch.float16 if scales.dtype == torch.int32 else torch.float32)
    zeros = None if codes.zeros is None else codes.zeros.view(torch.bfloat16)
    pieces = 1 if codes.form == "int4" else 2
    launch(
        codes_tma_kernel,
        (plan.cdiv(n, tile.weight_rows), plan.cdiv(len(call.x), tile.rows), splits // tile.splits),
        described(call.x, [tile.rows, 64]),
        described(codes.words.view(n // 16, -1, 32), [tile.weight_rows // 16, 8 * pieces, 32]),
        WeightParts(None, codes.factors, scales, zeros),
        *ends,
        **{"K": k, "S": splits, "SPLITS": tile.splits},
        **{"GROUP": codes.group, "PAIRS": 1 if codes.scales is None else codes.scales.shape[2]},
        FORM=codes.form,
        **{"R": tile.weight_rows, "BM": tile.rows, "RAISE": raise_out},
        **_tma_options(tile, call, regroup_out, pdl),
    )
