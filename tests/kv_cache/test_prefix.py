"""The prefix cache against a model of pages and what was written to them; its mistakes, planted, are seen."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec.errors import OutOfPages
from fastspec.kv_cache.pages import PageTable
from fastspec.kv_cache.prefix import Node, PrefixCache

PAGE, UNIT = 2, 4


class World:
    """Rows that come and go over few pages. What a page holds is the tokens that its K/V depend on."""

    def __init__(self, seed: int, ahead: int = 0, num_pages: int = 24) -> None:
        self.rng = random.Random(seed)
        self.ahead = ahead
        self.table = PageTable(num_pages, PAGE)
        self.cache = PrefixCache(self.table, UNIT, ahead)
        self.held: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, tuple[list[int], list[Node]]] = {}
        self.found = 0

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.rng.choice([*[self.admit] * 4, *[self.leave] * 3, self.evict])(step)
            self.look()
        for row in list(self.rows):
            self.table.release(row)
        self.rows.clear()
        self.look()
        assert self.cache.make_room(self.table.num_pages - 1)
        assert (len(self.cache), self.table.num_idle) == (0, 0)
        self.look()

    def admit(self, row: int) -> None:
        tokens = self.rng.choices(range(2), weights=(3, 1), k=self.rng.randint(2, 20))
        nodes = self.cache.match(tokens, len(tokens) - 2)
        shared = tuple(page for node in nodes for page in node.pages)
        if not self.table.can_fit(len(tokens), shared):
            with pytest.raises(OutOfPages):
                self.table.reserve(row, len(tokens), shared)
            return
        assert self.cache.make_room(self.table.pages_for(len(tokens)) - len(shared), nodes)
        pages = self.table.reserve(row, len(tokens), shared)
        for place, page in enumerate(pages[len(shared) :], len(shared)):
            self.held[page] = self.meant(tokens, place)
        self.found += len(nodes)
        self.rows[row] = (tokens, self.cache.insert(nodes, tokens, pages, len(tokens) - 2))

    def meant(self, tokens: list[int], place: int) -> tuple[int, ...]:
        return tuple(tokens[: (place + 1) * PAGE + self.ahead])

    def leave(self, step: int) -> None:
        if self.rows:
            row = self.rng.choice(list(self.rows))
            del self.rows[row]
            self.table.release(row)

    def evict(self, step: int) -> None:
        self.cache.make_room(self.rng.randrange(self.table.num_pages))

    def look(self) -> None:
        self.table.check_integrity()
        self.cache.check_integrity()
        for row, (tokens, _) in self.rows.items():
            for place, page in enumerate(self.table.pages_of(row)):
                assert self.held[page] == self.meant(tokens, place), "a row's page holds K/V of other tokens"


def worlds(count: int) -> int:
    """Runs so many; returns how many nodes were found."""
    ran = [World(seed, ahead=1) for seed in range(count)]
    for world in ran:
        world.run(60)
    return sum(world.found for world in ran)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), ahead=st.integers(0, 1))
def test_rows_find_what_their_tokens_made_and_nothing_is_lost(seed: int, ahead: int) -> None:
    World(seed, ahead).run(60)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(seed=st.integers(0, 10**6), ahead=st.integers(0, 1), num_pages=st.integers(11, 60))
def test_a_long_random_run_keeps_pages_and_nodes_consistent(seed: int, ahead: int, num_pages: int) -> None:
    World(seed, ahead, num_pages).run(300)


def own_tokens_alone(self: PrefixCache, tokens: Any, start: int) -> tuple[int, ...]:
    return tuple(tokens[start : start + UNIT])


def ignoring_parent(patch: pytest.MonkeyPatch) -> None:
    match = PrefixCache.match

    def matched(self: PrefixCache, tokens: Any, most: int) -> list[Node]:
        by_tokens = {node.tokens: node for node in self._nodes.values()}
        found = []
        for start in range(0, most - UNIT + 1, UNIT):
            node = by_tokens.get(tuple(tokens[start : start + UNIT + self._ahead]))
            if node is None:
                break
            found.append(node)
        return found or match(self, tokens, most)

    patch.setattr(PrefixCache, "match", matched)


def evicting_pages_in_use(patch: pytest.MonkeyPatch) -> None:
    def make_room(self: PrefixCache, count: int, spared: Any = ()) -> bool:
        while self._table.num_free < count and self._nodes:
            node = next(iter(self._nodes.values()))
            for page in node.pages:  # free, whoever has them
                self._table._kept.remove(page)
                self._table._free.append(page)
            del self._nodes[node.key]
        return True

    patch.setattr(PrefixCache, "make_room", make_room)


def giving_up_what_was_matched(patch: pytest.MonkeyPatch) -> None:
    make_room = PrefixCache.make_room
    patch.setattr(PrefixCache, "make_room", lambda self, count, spared=(): make_room(self, count))
    patch.setattr(PrefixCache, "_used", lambda self, nodes: None)


def forgetting_what_follows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_piece", own_tokens_alone)


@pytest.mark.parametrize(
    "plant", [ignoring_parent, evicting_pages_in_use, giving_up_what_was_matched, forgetting_what_follows]
)
def test_a_planted_mistake_is_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, KeyError, OutOfPages)):
        worlds(60)


def test_worlds_share_pages() -> None:
    """What proves nothing where nothing is found."""
    assert worlds(20) > 100


def cached(table: PageTable, cache: PrefixCache, row: str, tokens: list[int]) -> list[Node]:
    nodes = cache.match(tokens, len(tokens) - 2)
    pages = table.reserve(row, len(tokens), tuple(page for node in nodes for page in node.pages))
    return cache.insert(nodes, tokens, pages, len(tokens) - 2)


def test_the_longest_unused_goes_first_and_a_node_before_its_parent() -> None:
    table = PageTable(20, PAGE)
    cache = PrefixCache(table, UNIT)
    first, second = [1] * 10, [2] * 10
    for row, tokens in (("a", first), ("b", second)):
        assert len(cached(table, cache, row, tokens)) == 2
        table.release(row)
    cache.match(first, 8)  # used after the second
    assert cache.make_room(table.num_free + 2)
    assert (len(cache.match(first, 8)), len(cache.match(second, 8))) == (2, 1)
    for left in (2, 1):
        cache.match(first, 8)
        assert cache.make_room(table.num_free + 2)
        assert (len(cache.match(first, 8)), len(cache.match(second, 8))) == (left, 0)


def test_pages_of_rows_that_run_are_never_given_up() -> None:
    table = PageTable(12, PAGE)
    cache = PrefixCache(table, UNIT)
    (node, _) = cached(table, cache, "a", [1] * 10)
    assert not cache.make_room(table.num_free + 1)
    assert len(cache) == 2
    table.release("a")
    assert not cache.make_room(11, spared=[node])
    assert len(cache) == 1
    cache.clear()
    assert table.num_free == 11


def test_what_two_rows_computed_at_once_is_kept_once() -> None:
    table = PageTable(20, PAGE)
    cache = PrefixCache(table, UNIT)
    pages = {row: table.reserve(row, 10) for row in "ab"}
    kept = cache.insert([], [1] * 10, pages["a"], 8)
    assert cache.insert([], [1] * 10, pages["b"], 8) == []
    assert cache.match([1] * 10, 8) == kept
    for row in "ab":
        table.release(row)
    table.check_integrity()
    assert table.num_idle == 4


def test_another_model_finds_nothing() -> None:
    table = PageTable(20, PAGE)
    one, other = PrefixCache(table, UNIT, salt="one"), PrefixCache(table, UNIT, salt="other")
    cached(table, one, "a", [1] * 10)
    other._nodes = one._nodes
    assert len(one.match([1] * 10, 8)) == 2
    assert other.match([1] * 10, 8) == []


def test_a_node_ends_where_a_page_does() -> None:
    for unit in (0, 3):
        with pytest.raises(ValueError, match="multiple of the page size, 2"):
            PrefixCache(PageTable(5, 2), unit)


def test_integrity_check_sees_damage() -> None:
    for damage in (
        lambda t, c: t._kept.pop(),  # kept for a node, and not by the table
        lambda t, c: c._nodes.popitem(last=True),  # a node whose parent is gone, pages kept for nobody
        lambda t, c: setattr(next(iter(c._nodes.values())), "children", 3),
    ):
        table = PageTable(20, PAGE)
        cache = PrefixCache(table, UNIT)
        cached(table, cache, "a", [1] * 10)
        cache.check_integrity()
        damage(table, cache)
        with pytest.raises(RuntimeError, match="corrupt"):
            cache.check_integrity()
