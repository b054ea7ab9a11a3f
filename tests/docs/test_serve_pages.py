"""What the documents show a client of `fastspec serve` doing is done, with the shipped pair."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from fastspec import FastSpecGenerator, demo_pair
from tests.cli.test_serve_command import parameters
from tests.docs.test_readme import SNIPPETS, Snippet
from tests.server.conftest import running

ADDRESS = "http://127.0.0.1:8000/v1"
CLIENTS = [snippet for snippet in SNIPPETS if ADDRESS in snippet.code]


def test_clients_are_shown() -> None:
    pages = {snippet.place.split(":")[0] for snippet in CLIENTS}
    assert pages == {"docs/guides/repeats.md", "docs/guides/serve.md", "docs/guides/structured.md"}
    assert {snippet.language for snippet in CLIENTS} == {"python", "bash"}


def run(snippet: Snippet, url: str) -> str:
    code = snippet.code.replace(ADDRESS, url)
    if snippet.language == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, snippet.place, "exec"), {"__name__": "__main__"})
        return printed.getvalue()
    return subprocess.run(shlex.split(code.replace("\\\n", " ")), capture_output=True, text=True, check=True).stdout


def test_files_of_flags_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [snippet for snippet in SNIPPETS if snippet.language == "toml" and "# serve.toml" in snippet.code]
    assert files
    for snippet in files:
        (tmp_path / "serve.toml").write_text(snippet.code)
        assert parameters(monkeypatch, "--config", str(tmp_path / "serve.toml"))["target"] is not None


def test_clients_of_the_documents_get_answers() -> None:
    with (
        FastSpecGenerator(*demo_pair(), max_length=256, device="cpu", progress=False) as generator,
        running(generator, name="demo") as server,
    ):
        for snippet in CLIENTS:
            if snippet.language == "bash" and shutil.which("curl") is None:
                continue
            assert re.search(r"\w{3}", run(snippet, server.url)), snippet.place
