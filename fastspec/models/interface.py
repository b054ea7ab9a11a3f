"""What the step and the proposers need of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fastspec.shapes import ForwardBatch, Tiling


class CausalModel(Protocol):
    """What the step needs of a model; tests put tables of logits in its place."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def hidden(self, rows: ForwardBatch) -> Tensor:
        """Feeds rows, writes their K/V; returns hidden states [B, Q, hidden] for `logits` and `pick`."""

    def logits(self, hidden: Tensor, tiling: Tiling) -> Tensor:
        """fp32 logits [..., V] of hidden states [..., hidden]."""

    def argmax(self, hidden: Tensor, limit: int, tiling: Tiling, out: Tensor) -> None:
        """Writes to out int64 [R] the id below `limit` of the largest logit of hidden [R, hidden]: the lowest such."""
