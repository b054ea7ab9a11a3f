"""The prefix cache: pages whose K/V a later prompt may begin with. Standard library only.

Prompts are kept as a tree (as in SGLang, arXiv 2312.07104, section 3). A node stands for `unit` tokens behind those of
its parent, and for the pages with their K/V. It is found by its parent and its tokens, not by a hash of them alone: two
prompts cannot be taken for each other. The first ones are found by the salt: what else K/V depend on, as the model.

The owner of a page is the `PageTable`; here is only which of them are kept, and for which tokens. A row that has a
node's pages has those of all its parents, so below an idle node all are idle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from fastspec.kv_cache.pages import PageTable


@dataclass(slots=True, eq=False)
class Node:
    """`unit` tokens behind those of the parent.

    Attributes:
        parent: the node before it; the cache's salt for the first.
        tokens: its own, and the `ahead` ones that follow.
        pages: that hold K/V of its own.
        drafted: whether they hold the draft's K/V as well.
        children: nodes behind it.
    """

    parent: Hashable
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    drafted: bool = False
    children: int = 0

    @property
    def key(self) -> tuple[Hashable, tuple[int, ...]]:
        """What it is found by."""
        return self.parent, self.tokens


class PrefixCache:
    """Keeps pages of prompts, and gives up those that were not used for the longest time where rows need pages.

    Args:
        table: owns the pages.
        unit: positions of a node, a multiple of the page size.
        ahead: tokens behind a position that what lies in its page depends on.
        salt: what K/V depend on besides tokens; any name of it.

    Raises:
        ValueError: a node would not end where a page does.
    """

    def __init__(self, table: PageTable, unit: int, ahead: int = 0, salt: Hashable = None) -> None:
        if unit < 1 or unit % table.page_size:
            raise ValueError(f"got nodes of {unit} positions; need a multiple of the page size, {table.page_size}")
        self.unit = unit
        self._table = table
        self._ahead = ahead
        self._salt = salt
        self._nodes: OrderedDict[tuple[Hashable, tuple[int, ...]], Node] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        """Nodes."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int], most: int) -> list[Node]:
        """The longest run of nodes that `tokens` begin with; they count as used now.

        Args:
            tokens: of a prompt.
            most: positions that may be shared.
        """
        found: list[Node] = []
        parent: Hashable = self._salt
        for start in range(0, most - self.unit + 1, self.unit):
            node = self._nodes.get((parent, self._piece(tokens, start)))
            if node is None:
                break
            found.append(node)
            parent = node
        self._used(found)
        return found

    def insert(self, nodes: list[Node], tokens: Sequence[int], pages: Sequence[int], most: int) -> list[Node]:
        """Keeps what a row has computed.

        Where the same tokens have come to other pages meanwhile, those are kept and this row's are not.

        Args:
            nodes: that the row shares, from the first.
            tokens: of the row.
            pages: of the row, in the order of positions.
            most: positions from 0 on whose K/V may be shared.

        Returns:
            All nodes that the row shares from now on.
        """
        path = list(nodes)
        each = self.unit // self._table.page_size
        while (len(path) + 1) * self.unit <= most and len(path) * self.unit + self.unit + self._ahead <= len(tokens):
            parent, own = (path[-1] if path else self._salt), tuple(pages[len(path) * each : (len(path) + 1) * each])
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

    def make_room(self, count: int, spared: Collection[Node] = ()) -> bool:
        """Gives up nodes that no row uses, until `count` pages are free; whether they are.

        Args:
            count: pages.
            spared: nodes that stay.
        """
        passed = 0  # since one was given up
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
        """Gives up everything."""
        for node in self._nodes.values():
            self._table.give_up(node.pages)
        self._nodes.clear()

    def check_integrity(self) -> None:
        """Recounts from scratch.

        Raises:
            RuntimeError: pages are kept for no node or for two, a parent is gone, or children are miscounted.
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
        """The first is used last of all, so that a node is given up before its parent."""
        for node in reversed(nodes):
            self._nodes.move_to_end(node.key)

    def _give_up(self, node: Node) -> None:
        self._table.give_up(node.pages)
        del self._nodes[node.key]
        if isinstance(node.parent, Node):
            node.parent.children -= 1
