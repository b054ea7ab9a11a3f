"""Launches of products with quantised weights, as `plan` says, and of the norm in front of them."""

from __future__ import annotations

from typing import Any

import torch

from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.launch import launch
from fastspec.kernels.linear.launches import GLUON_TYPE, Call
from fastspec.kernels.linear.norm import norm_rows
from fastspec.kernels.linear.plan import L1_FIRST, cdiv
from fastspec.kernels.linear.quantised import plan
from fastspec.kernels.linear.quantised.plan import Tile
from fastspec.kernels.linear.quantised.small_m import Ends, Given, quantised_kernel


def run(call: Call, pdl: bool, tile: Tile | None = None) -> None:
    """Launches a product of a quantised weight with any number of rows, and before it its norm.

    Args:
        tile: by default the plan's; bits do not depend on it.
    """
    codes = call.weight.codes
    assert codes is not None
    rows, k = call.x.shape
    n, _ = codes.shape
    tile = tile or plan.tile_of(codes.form, n, k, rows)
    split = plan.split_of(codes.form, n, k)
    x, row_factors = call.x, None
    if call.norm is not None:
        x, row_factors = norm_rows(x, *call.norm, split.split_k, split.k_tile, GLUON_TYPE[x.dtype], pdl)
    steps = cdiv(k, split.split_k * split.k_tile)
    shape: dict[str, Any] = {"K": k, "S": split.split_k, "KT": split.k_tile, "TOGETHER": split.pairwise}
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
        Given(x.view(torch.int32), codes.words, codes.factors, codes.scales, codes.zeros),
        Ends(row_factors, call.bias, call.residual, call.out, call.argmax_keys),
        *(rows, n, call.limit, 0 if call.argmax_keys is None else call.out.stride(0)),
        max(0, (steps - tile.depth - 1) // tile.depth),
        **shape,
        GATED=call.gated,
        PDL=pdl,
        **options,
    )


def _words_of_scales(codes: PackedCodes) -> int:
    """Words that a tile of 16 rows has for the scales of one group, of fp4 for those of 128 values of K."""
    return 0 if codes.scales is None else codes.scales[0, 0].numel()
