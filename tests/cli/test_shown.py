"""What the command line shows beside the text: origins of tokens, acceptance, speed, and its own flags in messages."""

from __future__ import annotations

import io
import re
import warnings
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from fastspec import FastSpecGenerator, demo_pair
from fastspec.cli import chat, output
from fastspec.cli.app import _by_position, app
from fastspec.cli.errors import in_flags
from fastspec.cli.output import StatusLine
from fastspec.output import RowStats, Stats
from fastspec.text.origin import OriginWriter
from tests.cli.test_app import Stub, invoke


@pytest.fixture(scope="module")
def demo() -> Any:
    with FastSpecGenerator(*demo_pair(), device="cpu", max_length=256, progress=False) as made:
        yield made


@pytest.mark.parametrize("stop", [None, "(", "self"])
@pytest.mark.parametrize("new", [1, 7, 40])
def test_colours_tell_drafts_from_tokens_of_the_target(demo: FastSpecGenerator, new: int, stop: str | None) -> None:
    tokenizer: Any = demo.tokenizer
    prompt = "class Stack:\n    def push("
    pieces: list[tuple[str, bool]] = []
    stops = [stop] if stop else []
    writer = OriginWriter(tokenizer, lambda piece, drafted: pieces.append((piece, drafted)), stops)
    counted: list[bool] = []
    put = writer._writer.put
    writer._writer.put = lambda value: (counted.append(writer._drafted), put(value))  # type: ignore[method-assign]
    options: Any = {"stop_strings": stops} if stop else {}
    ids = [tokenizer(prompt)["input_ids"]]
    result: Any = demo.generate(
        ids, streamer=writer, max_new_tokens=new, return_dict_in_generate=True, num_speculative_tokens=4, **options
    )
    stats = result.stats
    writer.finish(drafted=stats.dropped > 0)
    assert sum(counted[1:]) == stats.emitted - stats.steps + (stats.dropped > 0)
    text = "".join(piece for piece, _ in pieces)
    assert text == (result.texts[0] if stop else tokenizer.decode(result.new_tokens[0]))


def test_color_is_a_flag(demo: FastSpecGenerator) -> None:
    plain, coloured = (
        CliRunner().invoke(app, ["generate", "--prompt", "import os\n", "--max-new-tokens", "24", *more]).stdout
        for more in ([], ["--color"])
    )
    assert "\x1b" not in plain
    assert "\x1b[32m" in coloured
    assert click.unstyle(coloured) == plain


def test_stats_name_the_acceptance_of_each_draft() -> None:
    row = RowStats(4, 0, 8, 4, 8, 0, histogram=(1, 2, 1))
    assert _by_position(Stats.of((row,), 2, 1.0)) == "accepted: draft 1 75%, draft 2 25%"
    plain = RowStats(4, 4, 0, 0, 4, 0, histogram=(4,))
    assert _by_position(Stats.of((plain,), 0, 1.0)) == "accepted: nothing was drafted"
    lines = invoke(Stub(), "generate", "--prompt", "x", "--stats").stderr.splitlines()
    assert lines[-1] == "accepted: draft 1 100%"


def test_messages_name_flags_of_the_command() -> None:
    command: Any = typer.main.get_command(app)
    context = click.Context(command.commands["generate"])
    for message, shown in {
        "max_length=9 is too short; raise max_length": "--max-length 9 is too short; raise --max-length",
        "num_speculative_tokens=3: the draft of device='x'": "--num-speculative-tokens 3: the draft of --device 'x'",
        "max_batch_size=8, max_length in a/max_length": "max_batch_size=8, --max-length in a/max_length",
        "stop_strings and `max_length`": "--stop-string and `max_length`",
    }.items():
        assert in_flags(message, context) == shown  # type: ignore[arg-type]


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_in_the_commands_words() -> None:
    class Warns(Stub):
        def generate(self, *given: Any, **asked: Any) -> Any:
            warnings.warn("lower num_speculative_tokens,\n or leave out the draft", stacklevel=1)
            return super().generate(*given, **asked)

    lines = invoke(Warns(), "generate", "--prompt", "x").stderr.splitlines()
    assert lines[0] == "fastspec: lower --num-speculative-tokens, or leave out the draft"
    assert len(lines) == 2


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_whole(flag: str) -> None:
    shown = CliRunner().invoke(app, [flag]).stdout
    assert "..." not in shown.partition("Commands:")[2]
    assert "demo" in shown
    for name in ("generate", "demo", "doctor", "pairs", "quantize", "chat", "serve"):
        one = CliRunner().invoke(app, [name, flag])
        assert one.exit_code == 0
        assert re.search(r"Usage: .*" + name, one.stdout)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_status_line_keeps_the_last_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.shutil, "get_terminal_size", lambda: output.shutil.os.terminal_size((20, 10)))
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("sys.stderr", shown)
    with StatusLine() as line:
        line.show("12.0 tok/s, and a long rest")
    scrolls, draws, clears, frees = (
        "\n\x1b7\x1b[1;9r\x1b8\x1b[A",
        "\x1b7\x1b[10;1H\x1b[2K12.0 tok/s, and a l\x1b8",
        "\x1b7\x1b[10;1H\x1b[2K\x1b8",
        "\x1b7\x1b[r\x1b8",
    )
    assert shown.getvalue() == scrolls + draws + clears + frees
    monkeypatch.setattr("sys.stderr", pipe := io.StringIO())
    with StatusLine() as line:
        line.show("12.0 tok/s")
    assert pipe.getvalue() == ""


def test_the_speed_of_an_answer_counts_from_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.1, 10.5, 10.6, 11.0])
    monkeypatch.setattr(chat.time, "perf_counter", lambda: next(clock))
    speed = chat._Speed()
    assert [speed.after_token() for _ in range(5)] == ["", "", "4.0 tok/s, 3 tokens", "", "4.0 tok/s, 5 tokens"]


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize(("given", "meant"), [("bf16", "bfloat16"), ("fp16", "float16"), ("float32", "float32")])
def test_dtypes_have_short_names(command: str, given: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def opened(*sources: Any, **options: Any) -> Any:
        asked.update(options)
        raise ValueError("enough")

    if command == "serve":
        monkeypatch.setattr("fastspec.generator.FastSpecGenerator", opened)
    more = ["--prompt", "x"] if command == "generate" else ["--port", "0"] if command == "serve" else []
    CliRunner().invoke(app, [command, "--dtype", given, *more], obj=opened)
    assert asked["dtype"] == meant
