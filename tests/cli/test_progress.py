"""Progress: one line on a terminal, none in a pipe, by a clock that the test sets; and the stages of each command."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from fastspec import generator
from fastspec.cli import app as cli
from fastspec.cli import doctor, probes, progress
from fastspec.cli.app import app
from fastspec.cli.progress import Progress
from tests.cli.test_app import Stub, invoke


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_one_line_is_redrawn_with_the_seconds_since_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    terminal = Terminal()
    told = Progress(terminal)
    told.stage("loading")
    script = [None, "decoding", "over"]

    def wait(seconds: float) -> bool:
        assert seconds == progress.PAUSE
        name = script.pop(0)
        if name == "decoding":
            told.stage(name)
        return name == "over"

    told.follow(wait)
    told.stage(None)
    told.stage(None)  # the line is cleared once
    clear = "\r\x1b[K"
    shown = [f"{clear}fastspec: loading (1 s)", f"{clear}fastspec: decoding (2 s)", clear]
    assert terminal.getvalue() == "".join(shown)


def test_its_thread_ends_with_the_context_and_a_pipe_has_none() -> None:
    with Progress(Terminal()) as told:
        assert told._thread is not None
        assert told._thread.is_alive()
    assert not told._thread.is_alive()
    pipe = io.StringIO()
    with Progress(pipe) as told:
        told.stage("loading")
        assert told._thread is None
    assert pipe.getvalue() == ""


class Stages(Progress):
    """Notes what it is told."""

    seen: list[str | None]

    def stage(self, name: str | None) -> None:
        self.seen.append(name)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    Stages.seen = []
    monkeypatch.setattr(cli, "Progress", Stages)
    return Stages.seen


def test_every_command_says_what_it_does(stages: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    loading = progress.LOADING
    assert invoke(Stub("the end"), "generate", "--prompt", "x").exit_code == 0
    assert stages[:3] == [loading, "decoding", None]  # from then on the text shows itself
    stages.clear()
    assert invoke(Stub("the end"), "generate", "--prompt", "x", "--no-stream").exit_code == 0
    assert stages[:3] == [loading, "decoding", None]
    stages.clear()
    assert invoke(Stub("the end"), "demo", "--repeats", "2").exit_code == 0
    kinds = ("plain", "plain, exact=False", "speculative")
    runs = [f"{kind}, run {turn} of 2" for turn in (1, 2) for kind in kinds]
    assert stages == [loading, "warming up", *runs, None]
    stages.clear()
    monkeypatch.setattr(doctor, "diagnose", lambda device, tell: tell("looking") or doctor.Report(()))
    assert invoke(Stub(), "doctor", "--json").exit_code == 0
    assert stages == ["looking"]


def test_a_slow_demo_ends_after_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_ENOUGH", -1.0)
    stub = Stub("the end")
    result = invoke(stub, "demo", "--repeats", "3")
    assert "cpu, median of 1 of 3 runs, because this machine is slow or busy:" in result.stdout
    assert len(stub.calls) == 6


class Turns:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning")
def test_a_self_check_says_what_it_could_not_finish() -> None:
    import torch

    def lines(budget: float) -> tuple[list[str], probes.Check]:
        made: list[probes.Check] = []

        def check(device: torch.device, dtype: torch.dtype) -> probes.Check:
            made.append(probes.self_check(device, dtype, budget, Turns()))
            return made[-1]

        report = doctor.diagnose("cpu", probes=probes.Probes(self_check=check))
        found: list[Any] = json.loads(report.to_json())["sections"]
        return [f"{one['status']} {one['name']}: {one['text']}" for part in found for one in part["lines"]], made[0]

    text, check = lines(1e9)
    assert check.unfinished == ()
    assert check.equal
    assert check.repeated
    assert any(line.startswith("ok works: greedy and sampled") for line in text)
    text, check = lines(0.0)  # not even begun
    assert (check.equal, check.repeated, check.plain) == (None, None, None)
    everything = "plain decoding, speculative decoding, auto decoding, two draws with one seed"
    assert f"warn cpu time: not finished in 30 s: {everything}" in text
    assert not any("works" in line or "equal" in line or "twice" in line for line in text)
    text, check = lines(90.0)  # the clock is read once a step: plain decoding is come to its end
    assert check.plain is not None
    assert check.unfinished[-1] == "two draws with one seed"
    assert not any(line.startswith("fail") for line in text)


def test_a_line_that_stays_is_written_above_the_stage_and_to_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    told = Progress(terminal)
    told.stage("loading")
    script = [None, "over"]

    def wait(seconds: float) -> bool:
        return script.pop(0) == "over"

    told.follow(wait)
    terminal.truncate(0)
    terminal.seek(0)
    told.tell("4 GiB")
    assert terminal.getvalue() == "\r\x1b[Kfastspec: 4 GiB\n"
    Progress(pipe).tell("4 GiB")
    assert pipe.getvalue() == "fastspec: 4 GiB\n"
    monkeypatch.setattr("sys.stderr", None)
    Progress().tell("4 GiB")  # nobody reads it


PLAN = re.compile(r"^fastspec: max_length = 96 \(as asked\); 0\.\d+ GiB \(target weights .*\), headroom [\d.]+$", re.M)


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_the_memory_is_said_on_stderr_before_models_load(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of `FastSpecGenerator(progress=True)`, without its bars."""
    build = generator.build

    def noted(*given: Any, **named: Any) -> Any:
        sys.stderr.write("built\n")
        return build(*given, **named)

    monkeypatch.setattr(generator, "build", noted)
    monkeypatch.setattr("fastspec.server.run.Server.serve_on", lambda *given: None)
    more = {
        "generate": ["--prompt", "x", "--max-new-tokens", "2"],
        "chat": ["--max-new-tokens", "2"],
        "serve": ["--port", "0"],
    }
    result = CliRunner().invoke(app, [command, "--device", "cpu", "--max-length", "96", *more[command]])
    assert result.exit_code == 0, result.output
    before, _, after = result.stderr.partition("built\n")
    assert (len(PLAN.findall(before)), len(PLAN.findall(after))) == (1, 0)
    assert "max_length" not in result.stdout
    assert "it/s" not in result.stderr


def test_a_report_in_json_has_no_other_line() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--device", "cpu"])
    assert json.loads(result.stdout)["ok"]
    assert result.stderr == ""
