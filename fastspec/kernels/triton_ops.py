"""The ops as Triton kernels: what a step runs on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels import gelu, reference
from fastspec.kernels.attention.dispatch import MAX_SPLIT_QUERIES, AttendWork, attend_work, attend_work_bytes
from fastspec.kernels.attention.dispatch import attend as attend_paged
from fastspec.kernels.attention.rope import store_heads
from fastspec.kernels.common import packing
from fastspec.kernels.common.checks import check_ieee
from fastspec.kernels.common.code_packing import can_pack_codes
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.launch import compiling, has_pdl
from fastspec.kernels.common.weights import Format, Weight
from fastspec.kernels.embed import embed
from fastspec.kernels.experts import dispatch as mixtures
from fastspec.kernels.experts import router as routers
from fastspec.kernels.experts.dispatch import keeps_experts
from fastspec.kernels.experts.route import route as route_rows
from fastspec.kernels.experts.route import route_normed as route_normed_rows
from fastspec.kernels.feed_rows import feed_rows
from fastspec.kernels.joined import joined_norms as join_rows
from fastspec.kernels.norm import add_norm as add_norm_rows
from fastspec.kernels.norm import norm as norm_rows
from fastspec.kernels.ops import Ops
from fastspec.kernels.product.argmax import packed_argmax
from fastspec.kernels.product.dispatch import packed_linear
from fastspec.kernels.product.launch import reads_raised
from fastspec.kernels.product.layer_tail import layer_tail as packed_layer_tail
from fastspec.kernels.product.layer_tail import runs_on_tma
from fastspec.kernels.product.plan import supported
from fastspec.kernels.product.portable.products import tile_argmax, tile_linear
from fastspec.kernels.product.prefill import prefill_linear
from fastspec.kernels.product.quantised.plan import MAX_ROWS
from fastspec.kernels.product.quantised.prompts import prefill_quantised
from fastspec.kernels.recurrent.dispatch import delta_rule
from fastspec.kernels.recurrent.gated_norm import gated, gated_norm
from fastspec.kernels.reference.layer import Layer, Reduce
from fastspec.kernels.rotate import rotate as rotate_heads
from fastspec.kernels.round_codes import pack_rounded
from fastspec.kernels.sampling.commit import commit, scratch_of
from fastspec.kernels.sampling.draw import sampled_draw
from fastspec.kernels.sampling.greedy_commit import verify_commit
from fastspec.kernels.sampling.logits import sampled_work, sampled_work_bytes
from fastspec.kernels.sampling.logprobs import record_work, record_work_bytes
from fastspec.kernels.sampling.publish import publish
from fastspec.kernels.sampling.sampled_commit import sampled_commit
from fastspec.shapes import UNTILED, RoutingRule, Tiling

DECODE_ROWS = 64  # products of more rows at once are a prompt's


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the passes of one model work in; every kernel leaves its part as it found it.

    Attributes:
        attend: of `attend`.
        argmax: int64 zeros, of `argmax`: one for each row and one more.
    """

    attend: AttendWork
    argmax: Tensor


def workspace(
    device: torch.device, batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]
) -> Workspace:
    """Allocates the work area of a model; arguments as in `Ops.workspace`."""
    argmax = torch.zeros(batch * max_queries + 1, dtype=torch.int64, device=device)
    return Workspace(attend_work(device, batch * max_queries, max_positions, heads), argmax)


def workspace_bytes(batch: int, max_queries: int, max_positions: int, heads: tuple[int, int, int]) -> int:
    """Bytes of `workspace`."""
    return 8 * (batch * max_queries + 1) + attend_work_bytes(batch * max_queries, max_positions, heads)


def weight_format(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Format:
    """As the products here want a weight of shape (N, K): packed where it can be, else as rows."""
    packable = packing.can_pack(shape, dtype) and supported(torch.cuda.get_device_capability(device))
    return "packed" if packable else "rows"


def keeps_codes(shape: tuple[int, int], kind: CodesKind, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the products here read a quantised weight (N, K) of this kind, with activations of `dtype`."""
    runs = dtype == torch.bfloat16 and supported(torch.cuda.get_device_capability(device))
    return runs and can_pack_codes(shape, kind)


def attend(
    *tensors: Any,
    work: Workspace,
    product: Weight | None = None,
    tiling: Tiling = UNTILED,
    **options: Any,
) -> Tensor:
    """As `reference.attend`, which defines it; for a `product` of many rows as that reads them, where kernels can.

    `tiling` is ignored: kernels have tiles of their own.
    """
    positions: Tensor = tensors[6]
    # codes of 8 bits want rows raised as well, which what regroups them does at no cost
    regroup = product is not None and not reads_raised(product) and runs_on_tma([product], positions.numel())
    return attend_paged(*tensors, work=work.attend, regroup=regroup, **options)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, tiling: Tiling = UNTILED, **options: Any) -> Tensor:
    """As `reference.linear`, which defines it, for what `store` returned.

    A packed or quantised weight has kernels for the passes of steps, and one for prompts: a prompt's passes of any
    number of tokens leave the same bits. With quantised weights passes of up to MAX_ROWS tokens take the steps'
    kernels, which read fewer bytes. For other weights a library's product is as good for a prompt's many rows, but its
    bits may depend on how many there are: so those of fewer than `packing.PACKED_ROWS` rows, which stand beside packed
    ones, are multiplied by tiles in 16 bits. In fp32 a library is better there, and for the few rows of a step slower
    by far, for it would have to be padded to as many as a step may have.

    Raises:
        RuntimeError: a library would multiply fp32 in tf32 where bits are promised.
    """
    prompt = x.dim() == 3 and x.shape[1] > MAX_SPLIT_QUERIES
    if weight.format != "rows":
        rows, quantised = x.numel() // x.shape[-1], weight.format == "codes"
        prompt = prompt and not (quantised and rows <= MAX_ROWS)
        # no bias goes with a gate there
        if prompt and (bias is None or not options.get("gated")):
            product = prefill_quantised if quantised else prefill_linear
            if options.pop("gelu", False) and options.pop("gated", False):
                return gelu.gelu_tanh_mul(product(x, weight, **options), interleaved=True, pdl=has_pdl(x.device))
            return product(x, weight, bias, **options)
        return packed_linear(x, weight, bias, pdl=has_pdl(x.device), **options)
    wide = x.dtype == torch.float32
    by_library = tiling.rows is None or tiling.rows > DECODE_ROWS or (wide and prompt)
    if by_library and (wide or tiling.rows is None or weight.shape[0] >= packing.PACKED_ROWS):
        if wide and tiling.rows is not None:
            check_ieee()
        return reference.linear(x, weight, bias, tiling, **options)
    if options.pop("gelu", False) and options.pop("gated", False):
        return gelu_tanh_mul(tile_linear(x, weight.data, bias, pdl=has_pdl(x.device), **options))
    return tile_linear(x, weight.data, bias, pdl=has_pdl(x.device), **options)


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
    """As `reference.layer_tail`, which defines it: a step's products of many rows as one chain, others one by one.

    Args:
        attended: [B, Q, H * D], or regrouped [B, Q, H * D / 64, 64].
    """
    weights = [layer.o, layer.gate_up, layer.down, *([] if next_layer is None else [next_layer.qkv])]
    if x.shape[1] <= MAX_SPLIT_QUERIES and runs_on_tma(weights, x.shape[0] * x.shape[1]):
        return packed_layer_tail(attended, x, layer, next_layer, eps, has_pdl(x.device), reduce)
    if attended.dim() == 4:
        attended = packing.in_order(attended)
    return reference.layer_tail(linear, attended, x, layer, next_layer, eps, tiling, reduce)


def norm(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
    """As `reference.norm`, which defines it."""
    return norm_rows(x, weight, eps, pdl=has_pdl(x.device), **options)


def joined_norms(
    table: Weight, ids: Tensor, x: Tensor, norms: tuple[Tensor, Tensor], eps: float, *, x_first: bool = False
) -> Tensor:
    """As `reference.joined_norms`, which defines it; a quantised table is read by a kernel of its own."""
    if table.codes is None:
        return join_rows(table, ids, x.contiguous(), norms, eps, x_first=x_first, pdl=has_pdl(x.device))
    parts = norm(embed(table, ids), norms[0], eps), norm(x, norms[1], eps)
    return torch.cat(parts[::-1] if x_first else parts, dim=-1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.rotate`, which defines it."""
    return rotate_heads(q, k, cos, sin, pdl=has_pdl(q.device))


def add_norm(
    added: Tensor, x: Tensor, weight: Tensor, next_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """As `reference.add_norm`, which defines it."""
    return add_norm_rows(added, x, weight, next_weight, eps, pdl=has_pdl(x.device))


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """As `reference.gelu_tanh_mul`, which defines it."""
    return gelu.gelu_tanh_mul(gate_up, pdl=has_pdl(gate_up.device))


def joins_shared(dtype: torch.dtype, hidden: int, device: torch.device) -> bool:
    """As `Ops.joins_shared`: in 16 bits, of which one launch norms and multiplies with the router."""
    return dtype.itemsize == 2 and hidden <= routers.MAX_WIDTH


def normed_logits(
    x: Tensor, weight: Tensor, eps: float, router: Weight, bias: Tensor | None, tiling: Tiling = UNTILED
) -> tuple[Tensor, Tensor]:
    """As `reference.normed_logits`, which defines it; a prompt's many rows are multiplied by tiles.

    `tiling` has no say here: a row's bits are the same beside any others, in steps and in prompts, each for itself.
    """
    pdl = has_pdl(x.device)
    if x.shape[1] <= MAX_SPLIT_QUERIES:
        return routers.normed_logits(x, weight, eps, router, bias, pdl=pdl)
    h = norm(x, weight, eps)
    return h, tile_linear(h, router.data, bias, out_dtype=torch.float32, pdl=pdl)


def route(logits: Tensor, rule: RoutingRule, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `reference.route`, which defines it."""
    return route_rows(logits, rule, correction, pdl=has_pdl(logits.device))


def route_normed(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.route_normed`, which defines it."""
    return route_normed_rows(logits, *arguments, pdl=has_pdl(logits.device))


def experts(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """As `reference.experts`, which defines it; a row's bits are the same in steps and prompts."""
    return mixtures.experts(x, *arguments, pdl=has_pdl(x.device), **options)


def experts_normed(x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """As `reference.experts_normed`, which defines it."""
    return mixtures.experts_normed(x, *arguments, pdl=has_pdl(x.device), **options)


def argmax(
    x: Tensor,
    weight: Weight,
    limit: int,
    tiling: Tiling = UNTILED,
    *,
    norm: tuple[Tensor, float] | None = None,
    work: Workspace,
    out: Tensor,
) -> None:
    """As `reference.argmax`, which defines it."""
    if weight.format != "rows":
        packed_argmax(x, weight, limit, work.argmax, norm=norm, pdl=has_pdl(x.device), out=out)
    elif out.dtype == torch.uint64:  # keys, which the other kernel of an argmax does not give
        logits = linear(x, weight, None, tiling, norm=norm, out_dtype=torch.float32)
        out.view(torch.int64).copy_(reference.keys_of(logits, limit))
    elif tiling.rows is None:
        reference.argmax(x, weight, limit, tiling, norm=norm, out=out)
    else:  # `out` may be a column of the drafts, and that kernel writes ids side by side
        out.copy_(tile_argmax(x, weight.data, limit, work.argmax, norm=norm, pdl=has_pdl(x.device)))


TRITON_OPS = Ops(
    name="triton",
    weight_format=weight_format,
    keeps_codes=keeps_codes,
    pack_rounded=pack_rounded,
    workspace=workspace,
    workspace_bytes=workspace_bytes,
    keeps_experts=keeps_experts,
    joins_shared=joins_shared,
    commit_scratch=scratch_of,
    feed_rows=feed_rows,
    embed=embed,
    norm=norm,
    joined_norms=joined_norms,
    add_norm=add_norm,
    gelu_tanh_mul=gelu_tanh_mul,
    linear=linear,
    layer_tail=layer_tail,
    normed_logits=normed_logits,
    route=route,
    route_normed=route_normed,
    experts=experts,
    experts_normed=experts_normed,
    attend=attend,
    rotate=rotate,
    store_heads=store_heads,
    delta_rule=delta_rule,
    gated_norm=gated_norm,
    gated=gated,
    argmax=argmax,
    verify_commit=verify_commit,
    sampled_work=sampled_work,
    sampled_work_bytes=sampled_work_bytes,
    sampled_commit=sampled_commit,
    sampled_draw=sampled_draw,
    record_work=record_work,
    record_work_bytes=record_work_bytes,
    commit=commit,
    publish=publish,
    compiling=compiling,
)
