"""The report: tables and pictures of rows, between two marks of a document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perf import __main__ as cli
from perf import gate, on_tasks, plots, records, report
from perf.cases import tokens_per_step
from perf.records import Row
from perf.report import BEGIN, END

HERE: Row = {"device": "cuda", "gpu": "G", "torch": "2", "triton": "3", "commit": "abc1234", "date": "2026-01-01"}
MOST_BYTES = 300 * 1024


def step_row(k: int, **more: Any) -> Row:
    tokens = tokens_per_step(0.78, k)
    row: Row = {
        "engine": f"fastspec k={k}" if k else "fastspec plain",
        "case": "8b+1b, batch 1, prompt 128, greedy",
        "workload": "8b+1b",
        "batch": 1,
        "prompt": 128,
        "new": 256,
        "sampled": False,
        "k": k,
        "status": "ok",
        "ms_step": 4.0 + k,
        "floor_ms": 3.4 + 0.6 * k,
        "step_over_floor": 1.2,
        "tok_s": 1e3 * tokens / (4.0 + k),
        "tok_s_95": [200.0, 600.0],
        "tokens_per_pass": tokens,
        "speed_up": tokens * 4 / (4 + k),
        "read_gb_s": 4400,
        "planned_mib": 18000.0,
        "peak_mib": 17900.0,
        "start_up_s": 3.0,
    }
    return {**row, **HERE, **more}


def trace_row() -> Row:
    phases = ["draft 1", "draft 2", "score", "verify"]
    bars = [[phase, "product" if phase != "verify" else "verify", 10.0 * at, 9.0] for at, phase in enumerate(phases)]
    more = {"step_us": 39.0, "timeline": bars, "kind_us": {"product": 27.0}, "kind_kernels": {"product": 3}}
    return {
        **step_row(2, bench="trace", ms_step=None),
        **more,
        "sync_per_step": 0.0,
        "read_by": "torch.profiler (CUPTI)",
    }


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    kernel = {"bench": "linear", "op": "8b qkv", "shape": "6144x4096", "rows": 5, "us": 12.5, "bytes": 50331648}
    gate = {
        "bench": "gate",
        "workload": "shipped",
        "k": 4,
        "ratio": 1.1,
        "batch": 1,
        "planted": 0.1,
        "verdict": "REGRESSION",
    }
    attend = {"bench": "attention", "op": "attend", "model": "8b", "batch": 1, "context": 1024, "queries": 6, "us": 8.0}
    old = {**step_row(0), "tok_s": 111.0, "commit": "0ld"}
    del old["case"]  # as rows had none once
    for name, rows in {
        "suite": [
            old,
            *(step_row(k) for k in (0, 2, 4)),
            trace_row(),
            {**step_row(0), "device": "cpu", "commit": "cpu"},
            {**step_row(0), "engine": "another engine"},
            {**step_row(4), "commit": "abc1234+dirty", "tok_s": 999.0},
        ],
        "kernels": [
            {**HERE, **kernel, "operations": 5 * kernel["bytes"], "share": 0.9},
            {**HERE, **attend},
            {**HERE, **attend, "shape": "8b, 1 x 1024", "rows": 6, "us": 7.0},
            {**HERE, **attend, "gpu": "H", "us": 9.0},
        ],
        "gate": [{**HERE, **gate}],
        "beside": [
            {**HERE, "bench": "cpu", "device": "cpu", "engine": "fastspec plain", "workload": "a model", **more}
            for more in ({"commit": "0ld", "over_plain": 0.5}, {"commit": "c0ffee", "over_plain": 1.25})
        ]
        + [{**HERE, "bench": "grpo", "device": "cpu", "gpu": None, "k": k, "rewards": [0.1, 0.3]} for k in (0, 4)],
    }.items():
        records.append(tmp_path / f"{name}.jsonl", rows)
    return [str(tmp_path / f"{name}.jsonl") for name in ("suite", "kernels", "gate", "missing")]


def run(tmp_path: Path, files: list[str]) -> tuple[Row, list[str]]:
    """Writes a report into documents that are there; the command's row, and their texts."""
    places = [tmp_path / "docs" / "page.md", tmp_path / "docs" / "results.md", tmp_path / "log.md"]
    named = [
        part for pair in zip(("--document", "--results", "--tables"), map(str, places), strict=True) for part in pair
    ]
    (row,) = cli.main(["report", "--rows", *files, "--cpu-rows", str(tmp_path / "beside.jsonl"), *named])
    return row, [path.read_text() for path in places]


@pytest.fixture
def documents(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("docs/page.md", "docs/results.md", "log.md"):
        (tmp_path / name).write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")


@pytest.mark.usefixtures("documents")
def test_tables_and_pictures_are_written_between_the_marks(tmp_path: Path, files: list[str]) -> None:
    for _ in range(2):  # a second time changes nothing
        row, texts = run(tmp_path, files)
        for text, tables in zip(texts, (1, 6, 1), strict=True):
            assert text.startswith("before\n")
            assert text.endswith("\nafter\n")
            assert "old\n" not in text
            assert text.count("### ") == tables
            assert "0ld" not in text  # a newer row of the same case came after it
            assert "| cpu |" not in text
    page, results, log = texts
    assert "| a model | 1.25 | c0ffee |" in results
    assert "6 pictures" in row["status"]
    assert "| 8b+1b, batch 1, prompt 128, greedy | fastspec k=4 | 4 | 8 |" in page
    assert "| 8b+1b, batch 1, prompt 128, greedy | fastspec k=4 | 4 | 8 |" in results
    assert "27 (3)" in results
    assert "found, as it must be" in results
    assert "REGRESSION" not in results
    assert "+dirty" not in page + results + log
    attends = [line.split("|") for line in log.splitlines() if line.startswith("| attend |")]
    of_one_gpu = [[cell.strip() for cell in (*line[2:5], line[-3])] for line in attends]
    # an older row had no shape of its own
    assert of_one_gpu == [["8b, 1 x 1024", "6", "7", "G"], ["8b, 1 x 1024", "6", "9", "H"]]
    pictures = sorted((tmp_path / "docs" / "figures").glob("*.png"))
    assert [path.stem for path in pictures] == [
        "gain_over_acceptance", "peers", "rewards", "roofline", "step", "tokens_over_k",
    ]  # fmt: skip
    assert "Rewards are equal, bit for bit. a CPU; abc1234." in page
    assert all(f"figures/{path.name}" in page and 5000 < path.stat().st_size < MOST_BYTES for path in pictures)


def test_the_same_rows_make_the_same_pictures(tmp_path: Path) -> None:
    for turn in ("1", "2"):
        plots.save("x", tmp_path / turn, plots.step_timeline(trace_row()))
    assert (tmp_path / "1" / "x.png").read_bytes() == (tmp_path / "2" / "x.png").read_bytes()


def test_without_rows_there_is_no_picture(tmp_path: Path) -> None:
    nothing = (
        plots.roofline([], []),
        plots.step_timeline({}),
        plots.rate_over_k([]),
        plots.gain_over_acceptance([]),
        plots.beside([]),
        plots.by_format([]),
        plots.rewards([]),
    )
    assert [plots.save("x", tmp_path, draw) for draw in nothing] == [None] * len(nothing)


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("acceptance", [0.3, 0.78, 1.0])
def test_acceptance_is_found_from_tokens_per_step(k: int, acceptance: float) -> None:
    assert plots.acceptance_of(tokens_per_step(acceptance, k), k) == pytest.approx(acceptance, abs=1e-6)


def test_a_document_without_marks_and_files_without_rows_are_named(tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ValueError, match=r"page\.md has no lines"):
        cli.main(["report", "--rows", *files, "--document", str(tmp_path / "page.md")])
    with pytest.raises(SystemExit, match="no rows of device cuda"):
        cli.main(["report", "--rows", str(tmp_path / "missing.jsonl"), "--document", str(tmp_path / "page.md")])


def test_the_documents_own_marks_and_pictures_are_there() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (report.DOCUMENT, report.RESULTS, report.TABLES)]
    assert all(text.count(BEGIN) == text.count(END) == 1 for text in texts)
    for path in (report.DOCUMENT.parent / "figures").glob("*.png"):
        assert f"figures/{path.name}" in texts[0]
        assert path.stat().st_size < MOST_BYTES


def test_pages_stay_short() -> None:
    for path in (report.DOCUMENT, report.RESULTS):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 250


def test_tables_show_no_changed_tree_and_no_regression() -> None:
    for path in (report.DOCUMENT, report.RESULTS, report.TABLES):
        text = path.read_text(encoding="utf-8")
        assert records.DIRTY not in text
        assert gate.REGRESSION not in text


def test_a_regression_needs_a_reason_or_a_later_row() -> None:
    row: Row = {"bench": "gate", "workload": "shipped", "batch": 1, "k": 0, "verdict": gate.REGRESSION, **HERE}
    with pytest.raises(ValueError, match="without a `why`"):
        report.gates([row])
    assert report.gates([{**row, "why": "a wider law"}])[0]["why"] == "a wider law"
    later = {**row, "verdict": gate.OK}
    assert report.gates([row, later]) == [later]
    with pytest.raises(ValueError, match="without a `why`"):
        report.gates([row, {**later, "k": 4}])


def test_rows_of_one_run_of_formats_are_drawn() -> None:
    rows = [
        {"bench": "quantised pair", "commit": "a", "tok_s": 2},
        {"bench": "quantised pair", "commit": "b", "tok_s": 1},
        {"bench": "quantised chain", "commit": "c", "ms": 1},
    ]
    assert report.newest_of_pairs(rows) == rows[1:2]
    assert report.newest_of_pairs([]) == []


def test_a_later_run_over_the_same_kinds_of_tasks_takes_the_place_of_an_earlier_one() -> None:
    def run(tasks: int, commit: str, kinds: tuple[str, ...], drafter: str, temperature: float = 0) -> list[Row]:
        base = {"bench": "tasks", "workload": f"M, {tasks} tasks, batch 1", "commit": commit}
        names = [("plain", 0), (drafter, 4)]
        each: list[Row] = [{"drafter": name, "k": k, "temperature": temperature} for name, k in names]
        return [{**base, **row, "kind": kind} for row in each for kind in ("all", *kinds)]

    rows = [
        *run(2, "a", ("chat", "copy"), "lookup"),
        *run(8, "b", ("chat", "copy"), "lookup"),
        *run(8, "c", ("chat", "copy"), "lookup", 0.8),
        *run(5, "d", ("quote",), "lookup"),
        *run(8, "e", ("chat", "copy"), "suffix"),
    ]
    shown = [(row["commit"], row["kinds"], row["drafter"]) for row in on_tasks.greedy(rows)]
    assert shown == [("b", "chat, copy", "lookup"), ("d", "quote", "lookup"), ("e", "chat, copy", "suffix")]


def test_a_timed_run_of_tasks_is_shown_whole_beside_its_own_plain_decoding() -> None:
    def run(commit: str, speeds: dict[str, float], temperature: float, tasks: int = 9) -> list[Row]:
        base = {"bench": "tasks", "workload": f"M, {tasks} tasks", "commit": commit, "temperature": temperature}
        return [
            {**base, "drafter": name, "k": 4, "kind": kind, "tok_s": speed}
            for name, speed in speeds.items()
            for kind in ("all", "chat")
        ]

    rows = [
        *run("a", {"plain": 10, "lookup": 15, "suffix": 14}, 0),
        *run("b", {"plain": 20, "lookup": 50}, 0),
        *run("a", {"plain": 10, "lookup": 12}, 0.8),
        *run("b", {"plain": 8, "lookup": 10}, 0, tasks=45),
    ]
    shown = [(row["commit"], row["temperature"], row["drafter"], row["over_plain"]) for row in on_tasks.timed(rows)]
    assert shown == [
        ("b", 0, "plain", 1.0), ("b", 0, "lookup", 2.5), ("a", 0.8, "plain", 1.0), ("a", 0.8, "lookup", 1.2),
        ("b", 0, "plain", 1.0), ("b", 0, "lookup", 1.25),
    ]  # fmt: skip
    more = on_tasks.timed([*rows, *run("b", {"plain": 9, "lookup": 9}, 0.8, tasks=45), *run("c", {"plain": 9}, 0, 2)])
    drawn = on_tasks.of_the_picture(more)
    assert {(row["workload"], row["temperature"]) for row in drawn} == {("M, 45 tasks", 0), ("M, 45 tasks", 0.8)}
    assert on_tasks.of_the_picture(on_tasks.timed(rows[:4])) == []


def test_a_cell_that_there_was_no_time_for_is_shown_until_it_is_measured() -> None:
    def row(engine: str | None, batch: int, over: float | None = None) -> Row:
        return {"bench": "auto", "acceptance": 0.5, "batch": batch, "engine": engine, "over_best": over}

    late = [row(None, 1), row(None, 8), row("auto", 1, 0.9), row("k=0", 1, 1.0), row("auto", 1, 0.97)]
    found = [(kept["engine"], kept["batch"], kept["over_best"]) for kept in report.grid([*late, step_row(2)])]
    assert found == [(None, 8, None), ("auto", 1, 0.97), ("k=0", 1, 1.0)]
