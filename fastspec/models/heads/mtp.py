"""The passes of an MTP layer (arXiv 2412.19437); `MtpSpec` has the formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.ops import Ops
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.heads.decoder import HeadDecoder
from fastspec.models.heads.mtp_names import EMBED_NORM, FC, HIDDEN_NORM
from fastspec.models.heads.mtp_spec import MtpSpec
from fastspec.models.heads.weights import HeadWeights
from fastspec.shapes import ForwardBatch, Tiling


class Mtp(HeadDecoder):
    """Weights and cache of an MTP layer, and its passes.

    In every pass, position i joins the target's hidden state of position i with token i + 1; `rows.ids` are these next
    tokens. So its K/V cache is one position shorter than the target's.

    Args:
        spec: sizes and arithmetic of the layer.
        weights: its own, and those that it shares with the target.
        cache: K/V pages of its layer, under the target's page table.
        ops, sizes: as for `Decoder`.
    """

    def __init__(self, spec: MtpSpec, weights: HeadWeights, cache: PagedKVCache, ops: Ops, **sizes: Any) -> None:
        super().__init__(spec.decoder, weights.decoder, cache, ops, **sizes)
        self.head = spec
        fc, norms = weights.matrix(f"{FC}.weight"), [weights.vector(f"{name}.weight") for name in _NORMS]
        assert fc is not None, "checked before anything was allocated"
        assert norms[0] is not None, "so is this"
        assert norms[1] is not None, "so is this"
        self._fc, self._embed_norm, self._hidden_norm = fc, norms[0], norms[1]
        plan = spec.decoder.plans[0]
        plain = plan.norm == "rms" and plan.qk_norm in (None, "head") and not plan.output_gate
        self._stores = plain and plan.rope == 0

    def condense(self, features: Tensor, tiling: Tiling) -> Tensor:
        """g [B, Q, hidden]: the target's hidden states [B, Q, 1, hidden], unchanged."""
        return features[:, :, 0]

    def drafted(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """The hidden state after the layer and its final norm, [B, Q, hidden], which the head reads; writes K and V.

        Args:
            g: [B, Q, hidden], from `condense` or `feature`.
            rows: positions of g, with the tokens that follow them.
        """
        x = self._joint(g, rows)
        x, _ = self._layer(0, x, self._qkv(0, x, rows.tiling), rows)
        return self._norm(self.spec.plans[0], x, self.weights.norm)

    def absorb(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """Writes K and V; skips attention where one op stores K and V alone.

        Returns:
            [B, Q, attention_inputs], what `resumed` goes on from.
        """
        x = self._joint(g, rows)
        qkv = self._qkv(0, x, rows.tiling)
        if self._stores:
            self._store(0, qkv, rows, num_heads=self.spec.num_heads)
        else:
            self._attend(0, self.weights.layers[0], qkv, rows)
        return torch.cat((x, qkv), dim=-1)

    def resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """What `drafted` returns, from what `absorb` returned of these positions; `rows.ids` are not read."""
        return self._norm(self.spec.plans[0], self._resumed(made, rows), self.weights.norm)

    def feature(self, x: Tensor) -> Tensor:
        """g of the next position, [B, Q, hidden]: what `drafted` returned, unchanged."""
        return x

    def _joint(self, g: Tensor, rows: ForwardBatch) -> Tensor:
        """The layer's input [B, Q, hidden]: hidden states and the embeddings of the next tokens, joined by `fc`."""
        plan, norms, eps = self.spec.plans[0], (self._embed_norm, self._hidden_norm), self.spec.rms_eps
        first = self.head.hidden_first
        if self._embed_scale == 1.0 and plan.norm != "layer":
            eh = self.ops.joined_norms(self.weights.embed, rows.ids, g, norms, eps, x_first=first)
        else:
            e = self.ops.embed(self.weights.embed, rows.ids) * self._embed_scale
            parts = self._norm(plan, e, norms[0]), self._norm(plan, g.contiguous(), norms[1])
            eh = torch.cat(parts[::-1] if first else parts, dim=-1)
        return self.ops.linear(eh, self._fc, None, rows.tiling)

    def _raw_logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """As `Decoder`, without the final norm, which `drafted` has applied already."""
        return self.head_logits(hidden, tiling)

    def _raw_argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor) -> None:
        """As `Decoder`, without the final norm, which `drafted` has applied already."""
        self.head_argmax(hidden, limit, tiling, out, work=self._work)


_NORMS = (EMBED_NORM, HIDDEN_NORM)
