"""What passes of learned heads have beside those of a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastspec.kernels.reference.attention import HeadsCall
from fastspec.models.decoder import Decoder
from fastspec.shapes import ForwardBatch, Tiling


class HeadDecoder(Decoder):
    """A decoder that may write keys and values without attending to them.

    Where several ranks share the target and the head has the target's output matrix, of which each rank has some rows,
    the target multiplies with it: all ranks get all logits.
    """

    _lender: Decoder | None = None

    def borrow(self, target: Decoder) -> None:
        """Takes the target, which multiplies with the output matrix where that is the target's own."""
        self._lender = target if self.weights.head is target.weights.head else None

    def head_logits(self, x: Tensor, tiling: Tiling, **options: Any) -> Tensor:
        """As `Decoder`."""
        if self._lender is not None:
            return self._lender.head_logits(x, tiling, **options)
        return super().head_logits(x, tiling, **options)

    def head_argmax(self, x: Tensor, limit: int, tiling: Tiling, out: Tensor, **options: Any) -> None:
        """As `Decoder`."""
        if self._lender is not None:
            self._lender.head_argmax(x, limit, tiling, out, **options)
        else:
            super().head_argmax(x, limit, tiling, out, **options)

    def _resumed(self, made: Tensor, rows: ForwardBatch) -> Tensor:
        """The residual stream after the last layer, from that layer's input and its q, k and v, side by side."""
        hidden = self.spec.hidden_size
        x, qkv = made[..., :hidden].contiguous(), made[..., hidden:].contiguous()
        return self._layer(self.spec.num_layers - 1, x, qkv, rows)[0]

    def _store(self, index: int, heads: Tensor, rows: ForwardBatch, *, num_heads: int) -> Tensor:
        """Keys, normed and rotated, and values of rows into a layer's cache; their queries, if they have any."""
        keys, values = self.cache.keys[index], self.cache.values[index]
        where = keys, values, rows.block_table, rows.positions, rows.write_mask
        call = HeadsCall(heads, *self._tables[0], *where, num_heads=num_heads, norms=self._norms(index))
        return self.ops.store_heads(call)
