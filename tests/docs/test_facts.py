"""What documents quote is there: rows of results by commit and file, and files of the repository by path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perf import records

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMIT = re.compile(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7}\b")
RESULTS = re.compile(r"\bfiles? `(\w+)`")
PATH = re.compile(r"`((?:fastspec|tests|perf|tools|examples|kernels|models|runtime|sampling)/[\w/.]+)`")


def commits_of_rows() -> set[str]:
    rows = (row for path in records.RESULTS.glob("*.jsonl") for row in records.read(path))
    return {str(row["commit"])[:7] for row in rows}


def missing(text: str, commits: set[str]) -> list[str]:
    """What a page quotes that is not there."""
    gone = [commit for commit in COMMIT.findall(text) if commit not in commits]
    gone += [name for name in RESULTS.findall(text) if not (records.RESULTS / f"{name}.jsonl").exists()]
    return gone + [
        path for path in PATH.findall(text) if not any((ROOT / at / path).exists() for at in ("", "fastspec"))
    ]


def test_what_pages_quote_is_there() -> None:
    commits = commits_of_rows()
    assert {str(page.relative_to(ROOT)): missing(page.read_text(encoding="utf-8"), commits) for page in PAGES} == {
        str(page.relative_to(ROOT)): [] for page in PAGES
    }


@pytest.mark.parametrize("planted", ["5 ms (abcdef1)", "file `nowhere`", "`tests/nowhere.py`", "`kernels/nowhere/`"])
def test_a_planted_quote_is_found(planted: str) -> None:
    assert len(missing(planted, {"1167f0b"})) == 1
    assert missing("file `suite`, 1167f0b, `kernels/ops.py`, `perf/results/suite.jsonl`, 1234567", {"1167f0b"}) == []


def test_the_map_has_every_room() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms, kernels = text.split("## Rooms")[1].split("## Words")[0].split("## Kernels")
    package = ROOT / "fastspec"
    wanted = [f"`{name}`" for name in names(package) if name not in ("__init__.py", "py.typed")]
    assert [name for name in wanted if name not in rooms] == []
    wanted = [f"`kernels/{name}`" for name in names(package / "kernels") if name.endswith("/")]
    assert [name for name in wanted if name not in kernels] == []


def test_the_guide_has_every_line_of_explain() -> None:
    source = (ROOT / "fastspec/engine/explain.py").read_text(encoding="utf-8")
    titles = set(re.findall(r'"([a-z]+) {2,}', source))
    table = (ROOT / "docs/guides/explain.md").read_text(encoding="utf-8").split("In `stats`")[0]
    rows = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {"device", "memory", "threads"} < titles
    assert titles - rows == set()


def names(folder: Path) -> list[str]:
    """What lies in a folder; names of folders end with a slash."""
    found = (path for path in sorted(folder.iterdir()) if path.name != "__pycache__")
    return [f"{path.name}/" if path.is_dir() else path.name for path in found]
