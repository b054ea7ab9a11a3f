"""Launches the attention kernels of decode passes, with the grids and tile sizes that plan.py computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.attention import plan
from fastspec.kernels.attention.arguments import NewTokens, PagedCache, Scoring, WorkArea, scoring_of
from fastspec.kernels.attention.decode.combine import gather_kernel
from fastspec.kernels.attention.decode.mma import fragment_kernel
from fastspec.kernels.attention.decode.mma_batch import batch_kernel
from fastspec.kernels.attention.decode.portable import _decode_kernel
from fastspec.kernels.attention.decode.tma_parts import WIDTH, piece_of
from fastspec.kernels.attention.decode.tma_sm90 import shares_kernel
from fastspec.kernels.attention.plan import LaunchPlan, Pass
from fastspec.kernels.common.kv_scales import KVScales
from fastspec.kernels.common.launch import described, launch
from fastspec.kernels.gpu import gpu_of
from fastspec.shapes import AttentionRule


@dataclass(frozen=True, slots=True)
class DecodingPass:
    """Arguments that all attention launches of one layer in a decode pass get.

    Attributes:
        tokens: the new tokens; only read.
        cache: the layer's KV cache. The launches write K and V of the new tokens, and read K and V of all positions.
        out: [B, Q, H * D], output.
        work: scratch memory for partial results. With more than one split, `partials` needs
            B * Q * H * splits * (D + 1) elements.
        pdl: True if the kernels use programmatic dependent launch.
        rule, sinks: arguments of `reference.attend`.
        scales: scales of an 8-bit cache. None: the cache has 16 or 32 bits.
    """

    tokens: NewTokens
    cache: PagedCache
    out: Tensor
    work: WorkArea
    pdl: bool
    rule: AttentionRule
    sinks: Tensor | None
    scales: KVScales | None

    @property
    def num_queries(self) -> int:
        """Number of new tokens of each batch row, Q."""
        return int(self.tokens.positions.shape[1])

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        kv_heads, dim = self.cache.k.shape[2:]
        return int(self.out.shape[2] // (kv_heads * dim))

    @property
    def narrow(self) -> bool:
        """True if the cache stores K and V in 8 bits."""
        return bool(self.cache.k.dtype.itemsize == 1)

    @property
    def sizes(self) -> Pass:
        """Sizes of the decode pass on which launch plans depend."""
        kv_heads, dim = self.cache.k.shape[2:]
        return Pass(self.num_queries * self.group, len(self.tokens.positions) * kv_heads, dim)

    @property
    def scoring(self) -> Scoring:
        """Kernel argument `Scoring`, which converts products q . k to scores."""
        return scoring_of(self.rule, self.sinks, self.sizes.dim, self.scales)


def _start(kernel: Any, planned: LaunchPlan, call: DecodingPass, *arguments: Any, **constants: Any) -> None:
    constants |= {"WINDOW": call.rule.window or 0, "KV_HEADS": call.cache.k.shape[2], "GROUP": call.group}
    options = {**planned.options, **({"launch_pdl": True} if call.pdl else {})}
    launch(
        kernel,
        planned.grid,
        *arguments,
        enable_fp_fusion=False,
        PDL=call.pdl,
        **planned.constants,
        **constants,
        **options,
    )


def start_tiles(call: DecodingPass, planned: LaunchPlan, split_keys: int) -> None:
    """Launches the portable kernel `_decode_kernel`.

    Args:
        call: arguments of the pass.
        planned: result of `plan.tiles_plan`.
        split_keys: number of keys in a split.
    """
    counts = (split_keys, call.num_queries, call.sizes.pairs)
    arguments = (call.tokens, call.cache, call.out, call.work, *counts, call.scoring)
    _start(_decode_kernel, planned, call, *arguments, PAGE_SIZE=call.cache.k.shape[1])


def start_early(call: DecodingPass, splits: int, regroup: bool) -> None:
    """Launches `fragment_kernel` or `batch_kernel` for early rows, which are at positions below `plan.LATE_FROM`.

    Args:
        call: arguments of the pass.
        splits: number of splits of the longest early row. The output of rows with more splits is undefined.
        regroup: True to write `call.out` with the column order that packing.py describes, for the TMA pipeline of the
            next matrix product.
    """
    planned = plan.early_plan(gpu_of(call.out.device), call.sizes, splits, call.narrow)
    kernel = batch_kernel if planned.kernel == "batch_kernel" else fragment_kernel
    arguments = (call.tokens, call.cache, call.out, call.work, call.num_queries, call.sizes.pairs, splits)
    _start(kernel, planned, call, *arguments, call.scoring, PAGE_SIZE=call.cache.k.shape[1], REGROUP=regroup)


def start_late(call: DecodingPass, splits: int) -> None:
    """Launches `shares_kernel` for late rows, which are at positions from `plan.LATE_FROM` on.

    With more than one split, it then launches `gather_kernel`.

    Args:
        call: arguments of the pass.
        splits: number of splits of the longest row.
    """
    keys, values, partials = call.cache.k, call.cache.v, call.work.partials
    page_size, kv_heads, dim = keys.shape[1:]
    planned = plan.late_plan(gpu_of(call.out.device), call.sizes, splits, call.narrow)
    block = [piece_of(page_size, planned.constants["KEYS"]), dim if call.narrow else WIDTH.value]
    if call.narrow:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    slots = [described(each.view(-1, kv_heads * dim), block) for each in (keys, values)]
    counts = (call.num_queries, call.sizes.pairs, splits)
    arguments = (*slots, call.tokens, call.cache, call.out, partials, *counts, call.scoring)
    _start(shares_kernel, planned, call, *arguments, PAGE_SIZE=page_size)
    if splits > 1:
        arguments = (call.tokens.positions, call.out, partials, *counts, call.scoring)
        _start(gather_kernel, plan.gather_plan(call.sizes), call, *arguments)
