"""Adds pages of the repository's root to the site: a hook of mkdocs."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]*)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds each page, with links that are right inside the site."""
    root = Path(config.config_file_path).parent
    for page, source in PAGES.items():
        text = LINK.sub(inside, (root / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def inside(link: re.Match[str]) -> str:
    """A link of a page in the root; links to other files of the repository become their names."""
    text, target, anchor = link[1], link[2], link[3] or ""
    pages = {source: page for page, source in PAGES.items()}
    target = pages.get(target, target)
    if target.startswith("docs/"):
        target = target.removeprefix("docs/")
    elif target and target not in PAGES:
        return text
    return f"[{text}]({target}{anchor})"
