"""One decoder-only transformer over a paged cache: Llama, Mistral, Qwen2 and Qwen3 by the fields of a ModelSpec."""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.kernels import ops_for
from fastspec.kernels import reference as ops
from fastspec.kv_cache.cache import PagedKVCache, PassRows
from fastspec.models.spec import ModelSpec
from fastspec.models.weights import DecoderWeights, LayerWeights


class Decoder:
    """Weights and cache of one model, and its forward pass.

    Args:
        spec: what distinguishes this model.
        weights: fused weights, all on one device.
        cache: pages this model reads and writes.
        max_positions: positions the rotary table covers; every fed position must lie below it.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, cache: PagedKVCache, max_positions: int) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        self.ops = ops_for(weights.embed.device)
        device = weights.embed.device
        inv_freq = torch.tensor(spec.rope.inv_freq, dtype=torch.float32, device=device)
        angles = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * inv_freq
        self._cos = angles.cos() * spec.rope.scaling  # [max_positions, D/2]
        self._sin = angles.sin() * spec.rope.scaling

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.spec.vocab_size

    def hidden(self, rows: PassRows) -> Tensor:
        """Feeds rows and writes their K/V to the cache; returns the normed final hidden states [B, Q, hidden]."""
        spec, weights = self.spec, self.weights
        positions = rows.positions.clamp(0, self._cos.shape[0] - 1)
        rotation = (self._cos[positions][:, :, None], self._sin[positions][:, :, None])
        x = weights.embed[rows.tokens.clamp(0, spec.vocab_size - 1)]
        for index, layer in enumerate(weights.layers):
            normed = ops.rms_norm(x, layer.input_norm, spec.rms_eps)
            x = x + self._attention(index, layer, normed, rows, rotation)
            x = x + self._mlp(layer, ops.rms_norm(x, layer.post_norm, spec.rms_eps), rows.tiling)
        return ops.rms_norm(x, weights.norm, spec.rms_eps)

    def logits(self, hidden: Tensor, tiling: ops.Tiling) -> Tensor:
        """fp32 logits [..., V] of hidden states [..., hidden]."""
        return ops.head(hidden, self.weights.head, tiling)

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, rows: PassRows, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        spec = self.spec
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias, rows.tiling)
        heads = qkv.view(*x.shape[:2], -1, spec.head_dim)
        query, key, value = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = ops.rms_norm(query, layer.q_norm, spec.rms_eps)
            key = ops.rms_norm(key, layer.k_norm, spec.rms_eps)
        # written before it is read: a row sees the same blocks of keys whether they are new or old
        self.cache.write(index, ops.rope(key, *rotation), value, rows.slots)
        attended = self.ops.paged_attention(
            ops.rope(query, *rotation),
            self.cache.keys[index],
            self.cache.values[index],
            rows.block_table,
            rows.positions,
            num_blocks=rows.num_blocks,
            window=spec.windows[index],
            tiling=rows.tiling,
        )
        return ops.linear(attended.flatten(2), layer.o, layer.o_bias, rows.tiling)

    def _mlp(self, layer: LayerWeights, x: Tensor, tiling: ops.Tiling) -> Tensor:
        gate_up = ops.linear(x, layer.gate_up, layer.gate_up_bias, tiling)
        return ops.linear(ops.silu_mul(gate_up), layer.down, layer.down_bias, tiling)
