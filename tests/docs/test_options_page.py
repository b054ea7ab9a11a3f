"""docs/options.md is what the table of options says."""

from __future__ import annotations

from tools.options_page import PAGE, page


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m tools.options_page"
