"""Launches products with quantised weights with the plans of `plan`, and the norm before them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.launch import described, launch
from fastspec.kernels.common.weights import Weight
from fastspec.kernels.gpu import gpu_of
from fastspec.kernels.product.launch import GLUON_TYPE, Call, permuted_for
from fastspec.kernels.product.norm import norm_rows
from fastspec.kernels.product.plan import L1_FIRST, cdiv
from fastspec.kernels.product.quantised import plan
from fastspec.kernels.product.quantised.few_rows import CodesEpilogue, CodesOperands, quantised_kernel
from fastspec.kernels.product.quantised.plan import FewRowsTile, Wide
from fastspec.kernels.product.quantised.wide_sm90 import WideEpilogue, codes_tma_kernel
from fastspec.kernels.product.split_k import Parts, add_up


def run(call: Call, pdl: bool, tile: FewRowsTile | Wide | None = None) -> None:
    """Launches a product with a quantised weight for any number of rows, and before it its norm.

    Args:
        tile: the tile. Default: the result of `tile_for`. The bits do not depend on it.
    """
    codes = call.weight.codes
    assert codes is not None
    rows, k = call.x.shape
    n, _ = codes.shape
    whole = call.gated or call.argmax_keys is not None
    tile = tile or tile_for(call.weight, rows, whole=whole)
    split = plan.split_of(codes.form, n, k)
    if isinstance(tile, Wide):
        _run_wide(call, tile, pdl)
        return
    x, row_factors = call.x, None
    if call.norm is not None:
        x, row_factors = norm_rows(x, *call.norm, split.split_k, split.k_tile, GLUON_TYPE[x.dtype], pdl)
    steps = cdiv(k, split.split_k * split.k_tile)
    shape: dict[str, Any] = {"K": k, "S": split.split_k, "KT": split.k_tile, "PAIRWISE": split.pairwise}
    shape |= {"R": tile.weight_rows, "BLOCKS": tile.blocks, "D": tile.depth, "XD": tile.row_depth}
    shape |= {"FORM": codes.form, "GROUP": codes.group, "PER": _words_of_scales(codes)}
    options: dict[str, Any] = {"num_warps": split.split_k, "launch_pdl": pdl, "enable_fp_fusion": False}
    if (n, k) in L1_FIRST:
        options["least_shared"] = 0
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    launch(
        quantised_kernel,
        (cdiv(n, tile.weight_rows), cdiv(rows, tile.blocks * plan.BLOCK)),
        CodesOperands(x.view(torch.int32), codes.words, codes.factors, codes.scales, codes.zeros),
        CodesEpilogue(row_factors, call.bias, call.residual, call.out, call.argmax_keys),
        *(rows, n, call.limit, 0 if call.argmax_keys is None else call.out.stride(0)),
        max(0, (steps - tile.depth - 1) // tile.depth),
        **shape,
        GATED=call.gate,
        PDL=pdl,
        **options,
    )


def tile_for(weight: Weight, rows: int, *, whole: bool = False) -> FewRowsTile | Wide:
    """Returns `plan.launch_of` for a quantised weight on its device."""
    codes = weight.codes
    assert codes is not None
    if rows < plan.WIDE_FROM.get(codes.form, rows + 1):  # on every GPU
        return plan.tile_of(codes.form, *codes.shape, rows)
    return plan.launch_of(codes.form, codes.group, *codes.shape, rows, gpu_of(weight.device), whole)


def launch_wide(
    tile: Wide, call: Call, squares: Tensor | None, pdl: bool, regroup_out: bool = False, raise_out: bool = False
) -> Parts | None:
    """Launches the TMA product with a quantised weight. For arguments and result see `launch_tma`.

    Args:
        raise_out: True if a regrouped result shall be multiplied by 2^64, exactly, for a next product with 8-bit codes.
    """
    codes = call.weight.codes
    assert codes is not None
    rows = len(call.x)
    n, k = codes.shape
    split = plan.split_of(codes.form, n, k)
    scales = codes.scales
    if scales is not None:
        scales = scales.view(torch.float16 if scales.dtype == torch.int32 else torch.float32)
    zeros = None if codes.zeros is None else codes.zeros.view(torch.bfloat16)
    eps = 0.0 if call.norm is None else call.norm[1]
    apart, sums = split.split_k // tile.splits, None
    if apart > 1:
        sums = call.x.new_empty(split.split_k, rows, n, dtype=torch.float32)
    pieces = 1 if codes.form == "int4" else 2
    shape: dict[str, Any] = {"K": k, "S": split.split_k, "SPLITS": tile.splits, "FORM": codes.form}
    shape |= {"GROUP": (codes.group, 1 if codes.scales is None else codes.scales.shape[2])}
    shape |= {"R": tile.weight_rows, "BM": tile.rows, "STAGES": tile.stages, "WARPS": tile.warps}
    launch(
        codes_tma_kernel,
        (cdiv(n, tile.weight_rows), cdiv(rows, tile.rows), apart),
        described(call.x, [tile.rows, 64]),
        described(codes.words.view(n // 16, -1, 32), [tile.weight_rows // 16, 8 * pieces, 32]),
        CodesOperands(None, None, codes.factors, scales, zeros),
        WideEpilogue(squares if sums is None else None, eps, call.bias, call.residual, call.out, call.argmax_keys),
        sums,
        *(rows, n, call.limit, 0 if call.argmax_keys is None else call.out.stride(0)),
        **shape,
        GATED=(call.gate, 2 if regroup_out and raise_out else int(regroup_out)),
        PDL=pdl,
        num_warps=tile.warps,
        maxnreg=tile.registers,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return None if sums is None else Parts(sums, 1, codes.factors)


def _run_wide(call: Call, tile: Wide, pdl: bool) -> None:
    """Launches the preparation of x, the product, and the sum of its splits, if it leaves them apart."""
    _, regrouped, squares = permuted_for(call.weight, call.x, call.norm, pdl)
    parts = launch_wide(tile, replace(call, x=regrouped), squares, pdl)
    if parts is not None:
        add_up(parts, squares, call.norm, call.bias, call.residual, call.out, pdl)


def _words_of_scales(codes: PackedCodes) -> int:
    """Returns the number of words that hold the scales of 16 rows for one group; with fp4, for 128 values of K."""
    return 0 if codes.scales is None else codes.scales[0, 0].numel()
