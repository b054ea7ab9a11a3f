"""Every command of `python -m perf` runs on a CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import demo_pair
from perf import __main__ as cli
from perf import bench, counted, models, records, suite
from perf.cases import SMOKE, Case
from perf.kernels.passes import pass_rows
from perf.models import batches_of
from perf.records import ROOT, Row
from perf.report import pictures
from perf.startup import PARTS
from perf.tasks import read_tasks
from perf.workloads import WORKLOADS, Bytes

pytestmark = pytest.mark.filterwarnings("ignore:the tokenizers:UserWarning")


def test_prompts_are_cut_into_whole_batches() -> None:
    assert batches_of([[1], [2], [3], [4], [5]], 2) == [[[1], [2]], [[3], [4]]]
    with pytest.raises(ValueError, match="no batch of 8"):
        batches_of([[1]], 8)


def run_cli(tmp_path: Path, *arguments: str) -> list[Row]:
    """Rows that a command wrote; at least one, all with their commit and device."""
    out = tmp_path / "rows.jsonl"
    cli.main([*arguments, "--device", "cpu", "--out", str(out), "--commit", "0000000"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows
    assert {(row["commit"], row["device"]) for row in rows} == {("0000000", "cpu")}
    return rows


SMALL = ("--prompt", "16", "--new", "8", "--prompts", "2")


def test_run_measures_us_and_the_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="vocab_size"):
        rows = run_cli(tmp_path, "run", "--workload", "tiny", *SMALL, "--k", "0,2", "--peers", "all")
    by_name = {row["engine"]: row for row in rows}
    assert list(by_name) == [
        "fastspec plain",
        "fastspec plain, exact=False",
        "fastspec k=2",
        "transformers plain",
        "transformers static (not compiled on a CPU)",
        "transformers assisted",
        "vllm",
        "sglang",
    ]
    ours = by_name["fastspec k=2"]
    assert ours["text_equal"] == "2 of 2"
    assert ours["new_tokens"] == 16
    assert 1 < ours["tokens_per_pass"] <= 3
    assert ours["step_over_floor"] == pytest.approx(ours["ms_step"] / ours["floor_ms"], rel=1e-2)
    assert ours["floor_ms"] > by_name["fastspec plain"]["floor_ms"]
    assert ours["over"] in ("fastspec plain", "fastspec plain, exact=False")
    assert max(row["speed_up"] for row in rows[:2]) == 1
    assert by_name["transformers plain"]["tokens_per_pass"] == 1
    assert by_name["vllm"]["status"] == "not importable here"
    assert "transformers assisted" in capsys.readouterr().out


def test_peers_alone_and_a_batch_that_assistance_refuses(tmp_path: Path) -> None:
    rows = run_cli(tmp_path, "peers", "--workload", "tiny", *SMALL, "--k", "2", "--batch", "2")
    assert {row["engine"]: row["status"] for row in rows}["transformers assisted"] == "takes one prompt at a time"


def test_the_shipped_pair_runs_sampled(tmp_path: Path) -> None:
    rows = run_cli(tmp_path, "run", "--workload", "shipped", *SMALL, "--k", "2", "--sampled")
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert rows[-1]["pair"] == {"pair": "shipped"}
    assert {row["source"] for row in rows} == {"disk"}


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def invalid(given: object) -> Iterator[list[Row]]:
        yield [{"engine": "first", "status": "ok"}]
        raise KeyboardInterrupt

    invalid.__name__ = "command_ceiling"
    monkeypatch.setattr(cli, "command_ceiling", invalid)
    with pytest.raises(KeyboardInterrupt):
        run_cli(tmp_path, "ceiling")
    assert [row["engine"] for row in records.read(tmp_path / "rows.jsonl")] == ["first"]


@pytest.mark.filterwarnings("ignore:the tokenizers:UserWarning")
def test_phases_say_that_a_cpu_has_no_trace(tmp_path: Path) -> None:
    rows = run_cli(tmp_path, "phases", "--workload", "tiny", *SMALL, "--k", "2")
    assert [row["k"] for row in rows] == [0, 2]
    assert {row["trace"] for row in rows} == {"none on a CPU"}
    assert rows[1]["draft_ms"] == pytest.approx((rows[1]["ms_step"] - rows[0]["ms_step"]) / 2, abs=1e-3)


def test_kernel_benches_are_found_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name in ("good", "on_a_gpu", "script", "_helper"):
        (folder / f"{name}.py").write_text("")
    modules: dict[str, Any] = {"good": Good, "on_a_gpu": OnAGpu, "script": object()}

    def load(name: str) -> Any:
        return modules[name.rpartition(".")[2]]

    monkeypatch.setattr(bench, "FOLDER", folder)
    monkeypatch.setattr(bench.importlib, "import_module", load)
    rows = run_cli(tmp_path, "kernels", "--quick")
    assert [(row["bench"], row["status"]) for row in rows] == [
        ("good", "ok"),
        ("on_a_gpu", "imported; it needs a GPU to run"),
        ("script", "imported; it needs a GPU to run"),
    ]
    assert rows[0]["us"] == 1
    with pytest.raises(ValueError, match="no bench nothing"):
        cli.main(["kernels", "--only", "nothing", "--device", "cpu"])


class Good:
    """Stands for a module with a bench."""

    @staticmethod
    def rows(*, device: torch.device, quick: bool) -> list[Row]:
        assert (device.type, quick) == ("cpu", True)
        return [{"op": "x", "us": 1}]


class OnAGpu:
    """Stands for one that needs a GPU: it has no rows to give here."""

    GPU_ONLY = True


def test_every_bench_here_imports_and_can_give_rows() -> None:
    pytest.importorskip("triton")
    rows = list(bench.run_benches([], device=torch.device("cpu"), quick=True))
    assert [row["status"] for row in rows] == ["imported; it needs a GPU to run"] * len(bench.names())
    for name in ("attention", "linear", "passes", "prefill", "verify"):
        assert callable(importlib.import_module(f"perf.kernels.{name}").rows)


def test_passes_are_timed_against_one_row() -> None:
    """On a CPU, where it shows no more than that it runs: shapes, bytes, and what a row is compared with."""
    tiny = Bytes.of(WORKLOADS["tiny"].config("target"), torch.float32)
    found = list(pass_rows(WORKLOADS["tiny"], [(2, 3)], [40, 70], torch.device("cpu"), room=300, repeats=2))
    assert [(row["shape"], row["rows"]) for row in found] == [
        (f"{name} behind {behind}, room for 300", count)
        for behind in (40, 70)
        for name, count in (("1x1", 1), ("2x3", 6))
    ]
    assert [row["bytes"] - tiny.weights for row in found] == [n * tiny.cache_token for n in (40, 84, 70, 144)]
    for one, more in (found[:2], found[2:]):
        assert one["over_one"] == 1.0
        assert more["over_one"] == pytest.approx(more["us"] / one["us"], rel=1e-2)  # both are rounded


def test_ceiling_writes_a_row_that_report_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run_cli(tmp_path, "ceiling")
    assert row["gb_s"] > 0
    assert cli.main(["report", str(tmp_path / "rows.jsonl")]) == [row]
    assert "gb_s" in capsys.readouterr().out


def test_a_set_of_cases_is_measured_once_part_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_cli(tmp_path, "run", "--cases", "smoke", "--part", "1/2")
    names = list(dict.fromkeys(row["case"] for row in first))
    assert names == [case.name for case in SMOKE[:2]]
    traced = [row for row in first if row.get("bench") == "trace"]
    assert [(row["k"], row["trace"]) for row in traced] == [(2, "none on a CPU")]
    ours = next(row for row in first if row["engine"] == "fastspec k=2")
    assert ours["start_up_warm_s"] > 0
    assert ours["planned_mib"] > 1
    assert ours["ms_token"] > 0
    again = run_cli(tmp_path, "run", "--cases", "smoke", "--part", "1/2")
    assert again == first
    assert "recorded already" in capsys.readouterr().err
    other = run_cli(tmp_path, "run", "--cases", "smoke", "--only", "shipped")
    roomy = other[len(first) :]
    assert {row["case"] for row in roomy} == {"shipped, batch 1, prompt 16, greedy, max_length 512"}
    assert {row["max_length"] for row in roomy} == {512}


def test_a_generator_has_the_room_that_its_run_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "FastSpecGenerator", lambda *models, **options: options["max_length"])
    run = models.Run(None, None, [[[1, 2, 3], [4, 5, 6]]], 5, (0,), False, "cpu", torch.float32)
    assert [models.generator_of(one, k=0) for one in (run, replace(run, max_length=64))] == [8, 64]


def test_cases_can_be_listed_and_bounded_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = cli.main(["run", "--list", "--part", "2/2", "--device", "cpu"])
    assert len(rows) > 2
    assert rows[-1]["expected_s"] > 60
    assert (
        cli.main(["run", "--cases", "smoke", "--within", "0", "--device", "cpu", "--out", str(tmp_path / "x.jsonl")])
        == []
    )
    assert capsys.readouterr().err.count("left out") == len(SMOKE)
    assert not (tmp_path / "x.jsonl").exists()


def test_an_unknown_peer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no peer 'other'; there are plain, static, assisted, vllm, sglang"):
        run_cli(tmp_path, "peers", "--workload", "tiny", *SMALL, "--k", "2", "--peers", "other")


def test_a_case_that_fails_keeps_its_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(suite.Bench):
        def __init__(self, case: Case, *given: Any) -> None:
            if case == SMOKE[0]:
                raise RuntimeError("at /some/where/else")
            super().__init__(case, *given)

    monkeypatch.setattr(suite, "Bench", Breaks)
    rows = run_cli(tmp_path, "run", "--cases", "smoke", "--only", "tiny")
    assert (rows[0]["case"], rows[0]["status"]) == (SMOKE[0].name, "failed: RuntimeError")
    assert {row["case"] for row in rows[1:]} == {SMOKE[1].name}
    assert cli.exit_code(rows) == 1
    assert cli.exit_code(rows[1:]) == 0

    def no_pair(*_: Any, **__: Any) -> Any:
        raise ValueError("out of reach")

    monkeypatch.setattr(suite, "open_models", no_pair)
    again = run_cli(tmp_path, "run", "--cases", "smoke", "--only", "tiny")
    assert [row["status"] for row in again[len(rows) :]] == ["failed: ValueError"]  # the second is recorded


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_start_is_taken_apart(ranks: int, tmp_path: Path) -> None:
    several = ("--tensor-parallel", str(ranks)) if ranks > 1 else ()
    rows = run_cli(tmp_path, "startup", "--pair", str(ROOT / "fastspec" / "demo"), *several)
    assert all(row.get("ranks", 1) == ranks for row in rows)
    assert [row["kernels"] for row in rows] == ["cold"] * len(PARTS) + ["warm"] * (len(PARTS) + 1)
    assert (rows[-1]["part"], rows[-1]["seconds"] > 0) == ("command", True)
    for run in (rows[: len(PARTS)], rows[len(PARTS) : -1]):
        seconds = {row["part"]: row["seconds"] for row in run}
        whole = sum(seconds[part] for part in ("start", "import torch", "import", "make", "generate"))
        if ranks == 1:  # else each part is that of its slowest rank
            assert whole == pytest.approx(seconds["first token"], abs=0.01)  # each is rounded to a millisecond
        assert whole >= seconds["first token"] - 0.01
        assert (seconds["exchange"] > 0) == (ranks > 1)
        assert 0 < seconds["build"] + seconds["read"] <= seconds["make"] + 0.01


def test_the_report_names_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "perf.plots", raising=False)
    monkeypatch.delattr("perf.plots", raising=False)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        pictures([], tmp_path)


def test_help_needs_no_matplotlib() -> None:
    blocked = "import sys; sys.modules['matplotlib'] = None; from perf.__main__ import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "quantised" in done.stdout


def test_checkpoints_of_your_own_take_the_place_of_a_workload(tmp_path: Path) -> None:
    own = ("--target", str(demo_pair()[0]), "--draft", str(demo_pair()[1]))
    rows = run_cli(tmp_path, "run", *own, *SMALL, "--k", "2")
    assert [row["engine"] for row in rows] == ["fastspec plain", "fastspec plain, exact=False", "fastspec k=2"]
    assert {(row["workload"], row["source"], row["pair"]["pair"]) for row in rows} == {("own", "disk", "own")}
    assert rows[0]["case"] == "own, batch 1, prompt 16, greedy"
    alone = run_cli(tmp_path, "run", *own[:2], *SMALL, "--k", "2")[3:]
    assert [row["k"] for row in alone] == [0, 0]


@pytest.mark.slow
def test_drafters_are_compared_on_text_that_was_held_out(tmp_path: Path) -> None:
    rows = run_cli(tmp_path, "drafters", "--k", "2", "--prompts", "1")
    assert [(row["drafter"], row["temperature"]) for row in rows] == [
        (name, temperature) for temperature in (0.0, 1.0) for name in ("plain", "draft model", "lookup")
    ]
    assert {row.get("text_equal") for row in rows[:3]} == {"1 of 1"}
    assert all(len(row["accepted_at_least"]) == row["k"] for row in rows)


def test_modes_and_formats_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "NEW", 8)
    monkeypatch.setattr(counted, "MODES", (counted.modes(2, 0.8),))
    monkeypatch.setattr(counted, "DRAFT_FORMATS", (counted.formats(2, None),))
    rows = run_cli(tmp_path, "modes", "--prompts", "2")
    assert [(row["verification"], row["new_tokens"]) for row in rows] == [(rule, 16) for rule in counted.RULES]
    assert rows[0]["over_rejection"] == 1.0
    formats = run_cli(tmp_path, "formats", "--prompts", "2")[3:]
    assert [row["draft"] for row in formats] == list(counted.FORMATS)
    assert all(row["texts_equal"] for row in formats)


def test_perplexity_of_formats_and_of_copies(tmp_path: Path) -> None:
    target = demo_pair()[0]
    options = ("--target", str(target), "--name", "shipped", "--windows", "2", "--formats", "int4")
    rows = run_cli(tmp_path, "perplexity", *options, "--copy", f"the same={target}")
    assert [row["format"] for row in rows] == ["as stored", "int4", "the same"]
    stored, rounded, same = rows
    assert same["over_stored"] == 1
    assert (same["nats"], same["mib"]) == (stored["nats"], stored["mib"])
    assert rounded["over_stored"] < 1.1
    assert rounded["nats"] != stored["nats"], "the text is read with the rounded weights"
    assert rounded["mib"] < stored["mib"]


def test_tasks_are_counted_by_kind(tmp_path: Path) -> None:
    assert Counter(task.kind for task in read_tasks()) == dict.fromkeys(
        ("edit code", "docstring", "summarise", "quote", "to JSON", "copy", "story", "chat", "agent loop"), 5
    )
    options = ("--target", str(demo_pair()[0]), "--draft", str(demo_pair()[1]), "--name", "shipped", "--k", "2")
    options += ("--dtype", "float32")
    more = ("--each", "2", "--new", "8", "--peers", "lookup", "assistant", "plain", "compiled")
    rows = run_cli(tmp_path, "tasks", *options, "--kinds", "chat", *more)
    drafters = [(row["drafter"], row["k"]) for row in rows if row["kind"] == "all"]
    ours = [("plain", 0), ("lookup", 2), ("suffix", 2), ("draft model", 2)]
    alone = [("transformers", 0), ("torch.compile, static K/V", 0)]
    peers = [("transformers' prompt lookup", 2), ("transformers' assistant", 2), *alone]
    assert drafters == [*ours, *peers, *ours]
    exact = [row for row in rows if row["temperature"] == 0]  # in fp32 the peers' text is ours
    assert all(row["text_equal"] == "2 of 2" for row in exact)
    assert all(row["tokens_per_step"] == 1 for row in rows if row["drafter"] == "plain")
    steps = {row["drafter"]: row["tokens_per_step"] for row in exact if row["kind"] == "all"}
    assert steps["transformers' assistant"] > 1.5, "drafts of a model are accepted"
    fewer = ("--lookups", "suffix", "--temperatures", "0.5", "--kinds", "story", "--each", "1", "--new", "4")
    rows = run_cli(tmp_path, "tasks", *options, *fewer)[len(rows) :]
    assert [(row["drafter"], row["temperature"]) for row in rows if row["kind"] == "all"] == [
        (drafter, 0.5) for drafter in ("plain", "suffix", "draft model")
    ]
    with pytest.raises(SystemExit, match="no such task; kinds are"):
        run_cli(tmp_path, "tasks", *options, "--kinds", "poem")
    with pytest.raises(SystemExit, match="--peers needs --batch 1, got --batch 2"):
        run_cli(tmp_path, "tasks", *options, "--peers", "lookup", "--batch", "2")
