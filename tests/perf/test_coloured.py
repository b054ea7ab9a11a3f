"""The picture of sources is of the whole text, and is the one in the documents."""

from __future__ import annotations

from pathlib import Path

from perf.coloured import COLOURS, DRAFTS, picture, sources_of


def test_a_picture_colours_every_token_by_its_source() -> None:
    old = list(range(40))
    new = [*old[:10], 90, 91, *old[12:30], *old[2:9]]
    tokens = list(sources_of(old, new, DRAFTS))
    assert [token for token, _ in tokens] == new
    sources = [source for _, source in tokens]
    assert set(sources[1:9]) == {"prediction"}
    assert sources[10:12] == ["the target's own"] * 2, "tokens that are nowhere"
    again = [*new, 90, 91, *old[12:20]]
    assert "the row itself" in [source for _, source in sources_of(old, again, DRAFTS)][len(new) + 2 :]
    assert len(COLOURS) == 3


def test_the_picture_of_the_documents_is_this_one() -> None:
    """Write it again with `python -m perf.coloured docs/figures/sources.svg` after a change of lookup."""
    assert Path("docs/figures/sources.svg").read_text(encoding="utf-8") == picture()
