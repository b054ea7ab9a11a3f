"""Tables and pictures of rows, each written between two marks of a document.

docs/performance.md gets the pictures and one short table, docs/results.md the tables of whole calls and steps, and
perf/TABLES.md the long ones. The report takes the newest row of every case and engine from perf/results. Rows of a
tree with changed files are left out. With a file as argument it prints that file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perf import anatomy, gate, on_cpu, on_tasks, records
from perf.cases import Case
from perf.records import DIRTY, ROOT, Row
from perf.workloads import ACCEPTED

DOCUMENT, RESULTS, TABLES = ROOT / "docs" / "performance.md", ROOT / "docs" / "results.md", ROOT / "perf" / "TABLES.md"
BEGIN, END = "<!-- written by `python -m perf report` -->", "<!-- end of what it writes -->"
FILES = ("peers", "e2e", "suite", "kernels", "gate", "auto", "quantised", "tasks")
OURS = "fastspec"
MAIN = "8b+1b"  # the workload of the pictures that show one
PEERS_CASE, PEERS_K = f"{MAIN}, batch 1, prompt 128, greedy", 4  # the one picture of the README
BRIEF_KS = (0, 2, 4)

Column = tuple[str, str]  # key of a row, heading
STEPS: tuple[Column, ...] = (
    ("case", "case"), ("engine", "engine"), ("k", "k"), ("ms_step", "ms/step"), ("ms_step_iqr", "spread"),
    ("floor_ms", "floor"), ("step_over_floor", "step/floor"), ("tok_s", "tok/s"), ("tok_s_95", "95% interval"),
    ("tokens_per_pass", "tokens/pass"), ("ms_token", "ms/token"), ("first_ms", "first token, ms"),
    ("prefill_ms", "prefill, ms"), ("speed_up", "speed-up"), ("card", "GPU"),
    ("read_gb_s", "reads, GB/s"), ("commit", "commit"),
)  # fmt: skip
BRIEF: tuple[Column, ...] = tuple(
    column
    for column in STEPS
    if column[0]
    in ("case", "engine", "k", "tok_s", "tokens_per_pass", "ms_step", "step_over_floor", "speed_up", "card", "commit")
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
KINDS: tuple[Column, ...] = (("case", "case"), ("k", "k"), *((kind, kind) for kind in anatomy.SHOWN))
KERNELS: tuple[Column, ...] = (
    ("op", "kernel"), ("shape", "shape"), ("rows", "rows"), ("us", "µs"), ("us_iqr", "spread"), ("bytes", "bytes"),
    ("share", "of ceiling"), ("torch_us", "torch, µs"), ("card", "GPU"), ("commit", "commit"),
)  # fmt: skip
GATE: tuple[Column, ...] = (
    ("date", "date"), ("workload", "workload"), ("k", "k"), ("planted", "planted"), ("base_over_floor", "base/floor"),
    ("candidate_over_floor", "candidate/floor"), ("ratio", "ratio"), ("spread", "spread"), ("limit", "limit"),
    ("tokens_ratio", "tokens/pass ratio"), ("verdict", "verdict"), ("why", "why"), ("card", "GPU"),
    ("commit", "commit"),
)  # fmt: skip
AUTO: tuple[Column, ...] = (
    ("acceptance", "acceptance"), ("batch", "batch"), ("engine", "drafts a step"), ("tok_s", "tok/s"),
    ("tokens_per_step", "tokens/step"), ("over_plain", "over plain"), ("over_best", "over the best"), ("best", "best"),
    ("commit", "commit"),
)  # fmt: skip


def case_name(row: Row) -> str:
    """The name of a row's case; made from its columns if the row is older than names of cases."""
    if "case" in row:
        return str(row["case"])
    wanted = (row.get("pair") or {}).get("acceptance_wanted", ACCEPTED)
    shape = (row["workload"], row["batch"], row["prompt"], row["new"], (row["k"],))
    return Case(*shape, sampled=row["sampled"], acceptance=wanted).name


def gathered(files: Sequence[str], device: str) -> list[Row]:
    """Rows of that device and of unchanged trees from all files that exist, oldest first."""
    there = [name for name in files if records.place(name).is_file()]
    return [
        {"file": Path(name).stem, "card": str(row.get("gpu")).removeprefix("NVIDIA ").partition(" ")[0], **row}
        for name in there
        for row in records.read(name)
        if row.get("device") == device and not str(row["commit"]).endswith(DIRTY)
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
    """The last row of every arm in every cell of the grid; "no time" only if no row came later."""
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
    """A row of a kernel; older rows of attention get a shape and a number of rows."""
    if "context" not in row:
        return row
    return {"shape": f"{row['model']}, {row['batch']} x {row['context']}", "rows": row["queries"], **row}


def gates(rows: Sequence[Row]) -> list[Row]:
    """The last gate row of every workload, batch, k and planted delay.

    A delay that was planted must be found, so its verdict is put in other words.

    Raises:
        ValueError: the last row is a regression, and no column `why` explains it.
    """
    keys = ("workload", "batch", "k", "planted")
    latest = {tuple(row.get(key) for key in keys): row for row in rows if row.get("bench") == "gate"}
    found = []
    for row in latest.values():
        if row["verdict"] == gate.REGRESSION and row.get("planted"):
            found.append({**row, "verdict": "found, as it must be"})
            continue
        if row["verdict"] == gate.REGRESSION and not row.get("why"):
            raise ValueError(
                f"{row['workload']}, k = {row['k']}: a {gate.REGRESSION} without a `why`; measure it again"
            )
        found.append(row)
    return found


def brief(rows: Sequence[Row]) -> list[str]:
    """The short table: whole calls of the main pair, the guarantee of bits on."""
    ended = [row for row in newest(rows) if row["workload"] == MAIN and "exact=False" not in row["engine"]]
    ended = [row for row in ended if row["k"] in BRIEF_KS and not row.get("max_length")]
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
        ("The gate", gates(rows), GATE),
    )


def long_sections(rows: Sequence[Row]) -> list[str]:
    """Headings and tables of single kernels, of the grid of k chosen while decoding, and of drafters on tasks."""
    kernels = [_shaped(row) for row in rows if row.get("file") == "kernels" and row.get("us")]
    of = ("op", "shape", "rows", "gpu")
    last_kernels = list({tuple(row.get(key) for key in of): row for row in kernels}.values())
    return tables(
        ("Single kernels", last_kernels, KERNELS),
        ("k chosen while decoding, against fixed ones", grid(rows), AUTO),
        ("Drafters on tasks, with a real model", on_tasks.timed(rows), on_tasks.TIMED),
    )


def tables(*parts: tuple[str, Sequence[Row], Sequence[Column]]) -> list[str]:
    """A heading and a table for every part that has rows."""
    return [f"### {heading}\n\n{markdown(rows, columns)}" for heading, rows, columns in parts if rows]


def _with_peers(rows: Sequence[Row]) -> list[Row]:
    """Rows of the case that peers have rows of: theirs, ours plain, and ours with as many drafts."""
    last = [row for row in newest(rows) if row["case"] == PEERS_CASE and row.get("tok_s")]
    ks = {0, PEERS_K}
    wanted = [row for row in last if row["k"] in ks and "exact=False" not in row["engine"]]
    return wanted if any(not row["engine"].startswith(OURS) for row in wanted) else []


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of rows: its title, the sentence under it, and its file."""

    title: str
    caption: str
    path: Path

    def markdown(self, document: Path) -> str:
        """The picture in that document."""
        return f"![{self.title}]({self.path.relative_to(document.parent).as_posix()})\n\n*{self.caption}*"


def source(rows: Sequence[Row]) -> str:
    """A sentence: GPUs and commits of the rows."""
    cards = sorted({str(row.get("gpu") or "a CPU").removesuffix(" 80GB HBM3") for row in rows})
    commits = list(dict.fromkeys(str(row["commit"]) for row in rows))
    named = ", ".join(commits) if len(commits) < 5 else f"{len(commits)} commits, named in the tables"
    return f"{' and '.join(cards)}; {named}."


def pictures(rows: Sequence[Row], folder: Path, on_a_cpu: Sequence[Row] = ()) -> list[Picture]:
    """Draws every picture that there are rows for, of a GPU and of a CPU."""
    try:
        from perf import plots  # matplotlib is needed here alone
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise SystemExit("the report draws its pictures with matplotlib: pip install matplotlib") from None

    rows = [row for row in rows if not row.get("max_length")]  # only tables tell other room apart
    ended = [row for row in newest(rows) if row["engine"].startswith(OURS)]
    exact = [row for row in ended if "exact=False" not in row["engine"]]
    usual = [row for row in exact if not row["sampled"] and row["prompt"] == 128 and "acceptance" not in row["case"]]
    key = ("workload", "batch", "prompt", "sampled")
    main = [row for row in ended if tuple(row[name] for name in key) == (MAIN, 1, 128, False)]
    steps = ([row for row in traces(rows) if row["k"]] or traces(rows))[:1]
    kernels = [row for row in rows if row.get("file") == "kernels" and row.get("operations")]
    with_peers, weights = _with_peers(rows), newest_of_pairs(rows)
    drafters = on_tasks.of_the_picture(on_tasks.timed(rows))
    trained = on_tasks.newest(on_a_cpu, "grpo", "case", "k")
    drawn = (
        ("roofline", "Operations per second over operations per byte", plots.roofline(kernels, exact), exact,
         "Triangles are single products, circles whole steps. The line is the measured read rate, then the peak that "
         "NVIDIA states."),
        ("step", "One step, kernel by kernel", plots.step_timeline(steps[0] if steps else {}), steps,
         "A line is a pass of the model, a bar a kernel. Draft passes come first, then the target's scoring pass."),
        ("tokens_over_k", "Tokens per second over drafts per step", plots.rate_over_k(usual), usual,
         "Greedy, prompts of 128 tokens. Bars are 95% intervals over prompts."),
        ("tasks", "Tokens per second of a real model by drafter", plots.of_drafters(drafters), drafters,
         "Real text, one prompt at a time, at most four drafts a step. Numbers are tokens per step, thin bars 95% "
         "intervals over tasks."),
        ("peers", "Tokens per second beside other engines", plots.beside(with_peers), with_peers,
         "The same weights and prompts, one prompt at a time. Measured on different days."),
        ("gain_over_acceptance", "Speed-up over acceptance", plots.gain_over_acceptance(main), main,
         "Lines are computed from measured steps for any acceptance; points are whole measured calls."),
        ("formats", "Tokens per second by format of the weights", plots.by_format(weights), weights,
         "One run. Long bars are the best k, short bars plain decoding of the same target."),
        ("rewards", "Rewards of a training with and without drafts", plots.rewards(trained), trained,
         "TRL's GRPOTrainer on the shipped pair's target. Rewards are equal, bit for bit."),
    )  # fmt: skip
    saved = [(title, f"{words} {source(of)}", plots.save(name, folder, draw)) for name, title, draw, of, words in drawn]
    return [Picture(title, caption, path) for title, caption, path in saved if path is not None]


def newest_of_pairs(rows: Sequence[Row]) -> list[Row]:
    """Rows of a pair by format, of the run that was recorded last: figures of two runs do not compare."""
    pairs = [row for row in rows if row.get("bench") == "quantised pair"]
    return [row for row in pairs if row["commit"] == pairs[-1]["commit"]]


def machines(rows: Sequence[Row]) -> str:
    """A sentence: GPUs and versions of the rows."""
    named = sorted({f"{row.get('gpu') or 'a CPU'}, torch {row['torch']}, triton {row['triton']}" for row in rows})
    return f"Newest rows of every case, from {'; '.join(named)}. Each row has its commit, clocks and date."


def written(document: Path, text: str) -> None:
    """Writes the text between the marks.

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
    """Writes tables and pictures of the rows into docs/ and perf/TABLES.md; or prints a file of rows."""
    if given.file:
        yield records.read(given.file)
        return
    rows = gathered(given.rows, given.device)
    if not rows:
        raise SystemExit(f"no rows of device {given.device} in {', '.join(given.rows)}")
    cpu_rows = gathered(given.cpu_rows, "cpu")
    images = pictures(rows, given.document.parent / "figures", cpu_rows)
    for document, parts in (
        (given.document, [*(image.markdown(given.document) for image in images), *brief(rows)]),
        (given.results, [*sections(rows), *tables(*on_cpu.parts(cpu_rows))]),
        (given.tables, long_sections(rows)),
    ):
        written(document, "\n\n".join([machines(rows), *parts]))
    yield [{"op": "report", "status": f"{len(rows)} rows, {len(images)} pictures"}]


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf report`."""
    made.set_defaults(recorded=False, device="cuda")
    made.add_argument("file", nargs="?", help="name or path of a file of rows to print; nothing is written then")
    made.add_argument("--rows", nargs="+", default=FILES, help="names or paths of the files that the report is made of")
    made.add_argument("--cpu-rows", nargs="+", default=on_cpu.FILES, help="those of rows that a CPU gave")
    made.add_argument("--document", type=Path, default=DOCUMENT, help="gets the pictures and the short table")
    made.add_argument("--results", type=Path, default=RESULTS, help="gets the tables of calls and steps")
    made.add_argument("--tables", type=Path, default=TABLES, help="gets the long tables")
