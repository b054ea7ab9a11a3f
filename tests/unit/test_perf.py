"""The measuring base: its timer, its records, what it counts, and that every entry point runs on a CPU."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec.models.spec import spec_from_config
from perf import __main__ as cli
from perf import bench, records, timing
from perf.records import Row
from perf.runs import Call, same_text, summary
from perf.stats import rate_interval, ratio_interval
from perf.timing import Comparison, Timing, summarise
from perf.trace import analyse, merge
from perf.workloads import CORE, WORKLOADS, Bytes, step_bytes

SHAPED = sorted(set(WORKLOADS) - {"shipped"})


def test_outliers_do_not_move_a_timing() -> None:
    samples = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]
    clean, dirty = summarise(samples, "wall", "cpu"), summarise([*samples, 50.0], "wall", "cpu")
    assert (clean.dropped, dirty.dropped) == (0, 1)
    assert dirty.median == clean.median == pytest.approx(1.0)
    assert dirty.minimum == 0.9
    assert dirty.spread < 0.2
    with pytest.raises(ValueError, match="no samples"):
        summarise([], "wall", "cpu")


def test_one_sample_is_a_timing_without_spread() -> None:
    assert summarise([2.0], "wall", "cpu") == Timing(2.0, 2.0, 0.0, 1, 0, "wall", "cpu")


def test_functions_take_turns_and_time_is_per_call() -> None:
    order: list[int] = []

    def sleeper(index: int) -> None:
        order.append(index)
        time.sleep(0.004)

    took = timing.graph_time([lambda: sleeper(0), lambda: sleeper(1)], repeats=2, warmup=1, device="cpu")
    assert order == [0, 1] * 3
    assert 0.004 <= took.minimum < 0.008 * 2
    assert (took.how, took.device) == ("wall", "cpu")


def test_a_comparison_alternates_and_sees_a_factor_of_three() -> None:
    order = []

    def slow() -> None:
        order.append("b")
        time.sleep(0.006)

    def fast() -> None:
        order.append("a")
        time.sleep(0.002)

    found = timing.compare(fast, slow, blocks=3, repeats=1, warmup=0, device="cpu")
    assert "".join(order) == "ababab"
    assert found.low > 1
    assert found.differ


@pytest.mark.parametrize(
    ("ratio", "low", "high", "differ"),
    [(1.2, 1.1, 1.3, True), (0.8, 0.7, 0.9, True), (1.2, 0.9, 1.5, False), (1.02, 1.01, 1.03, False)],
)
def test_a_difference_needs_every_block_and_three_per_cent(ratio: float, low: float, high: float, differ: bool) -> None:
    once = summarise([1.0], "wall", "cpu")
    assert Comparison(once, once, ratio, low, high).differ is differ


def test_cold_copies_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda device=None: 100)
    assert [timing.copies_for(size) for size in (1000, 500, 499, 100, 30)] == [1, 1, 2, 5, 17]
    used: list[int] = []
    timing.cold_time(lambda index: lambda: used.append(index), 250, repeats=1, warmup=0, device="cpu")
    assert used == [0, 1]


@pytest.mark.gpu
def test_graph_times_are_plausible_on_a_gpu() -> None:
    data = torch.ones(2**26, device="cuda")
    took = timing.graph_time(lambda: data.amax(), repeats=5)
    assert took.how == "graph"
    assert 50 < took.gb_s(data.nbytes) < 20000
    assert timing.event_time(lambda: data.amax(), flush=True, repeats=5).how == "events"
    long, short = (lambda: [data.amax() for _ in range(4)]), (lambda: data.amax())
    assert timing.compare(short, long, blocks=3).ratio == pytest.approx(4, rel=0.3)


def test_rows_come_back_and_name_the_software(tmp_path: Path) -> None:
    row = {"engine": "x", "tok_s": 1.5, **records.environment("cpu", commit="abc1234")}
    records.append(tmp_path / "rows.jsonl", row)
    records.append(tmp_path / "rows.jsonl", [row, row])
    assert records.read(tmp_path / "rows.jsonl") == [row] * 3
    assert row["commit"] == "abc1234"
    assert row["torch"] == torch.__version__
    assert records.place("peers") == records.RESULTS / "peers.jsonl"


@pytest.mark.parametrize(
    "value",
    [
        "/opt/models/target",
        "failed: '/home/someone/x'",
        "C:\\Users\\x",
        {"deep": ["~/models/x"]},
        f"on {socket.gethostname()}" if len(socket.gethostname()) > 3 else "/tmp/x",
    ],
)
def test_a_row_that_names_a_place_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not belong"):
        records.append(tmp_path / "rows.jsonl", [{"a": 1}, {"b": value}])
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("fine", ["1/2", "8b+1b", "tok/s", "k=4, exact=False", "2.11.0+cu130", "3 of 4 / 5"])
def test_what_only_looks_like_a_place_is_not(fine: str) -> None:
    assert records.private({"a": [fine]}) is None


def test_results_kept_in_the_repository_are_readable_and_name_no_place() -> None:
    for path in records.RESULTS.glob("*.jsonl"):
        rows = records.read(path)
        assert rows
        assert [row for row in rows if records.private(row) is not None or "commit" not in row] == []


def test_figures_in_the_document_are_rows() -> None:
    text = (records.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    lines = [line.strip("|\n ").split(" | ") for line in text.splitlines() if line.startswith("| peers |")]
    assert lines
    rows = {(row["engine"], row["tok_s"]): row for row in records.read("peers") if row["status"] == "ok"}
    for _, _, engine, tok_s, interval, per_pass, step, commit in lines:
        row = rows[engine, float(tok_s)]
        assert (row["tokens_per_pass"], row["ms_step"], row["commit"]) == (float(per_pass), float(step), commit)
        assert row["tok_s_95"] == [float(part) for part in interval.split("..")]


def test_a_table_leaves_out_empty_columns() -> None:
    text = records.table([{"a": 1, "b": None}, {"a": [0.5, 2000.25]}], ("a", "b", "c"))
    assert text.split() == ["a", "1", "0.5..2000"]


def test_intervals_cover_the_rate_and_shrink_with_pairing() -> None:
    draw = random.Random(1)
    slow = [draw.uniform(1, 3) for _ in range(16)]
    tokens = [100.0] * 16
    low, high = rate_interval(tokens, slow)
    assert low < sum(tokens) / sum(slow) < high
    assert rate_interval([1.0, 2.0], [1.0, 2.0]) == (1.0, 1.0)
    half = [value / 2 for value in slow]
    assert ratio_interval(tokens, half, tokens, slow) == pytest.approx((2.0, 2.0))
    with pytest.raises(ValueError, match="no interval"):
        rate_interval([], [])


def test_a_summary_weighs_prompts_by_time() -> None:
    calls = [Call(10, 5, 5, 1.0, 0.2, [[1]]), Call(10, 10, 10, 3.0, 0.6, [[2]])]
    row = summary("x", 2, calls)
    assert row["tok_s"] == 5.0
    assert row["tokens_per_pass"] == 1.333
    assert row["ms_step"] == pytest.approx((800 / 4 + 2400 / 9) / 2, abs=1e-3)
    assert row["first_ms"] == 400
    assert same_text(calls, [calls[0], calls[0]]) == (1, 2)


def test_an_engine_that_does_not_count_passes_leaves_them_empty() -> None:
    row = summary("x", 2, [Call(10, None, None, 1.0, 0.2, [[1]])])
    assert (row["ms_step"], row["tokens_per_pass"]) == (None, None)


@pytest.mark.parametrize("name", SHAPED)
def test_every_shape_is_one_that_fastspec_supports(name: str) -> None:
    workload = WORKLOADS[name]
    for role in ("target", "draft"):
        spec = spec_from_config(workload.config(role))
        assert spec.dtype is workload.dtype
        assert workload.config(role).eos_token_id is None


@pytest.mark.parametrize(
    ("name", "role", "gigabytes", "cache"),
    [
        # Meta's and Qwen's published parameter counts: 8.03, 1.24, 7.62, 0.49, 8.19 and 0.60 billion, the embedding
        # taken off where the head is not tied to it
        ("8b+1b", "target", 15.01, 131072),
        ("8b+1b", "draft", 2.471, 32768),
        ("8b+1b-tied", "draft", 2.471, 32768),
        ("qwen2.5-7b+0.5b", "target", 2 * (7.616 - 0.545), 57344),
        ("qwen2.5-7b+0.5b", "draft", 2 * 0.494, 12288),
        ("qwen3-8b+0.6b", "target", 2 * (8.191 - 0.622), 147456),
        ("qwen3-8b+0.6b", "draft", 2 * 0.596, 114688),
    ],
)
def test_bytes_of_a_pass_are_those_of_the_published_models(name: str, role: str, gigabytes: float, cache: int) -> None:
    found = Bytes.of(WORKLOADS[name].config(role), torch.bfloat16)
    assert found.weights / 1e9 == pytest.approx(gigabytes, rel=2e-3)
    assert found.cache_token == cache


def test_a_step_reads_the_target_once_and_the_draft_k_times() -> None:
    target, draft = Bytes(1000, 10), Bytes(100, 1)
    assert step_bytes(target, draft, k=3, batch=2, context=5) == 1000 + 2 * 5 * 10 + 3 * (100 + 2 * 5)
    assert step_bytes(target, None, k=0, batch=1, context=0) == 1000


def test_the_core_cases_exist() -> None:
    assert {case.workload for case in CORE} <= set(WORKLOADS)


def traced_step(at: float, correlation: int, kernels: list[tuple[float, float]]) -> list[Row]:
    """A graph launch at `at` and its kernels: start and duration after it."""
    launch = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": at, "args": {"correlation": correlation}}
    ran = [
        {"cat": "kernel", "name": "k", "ts": at + start, "dur": took, "args": {"correlation": correlation}}
        for start, took in kernels
    ]
    return [launch, *ran]


def test_a_trace_gives_gaps_between_and_within_steps() -> None:
    events: list[Row] = []
    for index, at in enumerate((0.0, 110.0, 220.0)):
        events += traced_step(at, index, [(10, 40), (55, 45)])  # 5 idle within; ends at 100; next starts 20 later
    events += traced_step(400.0, 9, [(10, 3)])  # another graph
    events += [
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 105},
        {"cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 106, "args": {"correlation": 50}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 104, "dur": 6, "args": {"correlation": 50}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 106, "args": {"correlation": 51}},
        {"cat": "cpu_op", "name": "aten::add", "ts": 1},
        {"name": "process_name", "ph": "M"},
    ]
    row = analyse(events, steps=4)
    assert row["graph_kernels"] == 2
    assert row["step_us"] == 90
    assert row["idle_within_us"] == 5
    assert row["idle_between_us"] == pytest.approx((14 + 20) / 2)  # the copy fills 6 of the first gap
    assert row["idle_between_us_max"] == 20
    assert (row["graph_per_step"], row["sync_per_step"]) == (1, 0.25)
    assert (row["copy_per_step"], row["launch_per_step"], row["gpu_copies_per_step"]) == (0.25, 0.25, 0.25)


def test_a_trace_without_a_gpu_claims_nothing() -> None:
    assert analyse([], steps=2)["idle_between_us"] is None
    with pytest.raises(ValueError, match="at least 1"):
        analyse([], steps=0)


def test_spans_merge_when_they_touch() -> None:
    assert merge([(5, 6), (0, 2), (2, 3), (1, 2)]) == [(0, 3), (5, 6)]


def test_parts_share_out_every_batch_once() -> None:
    prompts = [[index] for index in range(9)]
    parts = [cli.batches(prompts, 2, (index, 3)) for index in (1, 2, 3)]
    assert sorted(batch[0][0] for part in parts for batch in part) == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="none is left"):
        cli.batches(prompts, 8, (2, 2))


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
        rows = run_cli(tmp_path, "run", "--workload", "tiny", *SMALL, "--k", "0,2", "--peers", "transformers")
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
        "gpt_fast",
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
    assert "transformers assisted" in capsys.readouterr().out


def test_peers_alone_and_a_batch_that_assistance_refuses(tmp_path: Path) -> None:
    rows = run_cli(tmp_path, "peers", "--workload", "tiny", *SMALL, "--k", "2", "--batch", "2", "--part", "1/1")
    assert {row["engine"]: row["status"] for row in rows}["transformers assisted"] == "takes one prompt at a time"


def test_the_shipped_pair_runs_sampled(tmp_path: Path) -> None:
    rows = run_cli(tmp_path, "run", "--workload", "shipped", *SMALL, "--k", "2", "--sampled")
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert rows[-1]["pair"] == {"pair": "shipped"}
    assert {row["source"] for row in rows} == {"disk"}


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(given: object) -> Iterator[list[Row]]:
        yield [{"engine": "first", "status": "ok"}]
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "command_ceiling", broken)
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
    for name in ("good", "script", "_helper"):
        (folder / f"{name}.py").write_text("")
    modules: dict[str, Any] = {"good": Good, "script": object()}

    def load(name: str) -> Any:
        return modules[name.rpartition(".")[2]]

    monkeypatch.setattr(bench, "FOLDER", folder)
    monkeypatch.setattr(bench.importlib, "import_module", load)
    rows = run_cli(tmp_path, "kernels", "--quick")
    assert [(row["bench"], row["status"]) for row in rows] == [
        ("good", "ok"),
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


def test_every_bench_here_imports() -> None:
    pytest.importorskip("triton")
    rows = list(bench.run_benches([], device=torch.device("cpu"), quick=True))
    assert [row for row in rows if "cannot" in row["status"]] == []


def test_ceiling_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run_cli(tmp_path, "ceiling")
    assert row["gb_s"] > 0
    assert cli.main(["report", str(tmp_path / "rows.jsonl")]) == [row]
    assert "gb_s" in capsys.readouterr().out
