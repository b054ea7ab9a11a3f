"""`fastspec serve` before it serves: flags, the key's file, limits, and the extra that is missing."""

from __future__ import annotations

import re
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
    monkeypatch.delitem(sys.modules, "fastspec.server.run", raising=False)
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
        (["--access-log", "xml"], "got 'xml', wanted text, json, off"),
        (["--log-level", "loud"], "got 'loud', wanted debug, info, warning, error"),
        (["--chat-template", "/nowhere"], "cannot use /nowhere"),
        (["--ssl-keyfile", "/nowhere"], "TLS needs both"),
        (["--ssl-keyfile", "/nowhere", "--ssl-certfile", "/nowhere"], "cannot use /nowhere and /nowhere for TLS"),
        (["--allow-origin", "chat.example"], "an origin must be"),
        (["--root-path", "llm"], "must begin with /"),
        (["--drain", "-1"], "'--drain'"),
        (["--config", "/nowhere"], "cannot read /nowhere as TOML"),
        (["--uds", "/nowhere/socket"], "cannot listen on /nowhere/socket"),
        (["/nowhere/at/all", "--device", "cpu", "--port", "0"], "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(arguments: list[str], says: str) -> None:
    result = served(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_a_template_with_a_fault_is_refused(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{% for message in messages %}")
    result = served("--chat-template", str(tmp_path / "template.jinja"))
    assert result.exit_code == 2
    assert "template.jinja: Unexpected end of template" in " ".join(result.stderr.split())


def test_without_the_packages_of_traces_the_error_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    result = served("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces", "--port", "0")
    assert result.exit_code == 2
    assert "pip install 'opentelemetry-sdk>=1.30'" in result.stderr


def parameters(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """Parameters that the command gets, read before anything is loaded."""
    found: list[dict[str, Any]] = []

    def look(given: dict[str, Any]) -> None:
        found.append(dict(given))
        raise typer.Exit

    with monkeypatch.context() as plant:
        plant.setattr("fastspec.cli.serve.check_call", look)
        result = served(*arguments)
    assert result.exit_code == 0, result.output
    return found[0]


CONFIG = """
target = "org/model"
port = 9000
max_length = 512
max-batch-size = 3
num-speculative-tokens = "auto"
dtype = "bfloat16"
sanitize-control-tokens = true
served-model-name = ["one", "two"]
limit = ["seconds=3"]
drain = 2.5
api-key = ["sesame"]
"""


def test_a_file_has_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(CONFIG)
    found = parameters(monkeypatch, "--config", str(file))
    wanted = {
        "target": "org/model",
        "port": 9000,
        "max_length": 512,
        "max_batch_size": 3,
        "num_speculative_tokens": "auto",
        "dtype": "bfloat16",
        "sanitize_control_tokens": True,
        "names": ["one", "two"],
        "limits": ["seconds=3"],
        "drain": 2.5,
        "api_keys": ["sesame"],
        "host": "127.0.0.1",
    }
    assert {name: found[name] for name in wanted} == wanted
    monkeypatch.setenv("FASTSPEC_API_KEY", "of the environment")
    found = parameters(monkeypatch, "other/model", "--config", str(file), "--port", "9001", "--name", "three")
    assert (found["target"], found["port"], found["names"], found["max_length"]) == (
        "other/model",
        9001,
        ["three"],
        512,
    )
    assert found["api_keys"] == ["of", "the", "environment"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ports = 9000", "ports is no flag of this command; wanted some of .*port,"),
        ("[limit]\nseconds = 3", "limit is no flag"),
        ("config = 'x'", "config is no flag"),
        ("limit = 'seconds=3'", "limit must be a list, got 'seconds=3'"),
        ("port = [1]", "port must be one value"),
        ("port = 70000", "'--port'"),
        ("port = ", "as TOML"),
    ],
)
def test_a_file_with_a_fault(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "serve.toml").write_text(text)
    result = served("--config", str(tmp_path / "serve.toml"))
    assert result.exit_code == 2
    assert re.search(says, re.sub(r"[\s│]+", " ", result.stderr)), result.stderr


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = served("--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "cannot listen on 127.0.0.1" in result.stderr


def test_what_serves_is_not_scanned_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of it would stop all streams."""
    done: list[str] = []
    monkeypatch.setattr("gc.freeze", lambda: done.append("freeze"))
    monkeypatch.setattr("fastspec.cli.serve._warm_up", lambda *given: done.append("models are loaded"))
    monkeypatch.setattr("fastspec.server.run.Server.serve_on", lambda *given: done.append("serves"))
    assert served("--device", "cpu", "--port", "0").exit_code == 0
    assert done[-3:] == ["models are loaded", "freeze", "serves"]


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
