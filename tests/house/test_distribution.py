"""The distribution: its name in messages and pages, what messages ask pip for, and what a source archive holds."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
SOURCES = [*(ROOT / "fastspec").rglob("*.py"), *(ROOT / "tools").rglob("*.*"), ROOT / "Makefile", *PAGES]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
# PyPI has the name for another project
FOREIGN = re.compile(r"""pip install(?: -\S+)* ['"]?fastspec(?![\w/-])|(?<![\w-])fastspec\[""")
EXTRAS = re.compile(r"'((?:fastapi|llguidance|prometheus-client|uvicorn)>=[\d.]+)'")


def texts() -> dict[str, str]:
    """Sources and pages by path; adjacent string literals of messages stay as they are."""
    files = (path for path in SOURCES if path.suffix in (".py", ".md", ".toml", "") and path.is_file())
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def test_nobody_is_told_to_install_the_other_project() -> None:
    assert [name for name, text in texts().items() if FOREIGN.search(text)] == []


@pytest.mark.parametrize(
    "planted", ["pip install fastspec", "pip install 'fastspec[serve]'", "pip install -U fastspec==1", "fastspec[ray]"]
)
def test_a_planted_name_is_found(planted: str) -> None:
    assert FOREIGN.search(planted)
    assert not FOREIGN.search("pip install . in fastspec; pip install 'fastspec-decoding[ray]', fastspec/demo")


def test_messages_name_requirements_of_the_project() -> None:
    """The floor in a message is the floor of the project."""
    asked = {each for text in texts().values() for each in EXTRAS.findall(text)}
    assert {each.partition(">=")[0] for each in asked} == {"fastapi", "llguidance", "prometheus-client", "uvicorn"}
    assert [each for each in asked if f'"{each}"' not in PROJECT] == []


def test_a_source_archive_holds_all_that_tests_read(tmp_path: Path) -> None:
    sdist = pytest.importorskip("hatchling.builders.sdist", reason="hatchling is not installed")
    (built,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        metadata = archive.extractfile(f"{Path(built).name.removesuffix('.tar.gz')}/PKG-INFO")
        assert metadata is not None
        told = metadata.read().decode()
    folders = ("fastspec", "tests", "deploy", "docs", "examples", "tools", "perf", ".ci")
    wanted = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    kept = {str(path.relative_to(ROOT)) for path in wanted if "__pycache__" not in path.parts}
    kept |= {page.name for page in ROOT.glob("*.md")}
    kept |= {"Makefile", "constraints.txt", "mkdocs.yml", "pyproject.toml", "LICENSE"}
    assert kept - names == set()
    for line in ("Name: fastspec-decoding", "License-Expression: Apache-2.0"):
        assert line in told
    for file in ("LICENSE", "fastspec/demo/NOTICE"):
        assert f"License-File: {file}" in told
