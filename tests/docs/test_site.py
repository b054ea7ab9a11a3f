"""The site: every page is in its menu, and pages of the root get links that are right there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    shown = re.findall(r": ([\w/-]+\.md)$", menu, re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(shown) == sorted([*pages, "changelog.md", "contributing.md"])


def test_links_of_added_pages() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    from tools.site import LINK, inside

    text = "[a](docs/faq.md#errors) [b](CONTRIBUTING.md#releases) [c](perf/LOG.md) [d](https://x.org/docs/y)"
    assert LINK.sub(inside, text) == "[a](faq.md#errors) [b](contributing.md#releases) c [d](https://x.org/docs/y)"
