"""Which part of every matrix a rank owns: arithmetic on sizes alone.

qkv, gate/up and the head are cut by output rows, o and down by columns, so that a layer has two sums over ranks
(Megatron-LM, arXiv 1909.08053, section 3). Embedding and norms are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastspec.errors import UnsupportedOption

SIZES = (1, 2, 4, 8)  # numbers of ranks; powers of two, so that their sums are whole subtrees of one binary tree


class Sizes(Protocol):
    """What is cut of a model."""

    @property
    def family(self) -> str:
        """The name of its architecture."""

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""

    @property
    def num_heads(self) -> int:
        """Query heads of a layer; 0: attention is not cut."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer."""

    @property
    def divided(self) -> Mapping[str, int]:
        """What must divide by the number of ranks, by name: query heads, widths of MLPs and the like."""


class Cut(NamedTuple):
    """A range of rows or columns, start..stop-1."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank owns of one model.

    Attributes:
        rank, size: which of how many.
        parts: into so many parts K of o and down is cut; their sums are added as one binary tree, of which a rank
            holds a subtree. A multiple of `size`.
        one_tree: there are as many parts whatever the number of ranks, so that it changes no bit.
    """

    rank: int
    size: int
    parts: int
    one_tree: bool = False

    def cut(self, total: int, unit: int = 1) -> Cut:
        """This rank's range of `total` elements; the first ranks have a unit more where units do not divide."""
        units, more = divmod(total // unit, self.size)
        start = self.rank * units + min(self.rank, more)
        return Cut(start * unit, (start + units + (self.rank < more)) * unit)

    def kv_cut(self, kv_heads: int) -> Cut:
        """This rank's key heads; with fewer heads than ranks several ranks have the same one."""
        if kv_heads >= self.size:
            return self.cut(kv_heads)
        head = self.rank * kv_heads // self.size
        return Cut(head, head + 1)

    def vocab_cut(self, vocab_size: int) -> Cut:
        """This rank's rows of the head; all of them where they do not divide."""
        return self.cut(vocab_size) if self.splits_vocab(vocab_size) else Cut(0, vocab_size)

    def splits_vocab(self, vocab_size: int) -> bool:
        """Whether the head is cut: into parts of whole 16 rows, as packed weights have them."""
        return vocab_size % (16 * self.parts) == 0

    @property
    def own_parts(self) -> int:
        """Parts of K on this rank."""
        return self.parts // self.size


def divides(sizes: Sizes, ranks: int) -> bool:
    """Whether so many ranks can share a layer of these sizes."""
    kv_heads = sizes.num_kv_heads
    whole = sizes.num_heads % ranks == 0 and all(size % ranks == 0 for size in sizes.divided.values())
    return whole and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def check_divides(sizes: Sizes, ranks: int, name: str) -> None:
    """Refuses a number of ranks that this model cannot be cut into.

    Raises:
        UnsupportedOption: names the sizes, and which numbers would do.
    """
    if ranks in SIZES and divides(sizes, ranks):
        return
    fine = ", ".join(str(each) for each in SIZES if divides(sizes, each))
    heads = {"heads": sizes.num_heads, "key heads": sizes.num_kv_heads} if sizes.num_heads else {}
    found = [f"{size} {what}" for what, size in heads.items()]
    found += [f"{what} {size}" for what, size in sizes.divided.items()]
    raise UnsupportedOption(f"tensor_parallel={ranks} does not divide {name}: {', '.join(found)}; use one of {fine}")


def share_of(sizes: Sizes, rank: int, ranks: int, *, one_tree: bool) -> Share:
    """The share of a rank.

    Args:
        one_tree: cut K as finely as the most ranks there may be would, so that the number of ranks never changes a
            bit. Costs more, smaller products.
    """
    parts = max(each for each in SIZES if divides(sizes, each)) if one_tree else ranks
    return Share(rank, ranks, max(parts, ranks), one_tree)
