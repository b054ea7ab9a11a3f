"""Page table on the host: which row owns which pages of the KV cache. Standard library only.

A page holds `page_size` consecutive positions of one row, for every layer of every model that uses the table. Draft and
target hold the same positions, so one table serves both.

| pages                 | owner                                                        |
|-----------------------|--------------------------------------------------------------|
| 0                     | no row: the trash page takes writes of padding and idle rows |
| in `_owned[row]`      | that row, in the order of its positions; rows that begin     |
|                       | with the same tokens may share their first pages             |
| in `_kept`            | the prefix cache, and the rows that use the page             |
| all others            | free                                                         |

Pages have reference counts. A page becomes free when the last row that uses it is released, unless the prefix cache
keeps it. A page that only the prefix cache keeps is idle: it is freed as soon as a row needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from fastspec.errors import OutOfPages

TRASH_PAGE = 0


class PageTable:
    """Assigns KV cache pages to rows (sequences in batch slots), and counts the rows that use each page.

    Args:
        num_pages: number of pages in the cache, including the trash page; at least 2.
        page_size: number of positions per page.
        order: order in which free pages are assigned: a permutation of 1..num_pages-1. Results never depend on it.
            Default: ascending.
    """

    def __init__(self, num_pages: int, page_size: int, order: Iterable[int] | None = None) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"got {num_pages} pages of {page_size} positions; need at least 2 pages of 1")
        usable = list(range(1, num_pages)) if order is None else list(order)
        if sorted(usable) != list(range(1, num_pages)):
            raise ValueError(f"order must be a permutation of 1..{num_pages - 1}, got {usable[:8]}...")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = usable[::-1]  # a stack: pop() returns the first of `usable`
        self._owned: dict[Hashable, tuple[int, ...]] = {}
        self._rows_of: Counter[int] = Counter()  # page -> number of rows that use it
        self._kept: set[int] = set()
        self._idle = 0  # number of pages that only the prefix cache keeps

    @property
    def num_free(self) -> int:
        """Number of pages that no row owns and the prefix cache does not keep."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of pages that only the prefix cache keeps."""
        return self._idle

    @property
    def kept(self) -> frozenset[int]:
        """Pages that the prefix cache keeps."""
        return frozenset(self._kept)

    def in_use(self, page: int) -> bool:
        """True if a row uses this page."""
        return self._rows_of[page] > 0

    def pages_for(self, num_positions: int) -> int:
        """Returns the number of pages for `num_positions` positions."""
        return -(-num_positions // self.page_size)

    def fits(self, num_positions: int, shared: int = 0) -> bool:
        """True if `reserve` would succeed now.

        Args:
            num_positions: number of positions of the row.
            shared: number of the row's first pages that other rows or the prefix cache already hold. These pages need
                not be free.
        """
        return self.pages_for(num_positions) - shared <= len(self._free)

    def can_fit(self, num_positions: int, shared: tuple[int, ...] = ()) -> bool:
        """True if `reserve` would succeed after the prefix cache gives up all pages that no row uses, except `shared`.

        Args:
            num_positions: number of positions of the row.
            shared: first pages of the row, see `reserve`.
        """
        spared = sum(not self.in_use(page) for page in shared)
        return self.pages_for(num_positions) - len(shared) <= len(self._free) + self._idle - spared

    def reserve(self, row: Hashable, num_positions: int, shared: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Assigns pages for `num_positions` positions to `row`.

        Args:
            row: any hashable name of the row.
            num_positions: number of positions that the row may read or write.
            shared: first pages of the row, which other rows use or the prefix cache keeps. The row must not write to
                them.

        Returns:
            All pages of the row, in the order of positions.

        Raises:
            ValueError: the row already owns pages, `num_positions` < 1, or no row uses a shared page and the prefix
                cache does not keep it.
            OutOfPages: too few pages are free. Nothing was reserved.
        """
        if row in self._owned:
            raise ValueError(f"row {row!r} already owns {len(self._owned[row])} pages; release it first")
        if num_positions < 1:
            raise ValueError(f"got {num_positions} positions to reserve, need at least 1")
        if lost := [page for page in shared if not self._rows_of[page] and page not in self._kept]:
            raise ValueError(f"pages {lost} belong to no row and are not kept, so they cannot be shared")
        count = self.pages_for(num_positions) - len(shared)
        if count > len(self._free):
            raise OutOfPages(
                f"row {row!r} needs {count} pages of {self.page_size} positions, {len(self._free)} are free of "
                f"{self.num_pages - 1}; wait for a row to finish, or raise max_length or max_batch_size"
            )
        pages = (*shared, *(self._free.pop() for _ in range(count)))
        self._owned[row] = pages
        self._idle -= sum(not self._rows_of[page] for page in shared)
        self._rows_of.update(pages)
        return pages

    def pages_of(self, row: Hashable) -> tuple[int, ...]:
        """Returns the pages of a row, in the order of positions."""
        return self._owned[row]

    def keep(self, pages: tuple[int, ...]) -> None:
        """Marks pages as kept by the prefix cache, so that they are not freed when their rows end.

        Every page must be used by a row when this is called.

        Raises:
            ValueError: no row uses one of them, or it is already kept. Nothing was changed.
        """
        if wrong := [page for page in pages if not self.in_use(page) or page in self._kept]:
            raise ValueError(f"pages {wrong} belong to no row or are kept already, so they cannot be kept now")
        self._kept.update(pages)

    def give_up(self, pages: tuple[int, ...]) -> None:
        """Marks pages as no longer kept by the prefix cache. Pages that no row uses become free.

        Raises:
            KeyError: the prefix cache does not keep one of the pages.
        """
        for page in pages:
            self._kept.remove(page)
            if not self.in_use(page):
                self._idle -= 1
                self._free.append(page)

    def release(self, row: Hashable) -> None:
        """Ends the use of pages by `row`. Pages that no other row uses and the prefix cache does not keep become free.

        Raises:
            KeyError: the row owns no pages.
        """
        if row not in self._owned:
            raise KeyError(f"row {row!r} owns no pages")
        pages = self._owned.pop(row)
        self._rows_of.subtract(pages)
        for page in reversed(pages):
            if not self._rows_of[page]:
                if page in self._kept:
                    self._idle += 1
                else:
                    self._free.append(page)

    def move(self, source: int, place: int) -> None:
        """Makes row `place` the owner of all pages of row `source`. No page is copied.

        Raises:
            KeyError: `source` owns no pages, or `place` owns some.
        """
        if source not in self._owned or place in self._owned:
            raise KeyError(f"cannot move the pages of row {source} to row {place}: rows with pages {list(self._owned)}")
        self._owned[place] = self._owned.pop(source)

    def release_all(self) -> None:
        """Releases the pages of all rows, see `release`. The prefix cache keeps its pages."""
        for row in list(self._owned):
            self.release(row)

    def check_integrity(self) -> None:
        """Counts all pages again, and compares the results with the stored counts.

        Raises:
            RuntimeError: a page is both free and owned, miscounted, lost or out of range, or a row owns the trash page.
        """
        counted = Counter(page for pages in self._owned.values() for page in pages)
        whole = sorted([*self._free, *{*counted, *self._kept}]) == list(range(1, self.num_pages))
        if not whole or counted != +self._rows_of or self._idle != len(self._kept - counted.keys()):
            raise RuntimeError(
                f"page table corrupt: free {self._free}, owned {self._owned}, counted {self._rows_of}, kept "
                f"{self._kept}, {self._idle} of them idle"
            )
