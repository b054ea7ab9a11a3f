"""Prompts from an argument, a file and stdin, and what each of them refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fastspec.cli import app as cli
from fastspec.cli.app import app
from tests.cli.test_app import Stub


def asked(*arguments: str, stdin: str | bytes | None = None) -> tuple[str, Any]:
    """The prompt that reached the generator, and the command's result."""
    stub = Stub()
    result = CliRunner().invoke(app, ["generate", *arguments], input=stdin, obj=stub.open)
    ids = stub.calls[0]["input_ids"][0] if stub.calls else []
    return stub.tokenizer.decode(ids), result


def test_a_prompt_comes_from_a_flag_a_file_or_stdin(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n", encoding="utf-8")
    assert asked("--prompt", "x", stdin="not read")[0] == "x"
    assert asked("--prompt-file", str(file), stdin="not read")[0] == "from a file\n"
    for flags in ((), ("--prompt", "-")):
        assert asked(*flags, stdin="é, piped\n")[0] == "é, piped\n"


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        ([], "", "stdin is empty"),
        (["--prompt", "-"], b"no \xff text", "byte 3 is not UTF-8"),
        (["--prompt", "x", "--prompt-file", __file__], None, "give one of --prompt and --prompt-file"),
        (["--prompt-file", "/nowhere"], None, "--prompt-file"),
    ],
)
def test_what_is_no_prompt_is_refused(arguments: list[str], stdin: Any, says: str) -> None:
    prompt, result = asked(*arguments, stdin=stdin)
    assert (prompt, result.exit_code) == ("", 2)
    assert says in result.stderr


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastspec.cli.inputs import read_prompt

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(typer.BadParameter, match="no prompt; give --prompt TEXT"):
        read_prompt(None, None)


def test_ranks_get_the_text_of_stdin_as_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes cannot read one pipe."""
    given: list[Any] = []
    monkeypatch.setattr(cli, "start_ranks", lambda count, device, arguments, context: given.append(arguments))
    monkeypatch.setattr(sys, "argv", ["fastspec", "generate", "--tensor-parallel", "2"])
    asked("--tensor-parallel", "2", stdin="piped")
    asked("--tensor-parallel", "2", "--prompt", "x")
    assert given == [["generate", "--tensor-parallel", "2", "--prompt", "piped"], None]
