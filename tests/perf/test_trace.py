"""What a profiler's recording says about steps, whichever profiler it was: a trace, or an export of Nsight Systems."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from perf import __main__ as cli
from perf import nsys, phases, trace
from perf.anatomy import OTHER, anatomy, kind_of, phases_of, rows_of
from perf.models import batches_of, generator_of, open_models
from perf.nsys import NotAnExport, command_of, of_sqlite
from perf.recording import Event, merge, of_chrome
from perf.records import ROOT, Row
from perf.step_hooks import around_steps
from perf.trace import analyse, faults, outermost


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
    row = analyse(of_chrome(events), steps=4)
    assert row["graph_kernels"] == 2
    assert row["step_us"] == 90
    assert row["idle_within_us"] == 5
    assert row["idle_between_us"] == pytest.approx((14 + 20) / 2)  # the copy fills 6 of the first gap
    assert row["idle_between_us_max"] == 20
    assert (row["graph_per_step"], row["sync_per_step"]) == (1, 0.333)  # in the three steps between the launches
    assert (row["copy_per_step"], row["launch_per_step"], row["gpu_copies_per_step"]) == (0.333, 0.333, 0.25)


def test_a_trace_without_a_gpu_claims_nothing() -> None:
    assert analyse(of_chrome([]), steps=2)["idle_between_us"] is None
    with pytest.raises(ValueError, match="at least 1"):
        analyse(of_chrome([]), steps=0)


def test_spans_merge_when_they_touch() -> None:
    assert merge([(5, 6), (0, 2), (2, 3), (1, 2)]) == [(0, 3), (5, 6)]


def test_synchronisations_before_and_after_the_steps_are_not_theirs() -> None:
    events = [event for index in range(3) for event in traced_step(100.0 * index, index, [(1, 9)])]
    events += [{"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": at, "dur": 5} for at in (-10, 300)]
    assert faults(analyse(of_chrome(events), steps=3)) == []


def test_ranges_of_steps_are_counted_and_each_holds_one_launch() -> None:
    events = [event for index in range(4) for event in traced_step(100.0 * index, index, [(1, 9)])]
    ranges = [
        {"cat": "user_annotation", "name": "step: 1 rows, k = 4", "ts": at, "dur": 50.0}
        for at in (-5.0, 95.0, 195.0, 295.0)
    ]
    row = analyse(of_chrome([*events, *ranges]), steps=1000)
    assert (row["traced_steps"], row["graph_per_step"], row["graphs_in_a_step"]) == (4, 1, [1, 1])
    ranges[1]["dur"] = 150.0  # two launches in it, and none in the next but its own
    assert "1 to 2 graph launches within" in faults(analyse(of_chrome([*events, *ranges]), steps=4))[0]


def test_a_launch_within_a_launch_is_one() -> None:
    calls = [Event("cudaGraphLaunch", "call", 0, 10), Event("cuGraphLaunch", "call", 2, 9)]
    assert outermost([*calls, Event("cudaGraphLaunch", "call", 20, 30)]) == [
        calls[0],
        calls[0]._replace(start=20, end=30),
    ]


# names as Triton gives them; (name, start, duration)
STEP = [
    ("_feed_kernel", 0, 1), ("_embed_kernel", 1, 1), ("few_rows_kernel", 2, 5), ("fragment_kernel", 7, 2),
    ("few_rows_kernel", 9, 6),
    ("_feed_kernel", 15, 1), ("few_rows_kernel", 16, 5), ("few_rows_kernel", 21, 6),
    ("_feed_kernel", 27, 1), ("norm_kernel", 28, 1), ("many_rows_kernel", 29, 20),
    ("_flash_kernel", 49, 4), ("many_rows_kernel", 53, 30),
    ("_verify_kernel", 83, 7),
]  # fmt: skip


def test_a_step_is_taken_apart_by_its_kernels() -> None:
    step = [Event(name, "kernel", at, at + took, 1) for name, at, took in STEP]
    assert phases_of(step) == ["draft 1"] * 5 + ["draft 2"] * 3 + ["score"] * 5 + ["verify"]
    sampled = [*step[:-1], Event("softmax", "kernel", 83, 85, 1), Event("_commit_kernel", "kernel", 85, 88, 1)]
    assert phases_of(sampled)[-2:] == ["verify", "commit"]
    events = [event for index in range(3) for event in traced_step(100.0 * index, index, [(1, 9)])]
    assert anatomy(of_chrome([])) == {}
    assert anatomy(of_chrome(events))["draft_pass_us"] is None  # kernels that nobody knows
    assert kind_of("triton_red_fused_0") == "product"
    assert kind_of("_groups_kernel") == kind_of("_distribution_kernel") == "sampler"
    assert kind_of("tma_kernel") == kind_of("sum_kernel") == kind_of("few_rows_kernel") == "product"
    assert kind_of("norm_kernel") == kind_of("regroup_kernel") == "norm"
    assert kind_of("elementwise") == "other"


def test_every_kernel_of_ours_has_a_kind() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "fastspec" / "kernels").rglob("*.py")]
    launched = {name for text in sources for name in re.findall(r"\blaunch\(\s*(\w+_kernel)\b", text)}
    assert {"_feed_kernel", "few_rows_kernel", "_verify_kernel"} <= launched
    assert [name for name in sorted(launched) if kind_of(name) == OTHER] == []  # perf.anatomy.KINDS names them


def launch_of(step: list[tuple[str, float, float]], at: float, correlation: int) -> list[Row]:
    found = traced_step(at, correlation, [(start, took) for _, start, took in step])
    for event, (name, _, _) in zip(found[1:], step, strict=True):
        event["name"] = name
    return found


def test_phases_add_up_to_the_step() -> None:
    events = [event for index in range(3) for event in launch_of(STEP, 200.0 * index, index)]
    row = anatomy(of_chrome(events))
    assert (row["draft_first_us"], row["draft_pass_us"], row["score_us"], row["verify_us"]) == (15, 12, 56, 7)
    assert row["commit_us"] is None
    assert row["kind_us"]["product"] == 5 + 6 + 5 + 6 + 20 + 30
    assert row["kind_kernels"]["attention"] == 2
    assert row["timeline"][2] == ["draft 1", "product", 2, 5]
    assert len(row["timeline"]) == len(STEP)


# columns as in NVIDIA's "SQLite Schema Reference", those of no use here left out
SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, eventClass INT, globalTid INT,
    correlationId INT, nameId INT NOT NULL, returnValue INT NOT NULL, callchainId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL,
    contextId INT NOT NULL, streamId INT NOT NULL, correlationId INT, globalPid INT, demangledName INT NOT NULL,
    shortName INT NOT NULL, graphNodeId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT NOT NULL, end INT NOT NULL, correlationId INT, bytes INT NOT NULL,
    copyKind INT NOT NULL, graphNodeId INT);
CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT NOT NULL, rangeId INT, text TEXT, globalTid INT,
    textId INT);
"""
STEPS = 5


def export(path: Path, *, extra: str | None = None, every: int = 1, ranges: bool = True) -> Path:
    """An export of some steps; `extra` is one more call in each."""
    names = ["cudaGraphLaunch_v10000", *dict.fromkeys(name for name, _, _ in STEP), "step: 1 rows, k = 2, greedy"]
    names += [extra] if extra else []
    with closing(sqlite3.connect(path)) as database:
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(names)))

        def call(name: str, at: float, correlation: int) -> None:
            row = (at * 1000, (at + 4) * 1000, 0, 1, correlation, names.index(name), 0, None)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

        for step in range(STEPS):
            at = 1000.0 * step
            call(names[0], at, step)
            if extra and step % every == 0:
                call(extra, at + 6, 100 + step)
            for node, (name, start, took) in enumerate(STEP):
                place = ((at + 10 + start) * 1000, (at + 10 + start + took) * 1000)
                row = (*place, 0, 1, 7, step, 1, names.index(name), names.index(name), node)
                database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 10)})", row)
            if ranges:
                text, number = (
                    (names[-1 - bool(extra)], None) if step % 2 else (None, names.index("step: 1 rows, k = 2, greedy"))
                )
                row = ((at - 1) * 1000, (at + 12) * 1000, 59, None, text, 1, number)
                database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        database.commit()
    return path


def test_an_export_gives_the_rows_of_a_trace(tmp_path: Path) -> None:
    row = rows_of(of_sqlite(export(tmp_path / "good.sqlite")), steps=1)
    assert row["status"] == "ok"
    assert "unverified" in row["read_by"]
    assert (row["graph_per_step"], row["sync_per_step"], row["launch_per_step"]) == (1, 0, 0)
    assert (row["traced_steps"], row["graphs_in_a_step"], row["graph_kernels"]) == (STEPS, [1, 1], len(STEP))
    assert (row["draft_first_us"], row["score_us"], row["verify_us"], row["step_us"]) == (15, 56, 7, 90)
    assert row["idle_between_us"] == 910
    events = [event for index in range(STEPS) for event in launch_of(STEP, 1000.0 * index, index)]
    other = rows_of(of_chrome(events), steps=STEPS)
    same = set(other) - {"read_by", "graphs_in_a_step"}
    assert {key: row[key] for key in same} == {key: other[key] for key in same}


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(
    ("extra", "every", "complaint"),
    [
        ("cudaStreamSynchronize_v3020", 1, "synchronisations per step"),
        ("cudaEventSynchronize_v3020", 4, "0.25 synchronisations per step"),
        ("cudaMemcpy_v3020", 1, "synchronisations per step"),
        ("cudaGraphLaunch_v10000 ", 1, "2.0 graph launches per step, wanted 1"),
        ("cudaLaunchKernel_v7000", 1, "launches outside the graph"),
    ],
)
def test_steps_that_wait_or_launch_too_much_fail(
    extra: str, every: int, complaint: str, ranges: bool, tmp_path: Path
) -> None:
    row = rows_of(of_sqlite(export(tmp_path / "bad.sqlite", extra=extra, every=every, ranges=ranges)), steps=STEPS)
    assert row["status"].startswith("failed: ")
    assert complaint in row["status"]
    assert cli.exit_code([{"bench": "trace", **row}]) == 1


def test_a_copy_that_nobody_waits_for_is_allowed(tmp_path: Path) -> None:
    row = rows_of(of_sqlite(export(tmp_path / "copies.sqlite", extra="cudaMemcpyAsync_v3020")), steps=STEPS)
    assert (row["status"], row["copy_per_step"]) == ("ok", 1)


def test_what_is_no_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotAnExport, match="no such file"):
        of_sqlite(tmp_path / "none.sqlite")
    (tmp_path / "text.sqlite").write_text("not a database, but long enough to have a header of its own" * 20)
    with pytest.raises(NotAnExport, match="no SQLite file"):
        of_sqlite(tmp_path / "text.sqlite")
    with closing(sqlite3.connect(tmp_path / "empty.sqlite")) as database:
        database.executescript("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
    with pytest.raises(NotAnExport, match="CUPTI_ACTIVITY_KIND_RUNTIME; was CUDA traced"):
        of_sqlite(tmp_path / "empty.sqlite")


def test_nsys_is_run_around_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = command_of("nsys", tmp_path / "steps", ["nsys", "--workload", "shipped", "--inside"])
    assert line[:2] == ["nsys", "profile"]
    assert {"--capture-range=cudaProfilerApi", "--cuda-graph-trace=node", "--export=sqlite"} <= set(line)
    assert line[-6:] == ["-m", "perf", "nsys", "--workload", "shipped", "--inside"]
    monkeypatch.setattr(nsys.shutil, "which", lambda name: None)
    assert nsys.profile(["nsys"], tmp_path) is None
    monkeypatch.setattr(nsys.shutil, "which", lambda name: "/bin/false")
    with pytest.raises(RuntimeError, match="no export"):
        nsys.profile(["nsys"], tmp_path)


def test_the_command_reads_an_export_and_without_nsys_says_who_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = cli.main(["nsys", "--read", str(export(tmp_path / "good.sqlite")), "--device", "cpu"])
    assert row["status"] == "ok"
    assert "unverified" in capsys.readouterr().out
    small = ["--prompt", "16", "--new", "16", "--prompts", "1", "--k", "2"]
    (row,) = cli.main(["nsys", "--workload", "shipped", *small, "--device", "cpu"])
    assert (row["trace"], cli.exit_code([row])) == ("none on a CPU", 0)
    assert "torch.profiler instead" in capsys.readouterr().err


def test_torch_profiler_sees_a_range_around_every_step(tmp_path: Path) -> None:
    with open_models("shipped", device="cpu") as models:
        run = models.run(batches_of(models.prompts(1, 16), 1), new=40, ks=(2,), sampled=False)
        with generator_of(run, k=2) as generator:
            stream = phases.settled(generator, run, 2)
            assert stream is not None
            with (
                around_steps(generator, lambda key: record_function(f"{trace.STEP}{key}")),
                profile(activities=[ProfilerActivity.CPU]) as profiler,
            ):
                assert phases.advance(stream, 5) == 5
            assert phases.advance(stream, 1000) > 0
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    recording = of_chrome(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert [event.name for event in recording.ranges] == ["step: 1 rows, k = 2, greedy, 256 positions"] * 5
    row = rows_of(recording, steps=1)
    assert row["traced_steps"] == 5
    assert row["status"] == "failed: 0.0 graph launches per step, wanted 1"  # as a step is that runs from the host
