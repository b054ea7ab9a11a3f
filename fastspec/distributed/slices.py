"""Rows and columns of every matrix that a rank owns, computed from sizes alone.

qkv, gate/up and the head are split by output rows; o and down by columns. So a layer has two sums over ranks
(Megatron-LM, arXiv 1909.08053, section 3). Every rank has the whole embedding and all norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastspec.errors import UnsupportedOption

# supported numbers of ranks: powers of two, so that the sum of a rank is a whole subtree of one binary tree
SIZES = (1, 2, 4, 8)


class Sizes(Protocol):
    """Sizes of a model that are split over ranks."""

    @property
    def family(self) -> str:
        """Name of the architecture."""

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""

    @property
    def num_heads(self) -> int:
        """Query heads of a layer. 0: attention is not split."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer."""

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
        rank, size: number of this rank, and number of all ranks.
        parts: number of parts into which dimension K of o and down is split; a multiple of `size`. The partial sums are
            added as one binary tree, and a rank computes one subtree.
        one_tree: True if `parts` is the same for every number of ranks. Then this number changes no bit.
    """

    rank: int
    size: int
    parts: int
    one_tree: bool = False

    def cut(self, total: int, unit: int = 1) -> Cut:
        """Returns this rank's range of `total` elements, in units of `unit`.

        The first ranks get one unit more if needed.
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
        """Returns this rank's rows of the head: all rows if the head is not split."""
        return self.cut(vocab_size) if self.splits_vocab(vocab_size) else Cut(0, vocab_size)

    def splits_vocab(self, vocab_size: int) -> bool:
        """True if the head is split. Each part must be a multiple of 16 rows, the unit of packed weights."""
        return vocab_size % (16 * self.parts) == 0

    @property
    def own_parts(self) -> int:
        """Number of parts of K on this rank."""
        return self.parts // self.size


def divides(sizes: Sizes, ranks: int) -> bool:
    """True if a layer of these sizes can be split over `ranks` ranks."""
    kv_heads = sizes.num_kv_heads
    whole = sizes.num_heads % ranks == 0 and all(size % ranks == 0 for size in sizes.divided.values())
    return whole and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def check_divides(sizes: Sizes, ranks: int, name: str) -> None:
    """Refuses a number of ranks over which this model cannot be split.

    Raises:
        UnsupportedOption: names the sizes and the supported numbers.
    """
    if ranks in SIZES and divides(sizes, ranks):
        return
    fine = ", ".join(str(each) for each in SIZES if divides(sizes, each))
    heads = {"heads": sizes.num_heads, "key heads": sizes.num_kv_heads} if sizes.num_heads else {}
    found = [f"{size} {what}" for what, size in heads.items()]
    found += [f"{what} {size}" for what, size in sizes.divided.items()]
    raise UnsupportedOption(f"tensor_parallel={ranks} does not divide {name}: {', '.join(found)}; use one of {fine}")


def share_of(sizes: Sizes, rank: int, ranks: int, *, one_tree: bool) -> RankShare:
    """Returns the share of a rank.

    Args:
        one_tree: if True, K has as many parts as the largest supported number of ranks. Then the number of ranks
            changes no bit, but there are more and smaller products.
    """
    parts = max(each for each in SIZES if divides(sizes, each)) if one_tree else ranks
    return RankShare(rank, ranks, max(parts, ranks), one_tree)
