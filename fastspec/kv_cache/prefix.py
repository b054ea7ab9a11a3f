"""Prefix cache: pages whose K/V a later prompt with the same first tokens may use. Standard library only.

Prompts are stored as a tree (as in SGLang, arXiv 2312.07104, section 3). A node stands for the `unit` tokens that
follow the tokens of its parent, and has the pages with their K/V. It is found by its parent and its tokens, not by a
hash alone. So two prompts are never confused. The parent of the first nodes is the salt. It names everything on which
K/V depend besides the tokens, such as the models.

The `PageTable` owns the pages. This file only records which pages are kept, and for which tokens. A row (a sequence in
a batch slot) that uses a node's pages also uses the pages of all its ancestors. So if no row uses a node, no row uses
its descendants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from fastspec.kv_cache.pages import PageTable


@dataclass(slots=True, eq=False)
class Node:
    """Node of the tree of stored prompts: some consecutive tokens, and the KV cache pages with their K/V.

    Attributes:
        parent: the node with the tokens before this node's. A first node has the prefix cache's salt instead.
        tokens: the node's own tokens, and the `PrefixCache.ahead` tokens that follow them.
        pages: the pages with K/V of the node's own tokens.
        drafted: True if the pages also have the draft's K/V.
        children: number of nodes whose parent is this node.
    """

    parent: Hashable
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    drafted: bool = False
    children: int = 0

    @property
    def key(self) -> tuple[Hashable, tuple[int, ...]]:
        """Key of this node in the prefix cache: (parent, tokens)."""
        return self.parent, self.tokens


class PrefixCache:
    """Keeps KV cache pages of prompts. Frees the least recently used pages when running requests need pages (LRU).

    Args:
        table: owner of the pages.
        unit: number of tokens of each node, a multiple of the page size.
        ahead: number of later tokens on which the K/V of a position also depend. 0 for a model. 1 for a draft head
            whose input at position i is token i + 1.
        salt: everything on which K/V depend besides the tokens, such as the names of the models.
        on_drop: function that is called with each node that is dropped. None: nothing is called.

    Raises:
        ValueError: `unit` is not a multiple of the page size.
    """

    def __init__(
        self,
        table: PageTable,
        unit: int,
        ahead: int = 0,
        salt: Hashable = None,
        on_drop: Callable[[Node], None] | None = None,
    ) -> None:
        if unit < 1 or unit % table.page_size:
            raise ValueError(f"got nodes of {unit} positions; need a multiple of the page size, {table.page_size}")
        self.unit = unit
        self._table = table
        self._ahead = ahead
        self._salt = salt
        self._variant: Hashable = None
        self._on_drop = on_drop or _nothing
        self._nodes: OrderedDict[tuple[Hashable, tuple[int, ...]], Node] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Number of nodes in the prefix cache."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int], limit: int) -> list[Node]:
        """Returns the longest path of nodes whose tokens are a prefix of `tokens`. Marks the nodes as recently used.

        Args:
            tokens: token ids of a prompt.
            limit: largest number of positions that the nodes of the path may have together.
        """
        found: list[Node] = []
        parent = self._root
        for start in range(0, limit - self.unit + 1, self.unit):
            node = self._nodes.get((parent, self._piece(tokens, start)))
            if node is None:
                break
            found.append(node)
            parent = node
        self._used(found)
        return found

    def insert(self, nodes: list[Node], tokens: Sequence[int], pages: Sequence[int], limit: int) -> list[Node]:
        """Adds nodes for the tokens of a request. The request's pages are then kept for later prompts.

        If another request has inserted the same tokens in the meantime, the other request's pages are kept.

        Args:
            nodes: path of nodes that the request already shares, starting at the first node.
            tokens: token ids of the request.
            pages: KV cache pages of the request, in the order of positions.
            limit: only positions below this may be shared.

        Returns:
            The path of nodes that the request shares from now on.
        """
        path = list(nodes)
        each = self.unit // self._table.page_size
        while (len(path) + 1) * self.unit <= limit and len(path) * self.unit + self.unit + self._ahead <= len(tokens):
            parent, own = (path[-1] if path else self._root), tuple(pages[len(path) * each : (len(path) + 1) * each])
            node = self._nodes.get((parent, piece := self._piece(tokens, len(path) * self.unit)))
            if node is None:
                self._table.keep(own)
                node = self._nodes[parent, piece] = Node(parent, piece, own)
                if path:
                    path[-1].children += 1
            elif node.pages != own:
                break
            path.append(node)
        self._used(path)
        return path

    def use_variant(self, variant: Hashable) -> None:
        """Selects a variant of the models, for example other weights. Each variant has its own nodes.

        `match` and `insert` use only nodes of the selected variant. Nodes of other variants are kept.

        Args:
            variant: any hashable name of the variant. None: the first variant.
        """
        self._variant = variant

    @property
    def _root(self) -> Hashable:
        """Parent that first nodes have: (salt, selected variant)."""
        return self._salt, self._variant

    def make_room(self, count: int, spared: Collection[Node] = ()) -> bool:
        """Drops nodes that no request uses, least recently used first, until `count` pages are free.

        Returns True if that many pages are free now.

        Args:
            count: number of pages that must be free.
            spared: nodes that must not be dropped.
        """
        passed = 0  # number of consecutive nodes that could not be dropped
        while self._table.num_free < count and passed < len(self._nodes):
            node = next(iter(self._nodes.values()))
            if node.children or node in spared or self._table.in_use(node.pages[0]):
                self._nodes.move_to_end(node.key)
                passed += 1
            else:
                self._give_up(node)
                passed = 0
        return self._table.num_free >= count

    def clear(self) -> None:
        """Drops all nodes."""
        for node in self._nodes.values():
            self._table.give_up(node.pages)
            self._on_drop(node)
        self._nodes.clear()

    def check_integrity(self) -> None:
        """Counts kept pages and children of nodes again, and compares the results with the stored counts.

        Raises:
            RuntimeError: pages are kept for no node or for two nodes, a parent is missing, or children are miscounted.
        """
        pages = [page for node in self._nodes.values() for page in node.pages]
        children = dict.fromkeys(self._nodes.values(), 0)
        lost = []
        for node in self._nodes.values():
            if isinstance(node.parent, Node):
                lost += [] if node.parent in children else [node]
                children[node.parent] = children.get(node.parent, 0) + 1
        miscounted = [node for node, count in children.items() if node.children != count]
        if sorted(pages) != sorted(self._table.kept) or lost or miscounted:
            raise RuntimeError(
                f"prefix cache corrupt: pages {pages}, kept {self._table.kept}, {len(lost)} nodes without their "
                f"parent, {len(miscounted)} with miscounted children"
            )

    def _piece(self, tokens: Sequence[int], start: int) -> tuple[int, ...]:
        return tuple(tokens[start : start + self.unit + self._ahead])

    def _used(self, nodes: list[Node]) -> None:
        """Marks the nodes of a path as recently used.

        The first node becomes the most recent one, so that a node is dropped before its parent.
        """
        for node in reversed(nodes):
            self._nodes.move_to_end(node.key)

    def _give_up(self, node: Node) -> None:
        self._table.give_up(node.pages)
        self._on_drop(node)
        del self._nodes[node.key]
        if isinstance(node.parent, Node):
            node.parent.children -= 1


def _nothing(node: Node) -> None:
    """Does nothing."""
