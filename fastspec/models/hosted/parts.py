"""A rank's part of a hosted model's products and experts: sums over ranks follow what is cut by columns.

Products are multiplied in `Share.own_parts` pieces, so that their shapes do not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import proxy

import torch
from torch import Tensor, nn

from fastspec.distributed.exchange import tree_sum
from fastspec.kernels.common.weights import Weight
from fastspec.models.hosted.swaps import Running, our_op


class PartProduct(nn.Module):
    """A rank's rows or columns of y = x W^T + b, in the place of an nn.Linear.

    Args:
        running: which owns this module.
        weights: the pieces, [N / parts, K] by rows or [N, K / parts] by columns.
        bias: [N / ranks] by rows, [N] by columns.
        columns: by columns: x has this rank's K / ranks elements, and y is the sum over ranks.
    """

    _running: Running

    def __init__(self, running: Running, weights: Sequence[Weight], bias: Tensor | None, *, columns: bool) -> None:
        super().__init__()
        self._running = proxy(running)
        self.weights, self._columns = tuple(weights), columns
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N], each of them this rank's part or all of it."""
        with our_op(self._running):
            return self._summed(x) if self._columns else self._rows(x)

    def _rows(self, x: Tensor) -> Tensor:
        running, x = self._running, x.contiguous()
        biases = [None] * len(self.weights) if self.bias is None else self.bias.chunk(len(self.weights))
        pieces = zip(self.weights, biases, strict=True)
        made = [running.ops.linear(x, weight, bias, running.tiling) for weight, bias in pieces]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    def _summed(self, x: Tensor) -> Tensor:
        running = self._running
        given = zip(x.chunk(len(self.weights), dim=-1), self.weights, strict=True)
        partial: list[Tensor] = [
            running.ops.linear(part.contiguous(), weight, None, running.tiling, out_dtype=torch.float32)
            for part, weight in given
        ]
        total = running.exchange.sum(tree_sum(partial))
        return (total if self.bias is None else total + self.bias.float()).to(x.dtype)
