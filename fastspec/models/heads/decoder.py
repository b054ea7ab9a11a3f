"""What passes of learned heads have beside those of a model."""

from __future__ import annotations

from torch import Tensor

from fastspec.models.decoder import Decoder
from fastspec.shapes import ForwardBatch


class HeadDecoder(Decoder):
    """A decoder that may write keys and values without attending to them."""

    def _resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """The residual stream behind the last layer, from that layer's input and its q, k and v, side by side."""
        hidden = self.spec.hidden_size
        x, qkv = made[..., :hidden].contiguous(), made[..., hidden:].contiguous()
        return self._layer(self.spec.num_layers - 1, x, qkv, rows)[0]

    def _store(self, index: int, heads: Tensor, rows: ForwardBatch, *, num_heads: int) -> Tensor:
        """Keys, normed and rotated, and values of rows into a layer's cache; their queries, if they have any."""
        keys, values = self.cache.keys[index], self.cache.values[index]
        where = keys, values, rows.block_table, rows.positions, rows.write_mask
        return self.ops.store_heads(heads, *self._tables[0], *where, num_heads=num_heads, norms=self._norms(index))
