"""Launches of the decoding kernels, as plan.py has planned them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.attention import plan
from fastspec.kernels.attention.combine import gather_kernel
from fastspec.kernels.attention.decode import _decode_kernel
from fastspec.kernels.attention.decode_mma import fragment_kernel
from fastspec.kernels.attention.decode_mma_batch import batch_kernel
from fastspec.kernels.attention.decode_tma_sm90 import shares_kernel
from fastspec.kernels.attention.plan import Gpu, LaunchPlan, Pass
from fastspec.kernels.attention.tma_parts import WIDTH, piece_of
from fastspec.kernels.common.launch import described, has_pdl, launch, multiprocessors


def gpu_of(device: torch.device) -> Gpu:
    """What plans depend on of a device; below sm_90, where none depends on it, and off CUDA: ((0, 0), 1)."""
    if not has_pdl(device):
        return Gpu((0, 0), 1)
    return Gpu(torch.cuda.get_device_capability(device), multiprocessors(device))


def pass_of(tensors: tuple[Any, ...], num_heads: int) -> Pass:
    """Sizes of a pass over `attend`'s tensors, in its order."""
    (batch, num_queries), kv_heads, dim = tensors[8].shape, tensors[5].shape[2], tensors[5].shape[3]
    return Pass(num_queries * (num_heads // kv_heads), batch * kv_heads, dim)


def _start(kernel: Any, planned: LaunchPlan, *arguments: Any, common: dict[str, Any], **constants: Any) -> None:
    constants = {**constants, **planned.constants, **common, **planned.options}
    launch(kernel, planned.grid, *arguments, enable_fp_fusion=False, **constants)


def _common(tensors: tuple[Any, ...], out: Tensor, window: int | None, pdl: bool) -> dict[str, Any]:
    """Constants and options that all launches of a pass have."""
    kv_heads, dim = tensors[5].shape[2:]
    common = {"WINDOW": window or 0, "KV_HEADS": kv_heads, "GROUP": out.shape[2] // (kv_heads * dim), "PDL": pdl}
    return {**common, **({"launch_pdl": True} if pdl else {})}


def start_tiles(
    planned: LaunchPlan,
    tensors: tuple[Any, ...],
    out: Tensor,
    work: tuple[Tensor, Tensor],
    sizes: tuple[float, ...],
    window: int | None,
    pdl: bool,
) -> None:
    """Launches `_decode_kernel`.

    Args:
        planned: by `plan.tiles_plan`.
        tensors: `attend`'s, in its order.
        out: [B, Q, H * D], written.
        work: partial sums, fp32, written; and counters.
        sizes: what follows in the arguments of the kernel.
        window: of attention; None for none.
        pdl: whether the kernel starts early.
    """
    common = _common(tensors, out, window, pdl)
    constants = {"PAGE_SIZE": tensors[5].shape[1], "NORM": tensors[3] is not None}
    _start(_decode_kernel, planned, *tensors, out, *work, *sizes, common=common, **constants)


def start_early(
    tensors: tuple[Any, ...],
    out: Tensor,
    work: tuple[Tensor, Tensor],
    sizes: tuple[float, ...],
    splits: int,
    window: int | None,
    pdl: bool,
    regroup: bool,
) -> None:
    """Launches fragment_kernel or batch_kernel. Rows of the pass that lie beyond the splits are left as junk.

    Args:
        tensors: `attend`'s, in its order.
        out: [B, Q, H * D], written.
        work: partial sums, fp32, with room for B * Q * H * splits * (D + 1) where splits > 1, written; and counters.
        sizes: what follows in the arguments of the kernels.
        splits: that the pass has room for.
        window: of attention; None for none.
        pdl: whether the kernel starts early.
        regroup: rows of out are left as the TMA pipeline of the next product reads them.
    """
    common = _common(tensors, out, window, pdl)
    shape = pass_of(tensors, common["GROUP"] * common["KV_HEADS"])
    planned = plan.early_plan(gpu_of(out.device), shape, splits)
    kernel = batch_kernel if planned.kernel == "batch_kernel" else fragment_kernel
    constants = {"PAGE_SIZE": tensors[5].shape[1], "REGROUP": regroup}
    _start(kernel, planned, *tensors, out, *work, *sizes, splits, common=common, **constants)


def start_late(
    tensors: tuple[Any, ...],
    out: Tensor,
    partials: Tensor,
    sizes: tuple[float, ...],
    splits: int,
    window: int | None,
    pdl: bool,
) -> None:
    """Launches shares_kernel, then gather_kernel where there is more than one split.

    Args:
        tensors: `attend`'s, in its order.
        out: [B, Q, H * D], written.
        partials: fp32, with room for B * Q * H * splits * (D + 1) where splits > 1; written.
        sizes: what follows `splits` in the arguments of shares_kernel.
        splits: of the longest row that the pass has room for.
        window: of attention; None for none.
        pdl: whether the kernels start early.
    """
    keys, values, positions = tensors[5], tensors[6], tensors[8]
    page_size, kv_heads, dim = keys.shape[1:]
    common = _common(tensors, out, window, pdl)
    shape = pass_of(tensors, common["GROUP"] * kv_heads)
    planned = plan.late_plan(gpu_of(out.device), shape, splits)
    block = [piece_of(page_size, planned.constants["KEYS"]), WIDTH.value]
    slots = [described(cache.view(-1, kv_heads * dim), block) for cache in (keys, values)]
    arguments = (*slots, *tensors, out, partials, splits, *sizes)
    _start(shares_kernel, planned, *arguments, common=common, PAGE_SIZE=page_size)
    if splits > 1:
        counts = (positions.shape[1], shape.pairs, splits)
        _start(gather_kernel, plan.gather_plan(shape), positions, out, partials, *counts, common=common)
