"""Exchanges between ranks inside a pass: sums of partial products, and parts of logits.

Partial sums are fp32. Every rank adds them in the order of one binary tree, so all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastspec.distributed.world import World
from fastspec.kernels.reference import largest_of
from fastspec.kernels.room import WITH_NORM, Room


class Exchange(Protocol):
    """Exchanges between the ranks of a model. All take part in the same order."""

    def describe(self) -> str:
        """Describes the exchange for `explain`."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over ranks of fp32 tensors of one shape."""

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + sum over ranks [+ bias], rounded once, in residual's dtype.

        Args:
            partial: fp32, of residual's shape, or with an axis more in front, which is added as a tree first.
            bias: [N], of the last axis.
        """

    def gather(self, part: Tensor) -> Tensor:
        """[..., W] 4-byte elements of every rank side by side: [..., size * W]."""

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """Writes to out int64 [R] the id of each row's largest logit.

        Args:
            keys: uint64 [R], as `kernels.reference.keys_of` makes them of this rank's logits.
            width: ids of each rank; they follow one another by rank.
            out: any stride.
        """


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of a power of two of tensors: neighbours first, then neighbouring sums."""
    level = list(parts)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def one_way(partial: Tensor, residual: Tensor) -> Tensor:
    """A partial sum of residual's shape; see `Exchange.added`."""
    return tree_sum(partial.unbind()) if partial.dim() > residual.dim() else partial


def add_rounded(total: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual + (total [+ bias]) in fp32, rounded to residual's dtype."""
    if bias is not None:
        total = total + bias.float()
    return (residual.float() + total).to(residual.dtype)


class RankSums:
    """`Exchange.added` as `kernels.reference.layer.Reduce`, and memory for kernels that add over ranks themselves."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __call__(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + sum over ranks [+ bias]."""
        return self._exchange.added(partial, bias, residual)

    def room_for(self, elements: int) -> Room | None:
        """Memory of all ranks for `elements` fp32 elements; None if sums of that size use another method."""
        found: Room | None = getattr(self._exchange, "room", None)
        return found if found is not None and elements <= min(found.elements, WITH_NORM[found.size]) else None


class Alone:
    """The exchange of one rank: there is nothing to exchange."""

    def describe(self) -> str:
        """Describes the exchange for `explain`."""
        return "none: one rank"

    def sum(self, partial: Tensor) -> Tensor:
        """Sums fp32 tensors over ranks."""
        return partial

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Adds the sum over ranks [and bias] to residual, rounded once."""
        return add_rounded(one_way(partial, residual), bias, residual)

    def gather(self, part: Tensor) -> Tensor:
        """Joins the parts of all ranks along the last axis."""
        return part

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """Writes the id of each row's largest logit to out."""
        out.copy_(largest_of([keys.view(torch.int64)], width))


class OverHosts:
    """Exchange of CPU tensors over gloo."""

    def __init__(self, world: World) -> None:
        self._world = world

    def describe(self) -> str:
        """Describes the exchange for `explain`."""
        return "gloo: partial sums gathered in fp32, added as one tree"

    def sum(self, partial: Tensor) -> Tensor:
        """Sums fp32 tensors over ranks."""
        return tree_sum(self._world.gather(partial.contiguous()))

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Adds the sum over ranks [and bias] to residual, rounded once."""
        return add_rounded(self.sum(one_way(partial, residual)), bias, residual)

    def gather(self, part: Tensor) -> Tensor:
        """Joins the parts of all ranks along the last axis."""
        return torch.cat(self._world.gather(part.contiguous()), dim=-1)

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """Writes the id of each row's largest logit to out."""
        out.copy_(largest_of(self._world.gather(keys.view(torch.int64)), width))
