"""`fastspec serve` before it serves: flags, the key's file, limits, and the extra that is missing."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fastspec.cli.app import app
from fastspec.cli.serve import _key, _keys, _limits, _name
from fastspec.server.service import Limits


def served(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("fastspec.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = served()
    assert result.exit_code == 2
    packages = "'fastapi>=0.115' 'prometheus-client>=0.20' 'uvicorn>=0.30'"
    assert f"uvicorn is not installed: pip install {packages}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--draft", "x"], "a draft needs its target"),
        (["--limit", "requests"], "is not NAME=NUMBER with body, tokens, requests, seconds"),
        (["--limit", "answers=3"], "is not NAME=NUMBER"),
        (["--limit", "body=0"], "is not above 0"),
        (["--api-key", "@/nowhere"], "cannot read /nowhere"),
        (["--api-key", " "], "it has no key in its first line"),
        (["--api-key", "\udcff"], "cannot read it: character 0 is"),
        (["a" * 5000, "--device", "cpu", "--port", "0"], "is not a directory and not a Hub id"),
        (["~nobody_of_this_name/x", "--device", "cpu", "--port", "0"], "is not a directory and not a Hub id"),
        (["--proposer", "bigram"], "ngram"),
        (["/nowhere/at/all", "--device", "cpu", "--port", "0"], "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(arguments: list[str], says: str) -> None:
    result = served(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = served("--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "cannot listen on 127.0.0.1" in result.stderr


def test_keys_limits_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("secret \nmore\n")
    assert _key(f"@{tmp_path / 'key'}") == "secret"
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(typer.BadParameter, match=r"cannot read .*binary: 'utf-8' codec"):
        _key(f"@{tmp_path / 'binary'}")
    assert _keys(["plain", f"@{tmp_path / 'key'}"]) == ("plain", "secret")
    assert _limits(["seconds=2.5", "tokens=7"], Limits()) == Limits(seconds=2.5, tokens=7)
    assert (_name(None), _name("Qwen/Qwen3-8B"), _name(str(tmp_path))) == ("demo", "Qwen/Qwen3-8B", tmp_path.name)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert _name(f"~/{tmp_path.name}") == tmp_path.name
