"""`Ops`: one implementation of everything a step computes, in torch (`reference`) or as Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.common.code_packing import PackedCodes
from fastspec.kernels.common.codes import CodesKind
from fastspec.kernels.common.rounding import pack_rounded
from fastspec.kernels.common.weights import Format, Weight


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every op; signatures and meanings are those of the functions in `reference`.

    Attributes:
        name: "triton" or "torch".
        weight_format: ((N, K), dtype, device) -> the format in which `linear`, `argmax` and `embed` want a weight.
        keeps_codes: ((N, K), kind, dtype of activations, device) -> whether `linear`, `argmax` and `embed` read a
            quantised weight of that kind as it is; else it has to be dequantised when it is loaded.
        pack_rounded: (packed matrix, tile, rows) -> scales, as `common.rounding.pack_rounded`, which defines it.
        workspace: (device, batch, max_queries, max_positions, (heads, kv_heads, head_dim)) -> what a model's passes
            work in, given back to `attend` and `argmax` as `work`.
        workspace_bytes: (batch, max_queries, max_positions, heads) -> bytes of that.
        keeps_experts: ((N, K), dtype of activations, device) -> whether `experts` reads a stack of such matrices as
            mxfp4; else it has to be dequantised when it is loaded.
        joins_shared: (dtype, hidden size, device) -> whether a shared expert as wide as the others is the last of them,
            and its gate the router's last row, which is stored as rows; else it is an MLP of its own.
        commit_scratch: (batch, max_drafts, device) -> what `verify_commit` and `commit` work in.
        sampled_work: (batch, max_drafts, vocab, device) -> what `sampled_commit` and `sampled_draw` work in.
        sampled_work_bytes: (batch, max_drafts, vocab) -> bytes of that.
        record_work: (batch, max_drafts, vocab, device) -> what log-probabilities are recorded in.
        record_work_bytes: (batch, max_drafts, vocab) -> bytes of that.
        compiling: (executor) -> a context in which ops compute nothing, and it compiles their kernels.
    """

    name: str
    weight_format: Callable[[tuple[int, int], torch.dtype, torch.device], Format]
    keeps_codes: Callable[[tuple[int, int], CodesKind, torch.dtype, torch.device], bool]
    pack_rounded: Callable[[PackedCodes, int, Tensor], Tensor]
    workspace: Callable[[torch.device, int, int, int, tuple[int, int, int]], Any]
    workspace_bytes: Callable[[int, int, int, tuple[int, int, int]], int]
    keeps_experts: Callable[[tuple[int, int], torch.dtype, torch.device], bool]
    joins_shared: Callable[[torch.dtype, int, torch.device], bool]
    commit_scratch: Callable[[int, int, torch.device], Tensor | None]
    feed_rows: Callable[..., tuple[Tensor, Tensor, Tensor]]
    embed: Callable[[Weight, Tensor], Tensor]
    norm: Callable[..., Tensor]
    joined_norms: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor | None]]
    gelu_tanh_mul: Callable[[Tensor], Tensor]
    linear: Callable[..., Tensor]
    layer_tail: Callable[..., tuple[Tensor, Tensor | None]]
    normed_logits: Callable[..., tuple[Tensor, Tensor]]
    route: Callable[..., tuple[Tensor, Tensor]]
    route_normed: Callable[..., tuple[Tensor, Tensor, Tensor]]
    experts: Callable[..., Tensor]
    experts_normed: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., Tensor]
    rotate: Callable[..., tuple[Tensor, Tensor]]
    store_heads: Callable[..., Tensor]
    delta_rule: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]
    gated: Callable[[Tensor, Tensor], Tensor]
    argmax: Callable[..., None]
    verify_commit: Callable[..., None]
    sampled_work: Callable[[int, int, int, torch.device], Any]
    sampled_work_bytes: Callable[[int, int, int], int]
    sampled_commit: Callable[..., None]
    sampled_draw: Callable[..., None]
    record_work: Callable[[int, int, int, torch.device], Any]
    record_work_bytes: Callable[[int, int, int], int]
    commit: Callable[..., None]
    publish: Callable[..., None]
    compiling: Callable[[Executor | None], AbstractContextManager[object]] = nullcontext

    def store(self, rows: Tensor, gated: bool) -> Weight:
        """The `Weight` of rows [N, K] in the format wanted. Gated: the first N/2 rows are a gate, the others go up."""
        form = self.weight_format((rows.shape[0], rows.shape[1]), rows.dtype, rows.device)
        return Weight.pack(rows, gated) if form == "packed" else Weight(rows)


TORCH_OPS = Ops(
    name="torch",
    weight_format=lambda shape, dtype, device: "rows",
    keeps_codes=lambda shape, kind, dtype, device: False,
    pack_rounded=pack_rounded,
    workspace=lambda device, batch, max_queries, max_positions, heads: None,
    workspace_bytes=lambda batch, max_queries, max_positions, heads: 0,
    keeps_experts=lambda shape, dtype, device: False,
    joins_shared=lambda dtype, hidden, device: False,
    commit_scratch=lambda batch, max_drafts, device: None,
    feed_rows=reference.feed_rows,
    embed=reference.embed,
    norm=reference.norm,
    joined_norms=reference.joined_norms,
    add_norm=reference.add_norm,
    gelu_tanh_mul=reference.gelu_tanh_mul,
    linear=reference.linear,
    layer_tail=reference.layer_tail,
    normed_logits=reference.normed_logits,
    route=reference.route,
    route_normed=reference.route_normed,
    experts=reference.experts,
    experts_normed=reference.experts_normed,
    attend=reference.attend,
    rotate=reference.rotate,
    store_heads=reference.store_heads,
    delta_rule=reference.delta_rule,
    gated_norm=reference.gated_norm,
    gated=reference.gated,
    argmax=reference.argmax,
    verify_commit=reference.verify_commit,
    sampled_work=lambda batch, max_drafts, vocab, device: None,
    sampled_work_bytes=lambda batch, max_drafts, vocab: 0,
    sampled_commit=reference.sampled_commit,
    sampled_draw=reference.sampled_draw,
    record_work=lambda batch, max_drafts, vocab, device: None,
    record_work_bytes=lambda batch, max_drafts, vocab: 0,
    commit=reference.commit,
    publish=reference.publish,
)
