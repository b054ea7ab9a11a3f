"""The passes of an EAGLE-3 head (arXiv 2503.01840); `Eagle3Spec` has the formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.ops import Ops
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.heads.decoder import HeadDecoder
from fastspec.models.heads.eagle3_spec import Eagle3Spec
from fastspec.models.heads.weights import HeadWeights
from fastspec.shapes import ForwardBatch, Tiling


class Eagle3(HeadDecoder):
    """Weights and cache of an EAGLE-3 head, and its passes.

    In every pass position i stands for the hidden state at i and the token that follows it, i + 1: `rows.ids` are those
    tokens. So its cache ends one position before its target's.

    Args:
        spec: what distinguishes this head.
        weights: its own, and what it shares.
        cache: pages of its layers, under the target's page table.
        ops, sizes: as for `Decoder`.
    """

    def __init__(self, spec: Eagle3Spec, weights: HeadWeights, cache: PagedKVCache, ops: Ops, **sizes: Any) -> None:
        super().__init__(spec.decoder, weights.decoder, cache, ops, **sizes)
        self.head, self._own = spec, weights
        hidden_norm = weights.vector("layers.0.hidden_norm.weight")
        assert hidden_norm is not None, "checked before anything was allocated"
        self._hidden_norm = hidden_norm
        self._chunk_norms = [weights.vector(f"fc_norm.{index}.weight") for index in range(spec.feature_layers)]

    def condense(self, features: Tensor, tiling: Tiling) -> Tensor:
        """g [B, Q, hidden] of the target's hidden states [B, Q, layers, target's hidden]."""
        eps = self.spec.rms_eps
        if self.head.fc_norm:
            normed = [
                self.ops.norm(chunk.contiguous(), norm, eps)
                for chunk, norm in zip(features.unbind(dim=2), self._chunk_norms, strict=True)
                if norm is not None
            ]
            features = torch.stack(normed, dim=2)
        wide, before = features.flatten(2), self._own.vector("input_norm.weight")
        fc = self._own.matrix("fc.weight")
        if fc is None:
            return wide if before is None else self.ops.norm(wide.contiguous(), before, eps)
        options: dict[str, Any] = {} if before is None else {"norm": (before, eps)}
        return self.ops.linear(wide, fc, self._own.vector("fc.bias"), tiling, **options)

    def drafted(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """The residual stream after the last layer, [B, Q, hidden]; writes K and V of all layers.

        Args:
            g: [B, Q, hidden], from `condense` or `feature`.
            rows: positions of g, with the tokens that follow them.
        """
        x, qkv = self._upto_last(g, rows)
        return self._layer(self.spec.num_layers - 1, x, qkv, rows)[0]

    def absorb(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes K and V of all layers, and computes no more than they need: of the last layer no attention.

        Returns:
            [B, Q, attention_inputs], what `resumed` goes on from.
        """
        x, qkv = self._upto_last(g, rows)
        self._store(self.spec.num_layers - 1, qkv, rows, num_heads=self.spec.num_heads)
        return torch.cat((x, qkv), dim=-1)

    def resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """What `drafted` returns, from what `absorb` returned of these positions; `rows.ids` are not read."""
        return self._resumed(made, rows)

    def feature(self, x: Tensor) -> Tensor:
        """g of the next position, made of what `drafted` returned."""
        return self.ops.norm(x, self.weights.norm, self.spec.rms_eps) if self.head.norm_output else x

    def _upto_last(self, g: Tensor, rows: ForwardBatch) -> tuple[Tensor, Tensor]:
        """The residual stream in front of the last layer, and that layer's q, k and v."""
        layer, eps = self.weights.layers[0], self.spec.rms_eps
        assert layer.input_norm is not None, "of the embeddings"
        norms = layer.input_norm, self._hidden_norm
        eh = self.ops.joined_norms(self.weights.embed, rows.ids, g, norms, eps)
        x = eh[..., g.shape[-1] :].contiguous() if self.head.norm_before_residual else g
        qkv = self.ops.linear(eh, layer.qkv, layer.qkv_bias, rows.tiling)
        for index in range(self.spec.num_layers - 1):
            x, following = self._layer(index, x, qkv, rows)
            assert following is not None, "only the last layer leaves none"
            qkv = following
        return x, qkv
