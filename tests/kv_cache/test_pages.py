"""The page table against a model of itself, and its integrity check against planted damage."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastspec.errors import OutOfPages
from fastspec.kv_cache.pages import TRASH_PAGE, PageTable

NUM_PAGES, PAGE_SIZE = 12, 3


class PageTableMachine(RuleBasedStateMachine):
    """Reserves and releases at random; the model is a dict of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_PAGES, PAGE_SIZE)
        self.model: dict[int, tuple[int, ...]] = {}

    def free(self) -> int:
        return NUM_PAGES - 1 - len({page for pages in self.model.values() for page in pages})

    @rule(row=st.integers(0, 5), positions=st.integers(1, 20))
    def reserve(self, row: int, positions: int) -> None:
        needed = -(-positions // PAGE_SIZE)
        if row in self.model:
            with pytest.raises(ValueError, match="already owns"):
                self.table.reserve(row, positions)
        elif needed > self.free():
            assert not self.table.fits(positions)
            with pytest.raises(OutOfPages, match=f"needs {needed} pages"):
                self.table.reserve(row, positions)
        else:
            assert self.table.fits(positions)
            pages = self.table.reserve(row, positions)
            assert len(pages) == len(set(pages)) == needed
            assert TRASH_PAGE not in pages
            taken = {page for owned in self.model.values() for page in owned}
            assert taken.isdisjoint(pages)
            self.model[row] = pages

    @precondition(lambda self: self.model)
    @rule(data=st.data(), row=st.integers(0, 5), more=st.integers(0, 9))
    def share(self, data: st.DataObject, row: int, more: int) -> None:
        """A row that begins as another one does: its first pages are that row's."""
        owner = data.draw(st.sampled_from(sorted(self.model)))
        shared = self.model[owner][: data.draw(st.integers(1, len(self.model[owner])))]
        positions = len(shared) * PAGE_SIZE + more
        if row in self.model or not self.table.fits(positions, len(shared)):
            with pytest.raises((ValueError, OutOfPages)):
                self.table.reserve(row, positions, shared)
        else:
            self.model[row] = self.table.reserve(row, positions, shared)
            assert self.model[row][: len(shared)] == shared

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        self.table.release(row)
        del self.model[row]
        with pytest.raises(KeyError, match="owns no pages"):
            self.table.release(row)

    @rule()
    def release_all(self) -> None:
        self.table.release_all()
        self.model.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert self.table.num_free == self.free()
        self.table.check_integrity()


TestPageTable = PageTableMachine.TestCase
TestPageTable.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_integrity_check_sees_damage() -> None:
    for damage in (
        lambda t: t._free.pop(),  # lost
        lambda t: t._free.append(t._free[0]),  # twice free
        lambda t: t._free.append(TRASH_PAGE),  # trash handed out
        lambda t: t._owned.__setitem__("b", t._owned["a"]),  # two owners, counted as one
        lambda t: t._rows_of.update(t._owned["a"][:1]),  # counted twice
    ):
        table = PageTable(NUM_PAGES, PAGE_SIZE)
        table.reserve("a", 7)
        table.check_integrity()
        damage(table)
        with pytest.raises(RuntimeError, match="corrupt"):
            table.check_integrity()


def test_pages_come_in_the_given_order() -> None:
    table = PageTable(5, 2, order=[3, 1, 4, 2])
    assert table.reserve("a", 5) == (3, 1, 4)
    table.release("a")
    assert table.reserve("b", 8) == (3, 1, 4, 2)


@pytest.mark.parametrize("order", [[1, 2], [0, 1, 2, 3], [1, 1, 2, 3]])
def test_order_must_be_a_permutation(order: list[int]) -> None:
    with pytest.raises(ValueError, match="permutation"):
        PageTable(4, 2, order=order)


def test_wrong_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        PageTable(1, 16)
    with pytest.raises(ValueError, match="need at least 1"):
        PageTable(4, 2).reserve("a", 0)


def test_a_shared_page_stays_until_its_last_row_goes() -> None:
    table = PageTable(6, 2)
    first = table.reserve("a", 4)
    assert table.reserve("b", 7, first) == (*first, 3, 4)
    table.release("a")
    assert table.num_free == 1
    assert table.reserve("c", 4, first) == first
    for row in ("b", "c"):
        table.release(row)
    assert table.num_free == 5
    with pytest.raises(ValueError, match="belong to no row"):
        table.reserve("d", 4, first)
