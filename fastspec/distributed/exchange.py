"""Exchanges between ranks inside a pass: all-reduce of partial sums, and all-gather of logits.

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
        """Describes how ranks exchange tensors, as a short text for `explain`."""

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum of all ranks' `partial`, which are fp32 tensors of one shape."""

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Returns residual + the sum of all ranks' `partial` [+ bias], rounded once to residual's dtype.

        Args:
            partial: fp32 with residual's shape, or with one more leading axis. The parts along that axis are summed
                first, as a tree.
            bias: [N], added along the last axis. None: no bias.
            residual: [..., N], equal on all ranks.
        """

    def gather(self, part: Tensor) -> Tensor:
        """Returns all ranks' `part`, [..., W] of 4-byte elements, joined along the last axis to [..., size * W]."""

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """Writes the token id of each row's largest logit over all ranks to `out`.

        Args:
            keys: uint64 [R], for each row the key of this rank's largest logit, see `kernels.reference.keys_of`.
            width: number of token ids per rank. Rank r has ids r * width .. (r + 1) * width - 1. 0: keys have the ids
                of all ranks already.
            out: int64 [R], receives the ids. Any stride is possible.
        """


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of 2^n tensors as a binary tree: neighbours are added first, then neighbouring sums."""
    level = list(parts)
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def sum_parts(partial: Tensor, residual: Tensor) -> Tensor:
    """Returns a rank's partial sum with residual's shape.

    If `partial` has one more leading axis than `residual`, the parts along that axis are added as a tree.
    """
    return tree_sum(partial.unbind()) if partial.dim() > residual.dim() else partial


def add_rounded(total: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Returns residual + (total [+ bias]), computed in fp32 and rounded to residual's dtype."""
    if bias is not None:
        total = total + bias.float()
    return (residual.float() + total).to(residual.dtype)


class RankSums:
    """Sums over ranks by `Exchange.added`, or provides the memory for kernels that sum over ranks themselves.

    It implements `kernels.reference.layer.Reduce`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __call__(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Returns residual + the sum of all ranks' `partial` [+ bias]; see `Exchange.added`."""
        return self._exchange.added(partial, bias, residual)

    def room_for(self, elements: int) -> Room | None:
        """Returns the memory of all GPUs through which a kernel sums `elements` fp32 elements over ranks.

        None: sums of that size use `Exchange.added` instead.
        """
        found: Room | None = getattr(self._exchange, "room", None)
        return found if found is not None and elements <= min(found.elements, WITH_NORM[found.size]) else None


class Alone:
    """Collective operations of a single rank, which need no communication."""

    def describe(self) -> str:
        """Describes how ranks exchange tensors, as a short text for `explain`."""
        return "none: one rank"

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum of all ranks' `partial`; see `Exchange.sum`."""
        return partial

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Returns residual + the sum of all ranks' `partial` [+ bias]; see `Exchange.added`."""
        return add_rounded(sum_parts(partial, residual), bias, residual)

    def gather(self, part: Tensor) -> Tensor:
        """Returns all ranks' `part`, joined along the last axis; see `Exchange.gather`."""
        return part

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """Writes the id of each row's largest logit over all ranks to `out`; see `Exchange.largest`."""
        out.copy_(largest_of([keys.view(torch.int64)], width))


class OverHosts:
    """Collective operations on CPU tensors, by gloo."""

    def __init__(self, world: World) -> None:
        self._world = world

    def describe(self) -> str:
        """Describes how ranks exchange tensors, as a short text for `explain`."""
        return "gloo: partial sums gathered in fp32, added as one tree"

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum of all ranks' `partial`; see `Exchange.sum`."""
        return tree_sum(self._world.gather(partial.contiguous()))

    def added(self, partial: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Returns residual + the sum of all ranks' `partial` [+ bias]; see `Exchange.added`."""
        return add_rounded(self.sum(sum_parts(partial, residual)), bias, residual)

    def gather(self, part: Tensor) -> Tensor:
        """Returns all ranks' `part`, joined along the last axis; see `Exchange.gather`."""
        return torch.cat(self._world.gather(part.contiguous()), dim=-1)

    def largest(self, keys: Tensor, width: int, out: Tensor) -> None:
        """Writes the id of each row's largest logit over all ranks to `out`; see `Exchange.largest`."""
        out.copy_(largest_of(self._world.gather(keys.view(torch.int64)), width))
