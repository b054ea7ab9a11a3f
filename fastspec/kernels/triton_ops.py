"""`TritonOps`: the operations of a decoding step as Triton kernels, for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fastspec.kernels import gelu as gelu_kernels
from fastspec.kernels import reference
from fastspec.kernels.attention.dispatch import MAX_SPLIT_QUERIES, AttendWork, attend_work, attend_work_bytes
from fastspec.kernels.attention.dispatch import attend as attend_paged
from fastspec.kernels.attention.rope import store_heads
from fastspec.kernels.common import packing
from fastspec.kernels.common.checks import check_ieee
from fastspec.kernels.common.code_packing import can_pack_codes
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.launch import compiling, compiling_behind, is_brief
from fastspec.kernels.common.weights import Format, Weight
from fastspec.kernels.embed import embed as embed_rows
from fastspec.kernels.experts import dispatch as mixtures
from fastspec.kernels.experts import router as routers
from fastspec.kernels.experts.route import route as route_rows
from fastspec.kernels.experts.route import route_normed as route_normed_rows
from fastspec.kernels.feed_rows import feed_rows
from fastspec.kernels.gpu import generation_of, has_pdl, has_warp_groups
from fastspec.kernels.joined import joined_norms as join_rows
from fastspec.kernels.lookup.dispatch import look_up
from fastspec.kernels.norm import add_norm as add_norm_rows
from fastspec.kernels.norm import norm as norm_rows
from fastspec.kernels.ops import Ops
from fastspec.kernels.product.dispatch import packed_argmax, packed_linear
from fastspec.kernels.product.launch import reads_raised
from fastspec.kernels.product.layer_tail import layer_tail as packed_layer_tail
from fastspec.kernels.product.layer_tail import runs_on_tma
from fastspec.kernels.product.plan import TMA_ROWS
from fastspec.kernels.product.portable.products import tile_argmax, tile_linear
from fastspec.kernels.product.prefill import prefill_linear
from fastspec.kernels.product.quantised.plan import MAX_ROWS
from fastspec.kernels.product.quantised.prompts import prefill_quantised
from fastspec.kernels.recurrent.dispatch import delta_rule
from fastspec.kernels.recurrent.gated_norm import gated, gated_norm
from fastspec.kernels.recurrent.state_space import mamba, mamba_norm, selective_conv, selective_scan, short_conv
from fastspec.kernels.reference.attention import AttendCall
from fastspec.kernels.reference.layer import Layer, Reduce
from fastspec.kernels.rotate import rotate as rotate_heads
from fastspec.kernels.round_codes import pack_rounded
from fastspec.kernels.sampling.commit import commit, scratch_of
from fastspec.kernels.sampling.draw import sampled_draw
from fastspec.kernels.sampling.greedy_commit import record_logprobs, verify_commit
from fastspec.kernels.sampling.logits import sampled_work, sampled_work_bytes
from fastspec.kernels.sampling.logprobs import record_work, record_work_bytes
from fastspec.kernels.sampling.processed import processed_logits
from fastspec.kernels.sampling.publish import publish
from fastspec.kernels.sampling.sampled_commit import sampled_commit
from fastspec.shapes import UNTILED, Tiling

DECODE_ROWS = 64  # largest number of rows of a matrix product in a decoding step; larger tilings belong to prefill


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of the ops `attend` and `argmax` for one model.

    Attributes:
        attend: scratch memory of `attend`.
        argmax: int64, zeros between launches. For each logits row, the key (`reference.keys_of`) of the largest logit
            so far. The last element is a counter.
    """

    attend: AttendWork
    argmax: Tensor


class TritonOps(Ops):
    """Ops that run Triton kernels. Ops without a kernel are inherited from `Ops`, which defines all signatures."""

    name = "triton"
    logit_words = 0
    logit_bytes = 384 * 2**20

    feed_rows = staticmethod(feed_rows)
    embed = staticmethod(embed_rows)
    norm = staticmethod(norm_rows)
    add_norm = staticmethod(add_norm_rows)
    route = staticmethod(route_rows)
    route_normed = staticmethod(route_normed_rows)
    experts = staticmethod(mixtures.experts)
    experts_normed = staticmethod(mixtures.experts_normed)
    rotate = staticmethod(rotate_heads)
    store_heads = staticmethod(store_heads)
    delta_rule = staticmethod(delta_rule)
    gated_norm = staticmethod(gated_norm)
    gated = staticmethod(gated)
    short_conv = staticmethod(short_conv)
    mamba = staticmethod(mamba)
    mamba_norm = staticmethod(mamba_norm)
    selective_conv = staticmethod(selective_conv)
    selective_scan = staticmethod(selective_scan)
    look_up = staticmethod(look_up)
    verify_commit = staticmethod(verify_commit)
    sampled_commit = staticmethod(sampled_commit)
    sampled_draw = staticmethod(sampled_draw)
    processed_logits = staticmethod(processed_logits)
    commit = staticmethod(commit)
    record_logprobs = staticmethod(record_logprobs)
    publish = staticmethod(publish)
    pack_rounded = staticmethod(pack_rounded)
    keeps_experts = staticmethod(mixtures.keeps_experts)
    commit_scratch = staticmethod(scratch_of)
    sampled_work = staticmethod(sampled_work)
    sampled_work_bytes = staticmethod(sampled_work_bytes)
    record_work = staticmethod(record_work)
    record_work_bytes = staticmethod(record_work_bytes)
    compiling = staticmethod(compiling)
    compiling_behind = staticmethod(compiling_behind)
    is_brief = staticmethod(is_brief)

    @override
    def workspace(
        self, device: torch.device, batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]
    ) -> Workspace:
        argmax = torch.zeros(batch * max_queries + 1, dtype=torch.int64, device=device)
        return Workspace(attend_work(device, batch * max_queries, max_positions, heads), argmax)

    @staticmethod
    @override
    def workspace_bytes(batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]) -> int:
        return 8 * (batch * max_queries + 1) + attend_work_bytes(batch * max_queries, max_positions, heads)

    @staticmethod
    @override
    def weight_format(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Format:
        packable = packing.can_pack(shape, dtype) and generation_of(device).supported
        return "packed" if packable else "rows"

    @staticmethod
    @override
    def keeps_codes(shape: tuple[int, int], kind: CodesKind, dtype: torch.dtype, device: torch.device) -> bool:
        runs = dtype == torch.bfloat16 and generation_of(device).supported
        return runs and can_pack_codes(shape, kind)

    @staticmethod
    @override
    def joins_shared(dtype: torch.dtype, hidden: int, device: torch.device) -> bool:
        return dtype.itemsize == 2 and hidden <= routers.MAX_WIDTH

    @staticmethod
    @override
    def attend(call: AttendCall, work: Any = None) -> Tensor:
        product = call.product
        # attention does not regroup its result for a product with 8-bit codes. Such a product also needs its rows times
        # 2^64, and the kernel that multiplies them regroups them at no cost
        regroup = (
            product is not None
            and not reads_raised(product)
            and _steps_on_tma([product], call.positions.numel(), call.tiling)
        )
        return attend_paged(call, work.attend, regroup)

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
        """Computes x W^T [+ bias] and its epilogue, as `reference.linear`, with the kernel for the weight and x.

        | weight [N, K] | pass | kernel |
        |---|---|---|
        | packed | decoding | `packed_linear` |
        | packed | decoding of more than TMA_ROWS rows with exact=False | `prefill_linear`, which is faster there |
        | packed | prefill | `prefill_linear`: a row has the same bits for any number of tokens |
        | quantised | decoding, or up to MAX_ROWS rows | `packed_linear`, which reads fewer bytes |
        | quantised | prefill of more rows | `prefill_quantised` |
        | row-major, 16 bits | decoding, or N < PACKED_ROWS | `tile_linear`: cuBLAS's bits depend on the row count |
        | row-major, fp32 | decoding | `tile_linear`: cuBLAS would need padding to the largest number of rows |
        | row-major | any other | cuBLAS |

        If `tiling.rows` is None, cuBLAS multiplies every row-major weight.

        Raises:
            RuntimeError: equal bits are required, but a library would multiply fp32 in tf32.
        """
        prompt = x.dim() == 3 and x.shape[1] > MAX_SPLIT_QUERIES
        if weight.format != "rows":
            rows, quantised = x.numel() // x.shape[-1], weight.format == "codes"
            prompt = (prompt and not (quantised and rows <= MAX_ROWS)) or _runs_as_prompt([weight], rows, tiling)
            # the prefill kernels do not support a bias together with a gate
            if prompt and (bias is None or not gated):
                product = prefill_quantised if quantised else prefill_linear
                if gelu and gated:
                    whole = product(x, weight, norm=norm, residual=residual, out_dtype=out_dtype)
                    return gelu_kernels.gelu_tanh_mul(whole, interleaved=True)
                return product(x, weight, bias, norm=norm, residual=residual, gated=gated, out_dtype=out_dtype)
            return packed_linear(
                x, weight, bias, norm=norm, residual=residual, gated=gated, gelu=gelu, out_dtype=out_dtype,
                pdl=has_pdl(x.device),
            )  # fmt: skip
        wide = x.dtype == torch.float32
        by_library = tiling.rows is None or tiling.rows > DECODE_ROWS or (wide and prompt)
        if by_library and (wide or tiling.rows is None or weight.shape[0] >= packing.PACKED_ROWS):
            if wide and tiling.rows is not None:
                check_ieee()
            return reference.linear(
                x, weight, bias, tiling, norm=norm, residual=residual, gated=gated, gelu=gelu, out_dtype=out_dtype
            )
        tiles, pdl = weight.data, has_pdl(x.device)
        if gelu and gated:
            whole = tile_linear(x, tiles, bias, norm=norm, residual=residual, out_dtype=out_dtype, pdl=pdl)
            return gelu_kernels.gelu_tanh_mul(whole)
        return tile_linear(x, tiles, bias, norm=norm, residual=residual, gated=gated, out_dtype=out_dtype, pdl=pdl)

    @staticmethod
    @override
    def layer_tail(
        linear: Callable[..., Tensor],
        attended: Tensor,
        x: Tensor,
        layer: Layer,
        next_layer: Layer | None,
        eps: float,
        tiling: Tiling,
        reduce: Reduce | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes a layer from the attention output on, as `reference.layer_tail`.

        In a decoding step of many rows on sm_90, fused TMA kernels compute all of it. Otherwise `linear` computes each
        matrix product.

        Args:
            attended: [B, Q, H * D], or regrouped [B, Q, H * D / 64, 64] (packing.py).
            others: see `reference.layer_tail`.
        """
        weights = [layer.o, layer.gate_up, layer.down, *([] if next_layer is None else [next_layer.qkv])]
        if x.shape[1] <= MAX_SPLIT_QUERIES and _steps_on_tma(weights, x.shape[0] * x.shape[1], tiling):
            return packed_layer_tail(attended, x, layer, next_layer, eps, has_pdl(x.device), reduce)
        if attended.dim() == 4:
            attended = packing.in_order(attended)
        return reference.layer_tail(linear, attended, x, layer, next_layer, eps, tiling, reduce)

    @staticmethod
    @override
    def joined_norms(
        table: Weight, ids: Tensor, x: Tensor, norms: tuple[Tensor, Tensor], eps: float, *, x_first: bool = False
    ) -> Tensor:
        if table.codes is None:
            return join_rows(table, ids, x.contiguous(), norms, eps, x_first=x_first)
        parts = norm_rows(embed_rows(table, ids), norms[0], eps), norm_rows(x, norms[1], eps)
        return torch.cat(parts[::-1] if x_first else parts, dim=-1)

    @staticmethod
    @override
    def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
        return gelu_kernels.gelu_tanh_mul(gate_up)

    @staticmethod
    @override
    def normed_logits(
        x: Tensor, weight: Tensor, eps: float, router: Weight, bias: Tensor | None, tiling: Tiling = UNTILED
    ) -> tuple[Tensor, Tensor]:
        """Computes the RMSNorm of x and an MoE router's logits of it, as `reference.normed_logits`.

        A decoding step runs one kernel, a prefill pass two. A row has the same bits in both, and with any other rows
        beside it. So `tiling` is not read.
        """
        if x.shape[1] <= MAX_SPLIT_QUERIES:
            return routers.normed_logits(x, weight, eps, router, bias)
        h = norm_rows(x, weight, eps)
        return h, tile_linear(h, router.data, bias, out_dtype=torch.float32, pdl=has_pdl(x.device))

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
        if weight.format != "rows":
            packed_argmax(x, weight, limit, work.argmax, norm=norm, pdl=has_pdl(x.device), out=out, ids=ids)
        elif out.dtype == torch.uint64 or ids is not None:  # the other argmax kernel writes no keys and maps no ids
            logits = TritonOps.linear(x, weight, None, tiling, norm=norm, out_dtype=torch.float32)
            reference.pick(logits, limit, out, ids)
        elif tiling.rows is None:
            reference.argmax(x, weight, limit, tiling, norm=norm, work=None, out=out)
        else:  # `out` may be a strided column of the draft tokens, but `tile_argmax` returns contiguous ids
            out.copy_(tile_argmax(x, weight.data, limit, work.argmax, norm=norm, pdl=has_pdl(x.device)))


def _runs_as_prompt(weights: list[Weight], rows: int, tiling: Tiling) -> bool:
    """True if products of a step with `rows` rows use the prompts' kernel. It is faster there, but gives other bits.

    So only with exact=False: `tiling.rows` is None.
    """
    many = tiling.rows is None and rows > TMA_ROWS
    return many and all(weight.format == "packed" and has_warp_groups(weight.device) for weight in weights)


def _steps_on_tma(weights: list[Weight], rows: int, tiling: Tiling) -> bool:
    """True if a step with `rows` rows multiplies all weights by a TMA kernel, see `runs_on_tma`."""
    return not _runs_as_prompt(weights, rows, tiling) and runs_on_tma(weights, rows)


TRITON_OPS = TritonOps()
