"""The measuring base: its timer, its records, what it counts, and the cases."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec.models.config import spec_from_config
from perf import records, timing
from perf.cases import CORE, LONGEST, PART_SECONDS, SETS, by_pair, listed, part_of, pending, seconds
from perf.experiment import Call, Experiment, rate_interval, ratio_interval, same_text, summary
from perf.timing import Timing, summarise
from perf.workloads import SHAPED, WORKLOADS, Bytes, step_bytes
from tests.helpers.clocks import Clock


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The timer's."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_functions_take_turns_and_time_is_per_call(clock: Clock) -> None:
    order: list[int] = []

    def sleeper(index: int) -> None:
        order.append(index)
        clock.sleep(0.004)

    took = timing.graph_time([lambda: sleeper(0), lambda: sleeper(1)], repeats=2, warmup=1, device="cpu")
    assert order == [0, 1] * 3
    assert took.minimum == took.median == pytest.approx(0.004, rel=1e-3)
    assert (took.how, took.device) == ("wall", "cpu")


def test_arms_take_turns_and_every_second_round_is_mirrored() -> None:
    told: list[str] = []
    arms = {"a": 1.0, "b": 2.0, "c": 3.0}
    for mirrored, order in ((False, "abcabcabc"), (True, "abccbaabc")):
        seen: list[str] = []

        def measure(arm: float, number: int, seen: list[str] = seen) -> float:
            seen.append("abc"[int(arm) - 1])
            return arm + 10 * number

        assert Experiment(arms, measure, 3, mirrored).run(told.append) == {
            "a": [1.0, 11.0, 21.0],
            "b": [2.0, 12.0, 22.0],
            "c": [3.0, 13.0, 23.0],
        }
        assert "".join(seen) == order
    assert told[:3] == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]


def test_cold_copies_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda device=None: 100)
    assert [timing.copies_for(size) for size in (1000, 500, 499, 100, 30)] == [1, 1, 2, 5, 17]


@pytest.mark.gpu
def test_graph_times_are_plausible_on_a_gpu() -> None:
    data = torch.ones(2**26, device="cuda")
    took = timing.graph_time(lambda: data.amax(), repeats=5)
    assert took.how == "graph"
    assert 50 < took.gb_s(data.nbytes) < 20000
    assert timing.event_time(lambda: data.amax(), repeats=5).how == "events"


def test_no_row_of_the_results_is_there_twice() -> None:
    for path in records.RESULTS.glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(set(lines)) == len(lines), path.name


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
    files = ("suite", "peers")
    lines = [line.strip("|\n ").split(" | ") for line in text.splitlines()]
    lines = [line for line in lines if line[0] in files]
    assert {line[0] for line in lines} == set(files)
    rows = {(file, row["engine"], row.get("tok_s")): row for file in files for row in records.read(file)}
    for file, _, engine, tok_s, interval, per_pass, step, commit in lines:
        row = rows[file, engine, float(tok_s)]
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
    calls = [Call(10, 5, 5, 1.0, 0.2, [[1]], 8, 6), Call(10, 10, 10, 3.0, 0.6, [[2]], 8, 0)]
    row = summary("x", 2, calls)
    assert row["tok_s"] == 5.0
    assert row["tokens_per_pass"] == 1.333
    assert row["ms_step"] == pytest.approx((800 / 4 + 2400 / 9) / 2, abs=1e-3)
    assert row["first_ms"] == 400
    assert row["ms_token"] == 200
    assert row["acceptance"] == 0.375
    assert row["ms_step_iqr"] == pytest.approx((2400 / 9 - 800 / 4) / 2, abs=1e-3)
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


def test_every_set_is_of_workloads_there_are_and_names_no_case_twice() -> None:
    for cases in SETS.values():
        assert {case.workload for case in cases} <= set(WORKLOADS)
        assert len({case.name for case in cases}) == len(cases)
    wanted = {"8b+1b", "70b-slice+8b-slice", "qwen2.5-7b+0.5b", "qwen3-8b+0.6b", "shipped"}
    assert wanted <= {case.workload for case in CORE}
    every = SETS["all"]
    assert {1, 64} <= {case.batch for case in every}
    assert {128, LONGEST} <= {case.prompt for case in every}
    assert {case.sampled for case in every} == {True, False}
    assert set(range(9)) <= {k for case in every for k in case.ks}


@pytest.mark.parametrize(
    ("name", "count"), [("core", 1), ("core", 3), ("core", 10), ("all", 8), ("all", 20), ("smoke", 2)]
)
def test_parts_share_out_every_case_once(name: str, count: int) -> None:
    parts = [part_of(SETS[name], (index, count)) for index in range(1, count + 1)]
    assert [case for part in parts for case in part] == by_pair(SETS[name])
    assert all(parts)


def test_parts_are_short_enough() -> None:
    assert seconds(CORE) < PART_SECONDS
    assert max(seconds(part_of(SETS["all"], (index, 10))) for index in range(1, 11)) < PART_SECONDS
    with pytest.raises(ValueError, match=f"do not make {len(CORE) + 1} parts"):
        part_of(CORE, (1, len(CORE) + 1))


def test_cases_of_one_pair_cost_its_making_once() -> None:
    first, second = CORE[:2]
    assert first.pair == second.pair
    assert seconds([first, second]) < seconds([first]) + seconds([second]) - 10
    assert listed(CORE)[-1]["expected_s"] == round(seconds(CORE))


def test_what_is_recorded_is_not_measured_again() -> None:
    here = {"commit": "abc1234", "device": "cuda", "gpu": "H200"}
    done = {**here, "case": CORE[0].name, "status": "ok"}
    assert pending(CORE, [done], here) == list(CORE[1:])
    for other in (
        {"commit": "def5678"},
        {"device": "cpu"},
        {"gpu": "H100"},
        {"case": "another"},
        {"status": "failed: E"},
    ):
        assert pending(CORE, [{**done, **other}], here) == list(CORE)


@pytest.mark.parametrize("commit", ["unknown", "abc1234+dirty"])
def test_rows_of_code_that_is_not_known_count_for_nothing(commit: str) -> None:
    here = {"commit": commit, "device": "cpu", "gpu": None}
    assert pending(CORE, [{**here, "case": CORE[0].name, "status": "ok"}], here) == list(CORE)
