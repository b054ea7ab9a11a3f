"""What passes of learned heads have beside those of a model."""

from __future__ import annotations

from torch import Tensor

from fastspec.models.decoder import Decoder
from fastspec.shapes import ForwardBatch


class HeadDecoder(Decoder):
    """A decoder that may write keys and values without attending to them."""

    def _store(self, index: int, heads: Tensor, rows: ForwardBatch, *, num_heads: int) -> Tensor:
        """Keys, normed and rotated, and values of rows into a layer's cache; their queries, if they have any."""
        keys, values = self.cache.keys[index], self.cache.values[index]
        where = keys, values, rows.block_table, rows.positions, rows.write_mask
        return self.ops.store_heads(heads, *self._tables[0], *where, num_heads=num_heads, norms=self._norms(index))
