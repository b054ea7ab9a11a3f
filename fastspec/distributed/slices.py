"""Ranges of rows and columns that a rank owns of every weight matrix, computed from the model's sizes alone.

The q, k, v, gate and up projections and the LM head are split by output rows, the o and down projections by columns. So
a layer has two sums over ranks (Megatron-LM, arXiv 1909.08053, section 3). Every rank has the whole embedding and all
norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastspec.errors import UnsupportedOption

# supported numbers of ranks: powers of two, so that the partial sum of a rank is a whole subtree of one binary tree
SIZES = (1, 2, 4, 8)


class Sizes(Protocol):
    """Sizes of a model that are split over ranks."""

    @property
    def family(self) -> str:
        """Name of the architecture."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the LM head."""

    @property
    def num_heads(self) -> int:
        """Number of query heads of a layer. 0: attention is not split over ranks."""

    @property
    def num_kv_heads(self) -> int:
        """Number of key heads of a layer. There are as many value heads."""

    @property
    def divided(self) -> Mapping[str, int]:
        """Returns, by name, the sizes that ranks must be able to divide equally, such as query heads and MLP widths."""


class Cut(NamedTuple):
    """Range start..stop-1 of rows or columns."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RankShare:
    """Part of one model that one rank owns.

    Attributes:
        rank, size: index of this rank, and number of all ranks.
        parts: number of parts into which the columns (K) of the o and down projections are split; a multiple of `size`.
            The partial sums of the parts are added as one binary tree, of which a rank computes one subtree.
        one_tree: True if `parts` is the same for every number of ranks. Then results do not depend on that number.
    """

    rank: int
    size: int
    parts: int
    one_tree: bool = False

    def cut(self, total: int, unit: int = 1) -> Cut:
        """Returns this rank's range of `total` rows or columns.

        Args:
            total: number of rows or columns, a multiple of `unit`.
            unit: a range has a multiple of this number. If units cannot be divided equally, the first ranks have one
                unit more.
        """
        units, more = divmod(total // unit, self.size)
        start = self.rank * units + min(self.rank, more)
        return Cut(start * unit, (start + units + (self.rank < more)) * unit)

    def kv_cut(self, kv_heads: int) -> Cut:
        """Returns this rank's range of KV heads. With fewer heads than ranks, several ranks have the same head."""
        if kv_heads >= self.size:
            return self.cut(kv_heads)
        head = self.rank * kv_heads // self.size
        return Cut(head, head + 1)

    def vocab_cut(self, vocab_size: int) -> Cut:
        """Returns this rank's rows of the LM head: all rows if the head is not split."""
        return self.cut(vocab_size) if self.splits_vocab(vocab_size) else Cut(0, vocab_size)

    def splits_vocab(self, vocab_size: int) -> bool:
        """True if the LM head is split. Each part must be a multiple of 16 rows, the unit of packed weights."""
        return vocab_size % (16 * self.parts) == 0

    @property
    def own_parts(self) -> int:
        """Number of parts of K that this rank owns, see the attribute `parts`."""
        return self.parts // self.size


def divides(sizes: Sizes, ranks: int) -> bool:
    """True if a layer of these sizes can be split over `ranks` ranks."""
    kv_heads = sizes.num_kv_heads
    whole = sizes.num_heads % ranks == 0 and all(size % ranks == 0 for size in sizes.divided.values())
    return whole and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def check_divides(sizes: Sizes, ranks: int, name: str) -> None:
    """Refuses a number of ranks over which this model cannot be split.

    Raises:
        UnsupportedOption: the message names the sizes and the supported numbers.
    """
    if ranks in SIZES and divides(sizes, ranks):
        return
    fine = ", ".join(str(each) for each in SIZES if divides(sizes, each))
    heads = {"heads": sizes.num_heads, "key heads": sizes.num_kv_heads} if sizes.num_heads else {}
    found = [f"{size} {what}" for what, size in heads.items()]
    found += [f"{what} {size}" for what, size in sizes.divided.items()]
    raise UnsupportedOption(f"tensor_parallel={ranks} does not divide {name}: {', '.join(found)}; use one of {fine}")


def share_of(sizes: Sizes, rank: int, ranks: int, *, one_tree: bool) -> RankShare:
    """Returns the part of a model that one rank owns.

    Args:
        sizes: sizes of the model.
        rank, ranks: index of the rank, and number of all ranks.
        one_tree: if True, K has as many parts as the largest supported number of ranks. Then results do not depend on
            the number of ranks, but there are more and smaller matrix products.
    """
    parts = max(each for each in SIZES if divides(sizes, each)) if one_tree else ranks
    return RankShare(rank, ranks, max(parts, ranks), one_tree)
