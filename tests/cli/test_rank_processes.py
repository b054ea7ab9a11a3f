"""`--tensor-parallel` starts the same command once a rank, and ends as the ranks do."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from fastspec.cli import rank_processes
from fastspec.cli.app import app
from fastspec.cli.rank_processes import start_ranks


def context_of_command() -> typer.Context:
    """Context of a command of the command line, as its function gets it."""
    root = typer.main.get_command(app)
    return typer.Context(root.commands["demo"], parent=typer.Context(root))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("copies", [False, True])
def test_ranks_run_the_same_command_line(
    copies: bool, fails: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def launch(config: Any, entry: Any) -> Any:
        def run(*arguments: str) -> None:
            started.append((config.nproc_per_node, config.max_restarts, entry, arguments))
            if fails:
                raise ChildFailedError("fastspec", {1: ProcessFailure(1, 77, 3, "/nowhere")})

        return run

    monkeypatch.setattr(api, "elastic_launch", launch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(rank_processes, "_may_copy_this_process", lambda: copies)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asks the driver, and copies could not"))
    with pytest.raises(typer.Exit) as ended:
        start_ranks(2, None, ["demo", "--tensor-parallel", "2"], context=context_of_command())
    assert ended.value.exit_code == code
    given = ("demo", "--tensor-parallel", "2")
    ((count, restarts, entry, arguments),) = started
    assert (count, restarts) == (2, 0)
    if copies:
        assert (entry.__name__, arguments) == ("run_rank", given)
    else:
        assert (entry, arguments) == (sys.executable, ("-m", "fastspec.cli", *given))
    assert ("rank 1 ended with exit code 3" in capsys.readouterr().err) == fails


def test_a_forked_rank_runs_the_whole_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        rank_processes.rank_of(context_of_command())("--version")
    assert ended.value.code == 0
    assert re.search(r"\d+\.\d+\.\d+", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("compiled", "counted", "initialized", "platform", "may"),
    [
        (False, -1, False, "linux", True),
        (True, 2, False, "linux", True),
        (True, -1, False, "linux", False),  # what only the driver counts: a copy of a process that used it cannot
        (True, 2, True, "linux", False),
        (False, -1, False, "darwin", False),
    ],
)
def test_a_process_that_has_used_the_driver_is_not_copied(
    compiled: bool, counted: int, initialized: bool, platform: str, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: compiled)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: counted)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(rank_processes.sys, "platform", platform)
    assert rank_processes._may_copy_this_process() == may


@pytest.mark.parametrize(
    ("count", "gpus", "device", "why"),
    [
        (0, 0, None, "0 ranks are not supported; use one of 1, 2, 4, 8"),
        (-2, 0, "cpu", "-2 ranks are not supported"),
        (3, 4, None, "3 ranks are not supported"),
        (4, 2, None, "4 ranks need a GPU each, and torch sees 2: use fewer, or --device cpu"),
        (2, 0, "cuda", "2 ranks need a GPU each, and torch sees 0"),
        (2, 2, "cuda:1", "--device cuda:1 names only one: use --device cuda, or leave it out"),
    ],
)
def test_what_every_rank_would_refuse_starts_none(
    count: int, gpus: int, device: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "elastic_launch", lambda *given: pytest.fail("started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(typer.BadParameter, match=re.escape(why)):
        start_ranks(count, device)


def test_a_rank_and_a_process_alone_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    start_ranks(None)
    start_ranks(1)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    start_ranks(2)


@pytest.mark.slow
def test_a_server_of_two_ranks_answers_and_ends_by_a_signal() -> None:
    """Rank 0 answers, rank 1 follows; the launcher ends as the server does."""
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    command = [
        sys.executable,
        "-m",
        "fastspec.cli",
        "serve",
        "--tensor-parallel",
        "2",
        "--device",
        "cpu",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stderr is not None
        said = next(line for line in serving.stderr if "fastspec: demo at " in line)
        body = json.dumps({"model": "demo", "prompt": "import os", "max_tokens": 8, "temperature": 0}).encode()
        address = said.split(" at ")[1].strip() + "/completions"
        asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            found = json.load(answer)
        serving.send_signal(signal.SIGTERM)
        last = serving.stderr.read()
    assert found["usage"]["completion_tokens"] == 8
    assert "fastspec: all answers are complete" in last
    assert serving.returncode == 0
