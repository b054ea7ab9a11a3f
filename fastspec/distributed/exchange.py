"""Exchanges between ranks inside a pass: sums of partial products, and joining of logits.

Partial sums are fp32. Every rank adds them in the order of one binary tree, so all ranks get the same bits.
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
    """Collective operations between the ranks of a model. All ranks call them in the same order."""

    def describe(self) -> str:
        """Describes the exchange for `explain`."""

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum over ranks of fp32 tensors of one shape."""

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Returns residual + sum over ranks [+ bias], rounded once to residual's dtype.

        Args:
            partial: fp32 with residual's shape, or with one more leading axis, which is added as a tree first.
            bias: [N], added along the last axis.
        """

    def gather(self, part: Tensor) -> Tensor:
        """Joins [..., W] 4-byte elements of every rank along the last axis: [..., size * W]."""

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """Writes the id of each row's largest logit to `out`, int64 [R].

        Args:
            keys: uint64 [R], made by `kernels.reference.keys_of` from this rank's logits.
            width: number of ids of a rank. Rank r has ids r * width .. (r + 1) * width - 1.
            out: may have any stride.
        """


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of a power of two of tensors: first of neighbours, then of neighbouring sums."""
    level = list(parts)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def one_way(partial: Tensor, residual: Tensor) -> Tensor:
    """Adds the parts along the leading axis of `partial`, if it has one axis more than `residual`.

    The result has residual's shape.
    """
    return tree_sum(partial.unbind()) if partial.dim() > residual.dim() else partial


def add_rounded(total: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Returns residual + (total [+ bias]), computed in fp32 and rounded to residual's dtype."""
    if bias is not None:
        total = total + bias.float()
    return (residual.float() + total).to(residual.dtype)


class RankSums:
    """Calls `Exchange.added`, and provides the memory for kernels that sum over ranks themselves.

    It implements `kernels.reference.layer.Reduce`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __call__(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Returns residual + sum over ranks [+ bias]."""
        return self._exchange.added(partial, bias, residual)

    def room_for(self, elements: int) -> Room | None:
        """Returns memory of all ranks for `elements` fp32 elements. None if sums of that size do not use it."""
        found: Room | None = getattr(self._exchange, "room", None)
        return found if found is not None and elements <= min(found.elements, WITH_NORM[found.size]) else None


class Alone:
    """Exchange for one rank, which has nothing to exchange."""

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
    """Exchange of CPU tensors by gloo."""

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
