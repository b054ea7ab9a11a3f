"""What the documents show is run: every ```python block, and every `fastspec ...` line of a ```bash block.

A block behind a comment that says what it needs, as in <!-- not run: needs a download -->, is compiled and not run.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fastspec.cli.app import app
from fastspec.errors import UnsupportedOption
from fastspec.inputs import options

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^(<!-- not run: needs [^\n]+ -->\n)?```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One fenced block and where it stands."""

    language: str
    code: str
    place: str
    runs: bool = True


def snippets_of(text: str, name: str) -> list[Snippet]:
    return [
        Snippet(match[2], match[4], f"{name}:{text.count(chr(10), 0, match.start(2)) + 1}", match[1] is None)
        for match in FENCE.finditer(text)
    ]


SNIPPETS = [
    snippet
    for path in DOCUMENTS
    for snippet in snippets_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
]
PYTHON = [snippet for snippet in SNIPPETS if snippet.language == "python"]
COMMANDS = [
    (line, snippet)
    for snippet in SNIPPETS
    if snippet.language == "bash"
    for line in snippet.code.replace("\\\n", " ").splitlines()
    if line.startswith("fastspec ")
]


def test_the_documents_show_something() -> None:
    assert any(snippet.place.startswith("README.md") for snippet in PYTHON)
    assert any(snippet.place.startswith("README.md") for _, snippet in COMMANDS)


def test_snippets_are_found_with_their_line() -> None:
    text = "a\n```python\nx = 1\n```\n\n```bash\nfastspec demo\n```\n"
    assert snippets_of(text, "f.md") == [
        Snippet("python", "x = 1\n", "f.md:2"),
        Snippet("bash", "fastspec demo\n", "f.md:6"),
    ]
    (needing,) = snippets_of("<!-- not run: needs a GPU -->\n```python\nx = 1\n```\n", "f.md")
    assert (needing.runs, needing.place) == (False, "f.md:2")


def test_fences_name_a_language_alone() -> None:
    """GitHub shows no title of a fence."""
    fences = [line for path in DOCUMENTS for line in path.read_text(encoding="utf-8").splitlines() if line[:3] == "```"]
    assert [line for line in fences if " " in line] == []


@pytest.mark.parametrize("snippet", PYTHON, ids=lambda snippet: snippet.place)
def test_python_block_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(snippet.code, snippet.place, "exec")
    if not snippet.runs:
        return
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    # a comment `# -> text` after a line that prints says what it prints
    for promised in re.findall(r"# -> (.+)$", snippet.code, re.MULTILINE):
        assert promised in printed.getvalue()


@pytest.mark.parametrize(("line", "snippet"), COMMANDS, ids=[f"{each.place} {line}" for line, each in COMMANDS])
def test_command_runs(line: str, snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = shlex.split(line, comments=True)[1:]
    if not snippet.runs:  # its arguments are taken, and that is all
        get_command(app).commands[name].make_context(name, arguments)
        return
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [name, *arguments])
    assert result.exit_code == 0, f"{snippet.place}: {result.output}"
    assert result.stdout.strip()


def test_the_readme_names_the_test_command_that_runs_before_a_change_lands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("make demo", "make test"):
        assert re.search(rf"^{command}$", readme, re.MULTILINE)
    assert re.search(r"^make test ", script, re.MULTILINE)


ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/supported.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and line.count("|") == 4
]
REFUSED: dict[str, object] = {  # a value that would change what is returned
    "max_time": 1.0,
    "typical_p": 0.5,
    "no_repeat_ngram_size": 2,
    "begin_suppress_tokens": [3],
    "output_scores": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def names_in(column: int) -> set[str]:
    return {name for row in ROWS for name in re.findall(r"`(\w+)`", row[column])}


def test_the_page_lists_the_options_that_are_supported() -> None:
    assert names_in(1) | {"tokenizer"} == {*options.SUPPORTED, *options.OWN}  # `tokenizer=` stands in the table


def test_the_page_lists_options_that_are_refused() -> None:
    assert names_in(2) == set(REFUSED)
    sizes = {"num_rows": 1, "prompt_length": 1, "vocab_size": 9, "context": 99}
    for name, value in REFUSED.items():
        with pytest.raises(UnsupportedOption, match=name):
            options.resolve(None, None, {name: value}, **sizes)


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_the_readme_links_every_guide() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    guides = [f"docs/guides/{path.name}" for path in sorted((ROOT / "docs" / "guides").glob("*.md"))]
    assert [guide for guide in guides if f"({guide}" not in readme] == []


def anchors_of(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub and the site make them."""
    plain = (
        re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    )
    return {heading.replace(" ", "-") for heading in plain}


def lost_anchors(path: Path, text: str) -> list[str]:
    """Links of a document to headings that are not there."""
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text)
    targets = [((path.parent / target) if target else path, anchor) for target, anchor in links]
    return [
        f"{to.name}#{anchor}"
        for to, anchor in targets
        if to.suffix == ".md" and anchor not in anchors_of(to.read_text(encoding="utf-8"))
    ]


def test_links_to_headings_lead_somewhere() -> None:
    lost = {str(path.relative_to(ROOT)): lost_anchors(path, path.read_text(encoding="utf-8")) for path in DOCUMENTS}
    assert {name: links for name, links in lost.items() if links} == {}
    assert lost_anchors(ROOT / "README.md", "[x](docs/numerics.md#no-such-heading)") == ["numerics.md#no-such-heading"]
