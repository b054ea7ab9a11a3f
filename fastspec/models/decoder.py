"""One decoder-only transformer over a paged cache: any supported family, by the layer plans of its ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.compiled_ops import INDUCTOR, MAX_QUERIES, PerShape
from fastspec.kernels.ops import Ops
from fastspec.kv_cache.cache import PagedKVCache
from fastspec.models.config import ModelSpec
from fastspec.models.weights.load import DecoderWeights, LayerWeights
from fastspec.shapes import UNTILED, AttentionRule, ForwardBatch, Tiling


class Decoder:
    """Weights and cache of one model, and its forward pass.

    Args:
        spec: what distinguishes this model.
        weights: fused weights, all on one device.
        cache: pages this model reads and writes.
        ops: implementations of everything a pass does.
        max_positions: positions the rotary table covers; every position of a pass must lie below it.
        batch: rows of a decoding pass at most.
        max_queries: tokens of each of them at most.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        cache: PagedKVCache,
        ops: Ops,
        *,
        max_positions: int,
        batch: int,
        max_queries: int,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        self.ops = ops
        device = weights.norm.device
        inv_freq = torch.tensor(spec.rope.inv_freq, dtype=torch.float32, device=device)
        angles = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * inv_freq
        self._cos = angles.cos() * spec.rope.scaling  # [max_positions, D/2]
        self._sin = angles.sin() * spec.rope.scaling
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._work = ops.workspace(device, batch, max_queries, max_positions, heads)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.spec.vocab_size

    def hidden(self, rows: ForwardBatch) -> Tensor:
        """Feeds rows and writes their K/V to the cache; returns the last residual stream [B, Q, hidden]."""
        return self._hidden(rows, {})

    def hidden_with_features(self, rows: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `hidden`, and the residual stream behind each of `layers`, [B, Q, len(layers), hidden]."""
        features: dict[int, Tensor | None] = dict.fromkeys(layers)
        last = self._hidden(rows, features)
        found = [feature for layer in layers if (feature := features[layer]) is not None]
        return last, torch.stack(found, dim=2)

    def _hidden(self, rows: ForwardBatch, features: dict[int, Tensor | None]) -> Tensor:
        """As `hidden`; puts the residual stream behind each layer that is a key of `features` there."""
        x, layers = self.ops.embed(self.weights.embed, rows.ids), self.weights.layers
        norm = (layers[0].input_norm, self.spec.rms_eps)
        qkv: Tensor | None = self.ops.linear(x, layers[0].qkv, layers[0].qkv_bias, rows.tiling, norm=norm)
        for index, layer in enumerate(layers):
            assert qkv is not None  # only the last layer leaves none
            attended = self._attend(index, layer, qkv, rows)
            next_layer = layers[index + 1] if index + 1 < len(layers) else None
            plan = self.spec.plans[index]
            if plan.fused_tail:
                x, qkv = self.ops.layer_tail(
                    self.ops.linear, attended, x, layer, next_layer, self.spec.rms_eps, rows.tiling
                )
            else:
                x, qkv = self._tail(plan.residual_scale, attended, x, layer, next_layer, rows.tiling)
            if index in features:
                features[index] = x
        return x

    def _tail(
        self,
        scale: float,
        attended: Tensor,
        x: Tensor,
        layer: LayerWeights,
        next_layer: LayerWeights | None,
        tiling: Tiling,
    ) -> tuple[Tensor, Tensor | None]:
        """As `Ops.layer_tail`, product by product, with a factor on what is added to x."""
        linear, eps = self.ops.linear, self.spec.rms_eps
        x = x + scale * linear(attended, layer.o, layer.o_bias, tiling)
        gated = linear(x, layer.gate_up, layer.gate_up_bias, tiling, norm=(layer.post_norm, eps), gated=True)
        x = x + scale * linear(gated, layer.down, layer.down_bias, tiling)
        if next_layer is None:
            return x, None
        return x, linear(x, next_layer.qkv, next_layer.qkv_bias, tiling, norm=(next_layer.input_norm, eps))

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """fp32 logits [..., V] of what `hidden` returned, [..., hidden]."""
        norm = (self.weights.norm, self.spec.rms_eps)
        return self.ops.linear(hidden, self.weights.head, None, tiling, norm=norm, out_dtype=torch.float32)

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor) -> None:
        """Writes to out [R] which of the first `limit` logits of hidden [R, hidden] is largest, lowest id first."""
        norm = (self.weights.norm, self.spec.rms_eps)
        self.ops.argmax(hidden, self.weights.head, limit, tiling, norm=norm, work=self._work, out=out)

    def _attend(self, index: int, layer: LayerWeights, qkv: Tensor, rows: ForwardBatch) -> Tensor:
        spec, plan = self.spec, self.spec.plans[index]
        q_norm, k_norm = layer.q_norm, layer.k_norm
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm, spec.rms_eps)
        # K/V are written before they are read: a row sees the same blocks of keys whether they are new or old
        return self.ops.attend(
            qkv,
            self._cos,
            self._sin,
            self.cache.keys[index],
            self.cache.values[index],
            rows.block_table,
            rows.positions,
            rows.write_mask,
            num_heads=spec.num_heads,
            norms=norms,
            num_blocks=rows.num_blocks,
            first_block=rows.first_block,
            rule=AttentionRule(plan.window),
            work=self._work,
            # kernels may leave the result in another order for the fused tail, which no other op reads
            product=layer.o if plan.fused_tail else None,
            tiling=rows.tiling,
        )


class CompiledDecoder(Decoder):
    """A Decoder whose passes in a step run through torch.compile, each as one graph; its ops must be `compiled(ops)`.

    Compiled once for each number of rows and of tokens a row, by the first pass of that shape. Prompt chunks, of more
    tokens, run as they are: their sizes are many, and their products take most of their time.

    Args:
        *args, **options: as for Decoder.
        backend: of torch.compile.
    """

    def __init__(self, *args: Any, backend: str | Callable[..., Any] = INDUCTOR, **options: Any) -> None:
        super().__init__(*args, **options)
        self._compiled_hidden = PerShape(_hidden, backend)
        self._compiled_logits = PerShape(_logits, backend)
        self._compiled_pick = PerShape(_pick, backend)

    def hidden(self, rows: ForwardBatch) -> Tensor:
        """As Decoder's."""
        if rows.ids.shape[1] > MAX_QUERIES:
            return super().hidden(rows)
        return self._compiled_hidden(self, rows.ids, rows.positions, rows.write_mask, rows.block_table)

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """As Decoder's; any number of rows at once."""
        return self._compiled_logits(self, hidden)

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor) -> None:
        """As Decoder's; any number of rows at once."""
        # not written by the graph: out is a column, which may lie where vector stores of the compiler's cannot
        out.copy_(self._compiled_pick(self, hidden, limit))


def _hidden(model: Decoder, ids: Tensor, positions: Tensor, write_mask: Tensor, block_table: Tensor) -> Tensor:
    return Decoder.hidden(model, ForwardBatch(ids, positions, write_mask, block_table, 0, UNTILED))


def _logits(model: Decoder, hidden: Tensor) -> Tensor:
    return Decoder.logits(model, hidden, UNTILED)


def _pick(model: Decoder, hidden: Tensor, limit: int) -> Tensor:
    chosen = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    Decoder.argmax(model, hidden, limit, UNTILED, chosen)
    return chosen
