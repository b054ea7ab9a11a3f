"""Tables and pictures of what was measured, each written between two marks of a document.

docs/performance.md gets the pictures and one short table, docs/results.md the tables of whole calls and steps, and
perf/LOG.md the long ones. Without a file the report takes the newest row of every case and engine from perf/results;
with one it prints that file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from perf import plots, records
from perf.cases import ACCEPTED, Case
from perf.records import ROOT, Row

DOCUMENT, RESULTS, LOG = ROOT / "docs" / "performance.md", ROOT / "docs" / "results.md", ROOT / "perf" / "LOG.md"
BEGIN, END = "<!-- written by `python -m perf report` -->", "<!-- end of what it writes -->"
FILES = ("peers", "e2e", "suite", "kernels", "gate", "auto")
OURS = "fastspec"
PEERS_CASE, PEERS_K = f"{plots.MAIN}, batch 1, prompt 128, greedy", 4  # the one picture of the README

Column = tuple[str, str]  # key of a row, heading
STEPS: tuple[Column, ...] = (
    ("case", "case"), ("engine", "engine"), ("k", "k"), ("ms_step", "ms/step"), ("ms_step_iqr", "spread"),
    ("floor_ms", "floor"), ("step_over_floor", "step/floor"), ("tok_s", "tok/s"), ("tok_s_95", "95% interval"),
    ("tokens_per_pass", "tokens/pass"), ("ms_token", "ms/token"), ("first_ms", "first token, ms"),
    ("prefill_ms", "prefill, ms"), ("speed_up", "speed-up"), ("commit", "commit"),
)  # fmt: skip
BRIEF: tuple[Column, ...] = tuple(
    column
    for column in STEPS
    if column[0]
    in ("case", "engine", "k", "tok_s", "tokens_per_pass", "ms_step", "step_over_floor", "speed_up", "commit")
)
START: tuple[Column, ...] = (
    ("case", "case"), ("start_up_s", "first start, s"), ("start_up_warm_s", "second, s"),
    ("warm_up_s", "first calls, s"), ("planned_mib", "planned, MiB"), ("peak_mib", "peak, MiB"),
    ("used_mib", "kept, MiB"),
)  # fmt: skip
INSIDE: tuple[Column, ...] = (
    ("case", "case"), ("k", "k"), ("step_us", "step"), ("draft_first_us", "first draft pass"),
    ("draft_pass_us", "draft pass"), ("draft_pass_share", "of ceiling"), ("score_us", "score"),
    ("score_share", "of ceiling"), ("verify_us", "verify"), ("commit_us", "commit"), ("idle_within_us", "idle within"),
    ("idle_between_us", "idle between"), ("graph_kernels", "kernels"), ("graph_per_step", "graph launches"),
    ("launch_per_step", "other launches"), ("sync_per_step", "syncs"), ("read_by", "read by"),
)  # fmt: skip
KINDS: tuple[Column, ...] = (("case", "case"), ("k", "k"), *((kind, kind) for kind in plots.OF_KIND))
KERNELS: tuple[Column, ...] = (
    ("op", "kernel"), ("shape", "shape"), ("rows", "rows"), ("us", "µs"), ("us_iqr", "spread"), ("bytes", "bytes"),
    ("share", "of ceiling"), ("torch_us", "torch, µs"), ("gpu", "GPU"), ("commit", "commit"),
)  # fmt: skip
GATE: tuple[Column, ...] = (
    ("date", "date"), ("workload", "workload"), ("k", "k"), ("planted", "planted"), ("base_over_floor", "base/floor"),
    ("candidate_over_floor", "candidate/floor"), ("ratio", "ratio"), ("spread", "spread"), ("limit", "limit"),
    ("tokens_ratio", "tokens/pass ratio"), ("verdict", "verdict"), ("commit", "commit"),
)  # fmt: skip
AUTO: tuple[Column, ...] = (
    ("acceptance", "acceptance"), ("batch", "batch"), ("engine", "drafts a step"), ("tok_s", "tok/s"),
    ("tokens_per_step", "tokens/step"), ("over_plain", "over plain"), ("over_best", "over the best"), ("best", "best"),
    ("commit", "commit"),
)  # fmt: skip


def case_name(row: Row) -> str:
    """Of rows that were written before cases had names, too."""
    if "case" in row:
        return str(row["case"])
    wanted = (row.get("pair") or {}).get("acceptance_wanted", ACCEPTED)
    shape = (row["workload"], row["batch"], row["prompt"], row["new"], (row["k"],))
    return Case(*shape, sampled=row["sampled"], acceptance=wanted).name


def gathered(files: Sequence[str], device: str) -> list[Row]:
    """Rows of that device from all files that are there, oldest first."""
    there = [name for name in files if records.place(name).is_file()]
    return [
        {"file": Path(name).stem, **row} for name in there for row in records.read(name) if row.get("device") == device
    ]


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row of every case, engine and k that has figures, cases in order of their first row."""
    latest: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        if row.get("engine") and row.get("workload") and row.get("ms_step") and row.get("bench") != "trace":
            latest[case_name(row), row["engine"], row["k"]] = {**row, "case": case_name(row)}
    cases = list(dict.fromkeys(case for case, _, _ in latest))
    ours_first = sorted(latest, key=lambda key: (cases.index(key[0]), not key[1].startswith(OURS)))
    return [latest[key] for key in ours_first]


def traces(rows: Sequence[Row]) -> list[Row]:
    """The last trace of every case and k."""
    latest = {(case_name(row), row["k"]): row for row in rows if row.get("bench") == "trace" and row.get("step_us")}
    return list(latest.values())


def grid(rows: Sequence[Row]) -> list[Row]:
    """The last row of every way in every cell of the grid; what there was no time for only where no row came later."""
    auto = [row for row in rows if row.get("bench") == "auto"]
    latest = {(row["acceptance"], row["batch"], row.get("engine")): row for row in auto}
    done = {(acceptance, batch) for acceptance, batch, engine in latest if engine}
    return [row for (acceptance, batch, engine), row in latest.items() if engine or (acceptance, batch) not in done]


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A table; columns that no row has are left out."""
    shown = [column for column in columns if any(row.get(column[0]) is not None for row in rows)]
    lines = [[heading for _, heading in shown], ["---"] * len(shown)]
    lines += [[records.cell(row.get(key)) for key, _ in shown] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_kind(traced: Sequence[Row]) -> list[Row]:
    """Rows with the microseconds of each kind of kernel in a step, and how many there are."""
    return [
        {"case": row["case"], "k": row["k"]}
        | {kind: f"{took:.4g} ({row['kind_kernels'].get(kind, 0)})" for kind, took in row["kind_us"].items()}
        for row in traced
        if row.get("kind_us")
    ]


def _shaped(row: Row) -> Row:
    """A row of a kernel, with the shape and the rows that those of attention had none of once."""
    if "context" not in row:
        return row
    return {"shape": f"{row['model']}, {row['batch']} x {row['context']}", "rows": row["queries"], **row}


def brief(rows: Sequence[Row]) -> list[str]:
    """The short table: whole calls of the main pair, the guarantee of bits on."""
    ended = [row for row in newest(rows) if row["workload"] == plots.MAIN and "exact=False" not in row["engine"]]
    return tables(("Whole calls of the main pair", ended, BRIEF))


def sections(rows: Sequence[Row]) -> list[str]:
    """Headings and tables of whole calls, of steps, and of the gate."""
    ended = newest(rows)
    started = [
        row for row in ended if row.get("start_up_s") and row["engine"] == "fastspec plain" and row.get("planned_mib")
    ]
    return tables(
        ("Steps and whole calls", ended, STEPS),
        ("Inside a step, microseconds", traces(rows), INSIDE),
        ("Kernels of a step by kind, microseconds together (and how many)", by_kind(traces(rows)), KINDS),
        ("Starting up, and memory", started, START),
        ("The gate", [row for row in rows if row.get("bench") == "gate"], GATE),
    )


def long_sections(rows: Sequence[Row]) -> list[str]:
    """Headings and tables of what has many rows: single kernels, and the grid of k chosen while decoding."""
    kernels = [_shaped(row) for row in rows if row.get("file") == "kernels" and row.get("us")]
    of = ("op", "shape", "rows", "gpu")
    last_kernels = list({tuple(row.get(key) for key in of): row for row in kernels}.values())
    return tables(
        ("Single kernels", last_kernels, KERNELS),
        ("k chosen while decoding, against fixed ones", grid(rows), AUTO),
    )


def tables(*parts: tuple[str, Sequence[Row], Sequence[Column]]) -> list[str]:
    """A heading and a table for every part that has rows."""
    return [f"### {heading}\n\n{markdown(rows, columns)}" for heading, rows, columns in parts if rows]


def _with_peers(rows: Sequence[Row]) -> list[Row]:
    """The case that peers have rows of: ours plain and with as many drafts as they had, and theirs."""
    last = [row for row in newest(rows) if row["case"] == PEERS_CASE and row.get("tok_s")]
    ks = {0, PEERS_K}
    wanted = [row for row in last if row["k"] in ks and "exact=False" not in row["engine"]]
    return wanted if any(not row["engine"].startswith(OURS) for row in wanted) else []


def pictures(rows: Sequence[Row], folder: Path) -> list[tuple[str, Path]]:
    """Draws what there are rows for; what each shows, and its file."""
    rows = [row for row in rows if not row.get("max_length")]  # other room is told apart in the tables alone
    ended = [row for row in newest(rows) if row["engine"].startswith(OURS)]
    exact = [row for row in ended if "exact=False" not in row["engine"]]
    usual = [row for row in exact if not row["sampled"] and row["prompt"] == 128]
    main = [
        row
        for row in ended
        if (row["workload"], row["batch"], row["prompt"], row["sampled"]) == (plots.MAIN, 1, 128, False)
    ]
    steps = [row for row in traces(rows) if row["k"]] or traces(rows)
    kernels = [row for row in rows if row.get("file") == "kernels"]
    drawn = [
        (
            "Operations per second over operations per byte",
            plots.save("roofline", folder, plots.roofline(kernels, exact)),
        ),
        (
            "Tokens per second over drafts per step",
            plots.save(
                "tokens_over_k", folder, plots.rate_over_k([row for row in usual if "acceptance" not in row["case"]])
            ),
        ),
        ("Tokens per second beside other engines", plots.save("peers", folder, plots.beside(_with_peers(rows)))),
        ("Speed-up over acceptance", plots.save("gain_over_acceptance", folder, plots.gain_over_acceptance(main))),
    ]
    if steps:
        drawn.insert(1, ("One step, kernel by kernel", plots.save("step", folder, plots.step_timeline(steps[0]))))
    return [(words, path) for words, path in drawn if path is not None]


def machines(rows: Sequence[Row]) -> str:
    """A sentence: what the rows were measured on."""
    named = sorted({f"{row.get('gpu') or 'a CPU'}, torch {row['torch']}, triton {row['triton']}" for row in rows})
    return f"Newest rows of every case, from {'; '.join(named)}. Each row has its commit, clocks and date."


def shown(images: Sequence[tuple[str, Path]], document: Path) -> list[str]:
    """The pictures of that document, as Markdown."""
    return [f"![{words}]({path.relative_to(document.parent).as_posix()})" for words, path in images]


def written(document: Path, text: str) -> None:
    """Puts the text between the marks.

    Raises:
        ValueError: the document has no such marks.
    """
    old = document.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document.name} has no lines {BEGIN} and {END} to write between")
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def command_report(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Writes tables and pictures of the rows into docs/ and perf/LOG.md; or prints a file of rows."""
    if given.file:
        yield records.read(given.file)
        return
    rows = gathered(given.rows, given.device)
    if not rows:
        raise SystemExit(f"no rows of device {given.device} in {', '.join(given.rows)}")
    images = pictures(rows, given.document.parent / "figures")
    for document, parts in (
        (given.document, [*shown(images, given.document), *brief(rows)]),
        (given.results, sections(rows)),
        (given.log, long_sections(rows)),
    ):
        written(document, "\n\n".join([machines(rows), *parts]))
    yield [{"op": "report", "status": f"{len(rows)} rows, {len(images)} pictures"}]


def add_options(made: argparse.ArgumentParser) -> None:
    """The command's options."""
    made.set_defaults(recorded=False, device="cuda")
    made.add_argument("file", nargs="?", help="name or path of a file of rows to print; nothing is written then")
    made.add_argument("--rows", nargs="+", default=FILES, help="names or paths of the files that the report is made of")
    made.add_argument("--document", type=Path, default=DOCUMENT, help="gets the pictures and the short table")
    made.add_argument("--results", type=Path, default=RESULTS, help="gets the tables of calls and steps")
    made.add_argument("--log", type=Path, default=LOG, help="gets the long tables")
