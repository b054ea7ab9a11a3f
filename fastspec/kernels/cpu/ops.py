"""`CpuOps`: the operations of a decoding step on the CPU, with matrix products by torch's CPU libraries."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fastspec.kernels import reference
from fastspec.kernels.common.kv_scales import FP8
from fastspec.kernels.common.weights import Format, Weight
from fastspec.kernels.cpu import attention, lookup, state_space
from fastspec.kernels.cpu.blocked import WIDE, is_supported
from fastspec.kernels.ops import Ops
from fastspec.kernels.reference.attention import AttendCall
from fastspec.shapes import UNTILED, Tiling


class CpuOps(Ops):
    """Ops in torch, except matrix products with blocked weights (cpu/blocked.py) and attention (cpu/attention.py).

    Prompts of Mamba-2 pass in chunks (cpu/state_space.py). Lookup reads no further than the longest row
    (cpu/lookup.py).

    Row-major weights are multiplied as in `reference.linear`. Row-major are all fp16 weights, and the weights of
    hosted models, of experts and of models that are split over ranks.
    """

    name = "cpu"

    @staticmethod
    @override
    def weight_format(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Format:
        return "blocked" if is_supported(dtype) else "rows"

    @override
    def workspace(
        self, device: torch.device, batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]
    ) -> Any:
        return attention.CpuWork(heads)

    @staticmethod
    @override
    def linear(
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        tiling: Tiling = UNTILED,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        gelu: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if weight.blocked is None:
            return reference.linear(
                x, weight, bias, tiling, norm=norm, residual=residual, gated=gated, gelu=gelu, out_dtype=out_dtype
            )
        if norm is not None:
            x = rms_norm(x, *norm)
        wide = tiling.rows is not None and tiling.rows >= WIDE  # a prefill pass
        flat = weight.blocked.product(x.reshape(-1, x.shape[-1]), bias, out_dtype, wide=wide)
        product = flat.view(*x.shape[:-1], -1)
        if gated:
            product = reference.gelu_tanh_mul(product) if gelu else reference.silu_mul(product)
        return product if residual is None else residual + product

    @staticmethod
    @override
    def argmax(
        x: Tensor,
        weight: Weight,
        limit: int,
        tiling: Tiling = UNTILED,
        *,
        norm: tuple[Tensor, float] | None = None,
        work: Any,
        out: Tensor,
        ids: Tensor | None = None,
    ) -> None:
        logits = CpuOps.linear(x, weight, None, tiling, norm=norm, out_dtype=torch.float32)
        reference.pick(logits, limit, out, ids)

    @staticmethod
    @override
    def attend(call: AttendCall, work: Any = None) -> Tensor:
        if work is None or call.keys.dtype == FP8:
            return reference.attend(call)
        return attention.attend(call, work)

    look_up = staticmethod(lookup.look_up)
    mamba = staticmethod(state_space.mamba)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes RMSNorm over the last axis, as `reference.rms_norm`, with fewer calls of torch.

    The order of a row's sum does not depend on other rows.
    """
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


CPU_OPS = CpuOps()
