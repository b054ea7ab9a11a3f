"""The passes of a DFlash head (arXiv 2602.06036); `DFlashSpec` has the settings.

    c = norm([f_1 .. f_n] Wfc)                        f: the target's hidden states at one position
    context: k, v of every layer = c Wk, c Wv         at the positions of accepted tokens, kept in the cache
    block:   x = embeddings of [last token, mask ..]  at the positions after them
             x = x + attention(norm(x)), over the keys of the context and of the block;  x = x + mlp(norm(x))
    logits = norm(x) Whead

All rows of a block see each other, but `Ops.attend` only reads keys at or before a row's position. So the block's keys
are stored first, in the pages after the context, and then all its rows attend as if they were at the last position;
each was rotated by its own position before. These keys are used in one pass only: a pass stores its block before it
reads there, and all keys before its block were stored by `store_context`, over keys of earlier blocks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastspec.errors import CheckpointError
from fastspec.kernels.ops import Ops
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.heads.decoder import HeadDecoder
from fastspec.models.heads.dflash_spec import DFlashSpec
from fastspec.models.heads.weights import HeadWeights
from fastspec.shapes import ForwardBatch

MASK_TENSOR: Final = "mask_embedding"
_T = TypeVar("_T")


class DFlash(HeadDecoder):
    """Weights and cache of a DFlash head, and its passes.

    Args:
        spec: what distinguishes this head.
        weights: its own, and what it shares.
        cache: pages of its layers, under the target's page table.
        ops: implementations of everything a pass does.
        max_positions: that a row may have, its last block's among them.
        batch: rows of a pass at most.
        max_queries: tokens of each of them at most, in a step.
        mask: [hidden], what masks are embedded as; None: as their token is.
    """

    def __init__(
        self,
        spec: DFlashSpec,
        weights: HeadWeights,
        cache: PagedKVCache,
        ops: Ops,
        *,
        max_positions: int,
        batch: int,
        max_queries: int,
        mask: Tensor | None = None,
    ) -> None:
        # every draft of a pass is a row of the argmax
        sizes = {"max_positions": max_positions, "batch": batch * max_queries, "max_queries": 1}
        super().__init__(spec.decoder, weights.decoder, cache, ops, **sizes)
        self.head, self._mask = spec, mask
        self._fc, self._context = _there(weights.matrix("fc.weight")), _there(weights.matrix("context.weight"))
        self._hidden_norm = _there(weights.vector("hidden_norm.weight"))
        self._context_bias, self._sinks = weights.vector("context.bias"), weights.vector("sinks")

    def store_context(self, features: Tensor, rows: ForwardBatch) -> None:
        """Writes K and V of accepted tokens, of all layers, by one product.

        Args:
            features: [B, Q, n, target's hidden], what the target left at these tokens.
            rows: where they are, and which of them count; ids are not read.
        """
        context = self.ops.linear(features.flatten(2), self._fc, None, rows.tiling)
        norm = (self._hidden_norm, self.spec.rms_eps)
        made = self.ops.linear(context, self._context, self._context_bias, rows.tiling, norm=norm)
        for index, kv in enumerate(made.unflatten(-1, (self.spec.num_layers, -1)).movedim(2, 0).contiguous()):
            self._store(index, kv, rows, num_heads=0)

    def block(self, rows: ForwardBatch) -> Tensor:
        """The residual stream after the last layer, [B, Q, hidden], of a block: the last token of each row and masks.

        Its keys are in the cache until the next pass, at the positions after the context.
        """
        x = self._embedded(rows)
        last = rows.positions[:, -1:].expand_as(rows.positions).contiguous()
        whole = replace(rows, positions=last, write_mask=torch.zeros_like(rows.write_mask))
        qkv: Tensor | None = self._qkv(0, x, rows.tiling)
        for index in range(self.spec.num_layers):
            assert qkv is not None, "only the last layer leaves none"
            if self.head.causal[index]:
                rule, sinks = self.spec.plans[index].rule, self._sinks_of(index)
                attended = self._attend_rows(index, qkv, rows, self._tables[0], self._norms(index), rule, sinks)
            else:
                attended = self._attend_all(index, qkv, rows, whole)
            if self.head.value_scale != 1.0:  # on the sum of values, which is the same as on each
                attended = attended * self.head.value_scale
            x, qkv = self._after_attention(index, attended, x, rows.tiling)
        return x

    def _embedded(self, rows: ForwardBatch) -> Tensor:
        x = self.ops.embed(self.weights.embed, rows.ids)
        if self._mask is not None:
            x = torch.where((rows.ids == self.head.mask_id)[..., None], self._mask, x)
        return x if self.head.embed_scale == 1.0 else x * self.head.embed_scale

    def _attend_all(self, index: int, qkv: Tensor, rows: ForwardBatch, whole: ForwardBatch) -> Tensor:
        """Attention of a block's rows to the context and to each other, [B, Q, H * D].

        Args:
            whole: the rows as if all were at the last one's position, and none were stored.
        """
        num_heads, rule = self.spec.num_heads, self.spec.plans[index].rule
        query = self._store(index, qkv, rows, num_heads=num_heads)
        # keys and values of these rows are passed again, but not written. The kernel that copies them starts once the
        # keys are stored, and attention, which reads keys before it waits, starts after that kernel
        qkv = torch.cat([query.flatten(2), qkv[..., num_heads * self.spec.head_dim :]], dim=-1)
        if rule.window is not None:  # of the first row, for all
            rule = rule._replace(window=rule.window + rows.positions.shape[1] - 1)
        return self._attend_rows(index, qkv, whole, None, None, rule, self._sinks_of(index))

    def _sinks_of(self, index: int) -> Tensor | None:
        return None if self._sinks is None else self._sinks.view(-1, self.spec.num_heads)[index]


def _there(found: _T | None) -> _T:
    assert found is not None, "checked before anything was allocated"
    return found


def mask_embedding(file: Path, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What masks are embedded as, [hidden], out of a safetensors file with the tensor `mask_embedding`.

    Raises:
        CheckpointError: the file is damaged, or holds another tensor.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            found: Tensor = opened.get_tensor(MASK_TENSOR).reshape(-1)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot read {MASK_TENSOR}: {error}; convert or download it again") from error
    if found.numel() != hidden:
        raise CheckpointError(f"{file}: {MASK_TENSOR} has {found.numel()} elements, and the head is {hidden} wide")
    return found.to(device=device, dtype=dtype)
