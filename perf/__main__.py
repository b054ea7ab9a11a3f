"""The command line, `python -m perf COMMAND`; `--help` lists the commands."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from perf import (
    anchors,
    arrivals,
    auto,
    bench,
    counted,
    cpu,
    drafters,
    first_calls,
    first_token,
    gate,
    large_batches,
    loading,
    lookup,
    perplexity,
    quantised,
    ranks,
    records,
    repeats,
    report,
    serving,
    startup,
    suite,
    tasks,
    training,
)
from perf.cases import SETS
from perf.experiment import say
from perf.models import add_pair_options
from perf.pairs import plant
from perf.records import Row
from perf.timing import read_ceiling
from perf.workloads import SHAPED, WORKLOADS, Bytes

COLUMNS = (
    "bench", "op", "case", "engine", "workload", "batch", "prompt", "new", "k", "ks", "calls", "sampled", "status",
    "expected_s", "ms_step", "ms_step_iqr", "tok_s", "tok_s_95", "tokens_per_pass", "ms_token", "floor_ms",
    "step_over_floor", "acceptance", "first_ms", "prefill_ms", "speed_up", "speed_up_95", "text_equal",
    "start_up_s", "start_up_warm_s", "warm_up_s", "planned_mib", "peak_mib", "used_mib",
    "draft_ms", "steps", "trace", "read_by", "graph_per_step", "launch_per_step", "sync_per_step", "copy_per_step",
    "gpu_copies_per_step", "graph_kernels", "step_us", "draft_first_us", "draft_pass_us", "draft_pass_share",
    "score_us", "score_share", "verify_us", "commit_us", "idle_within_us", "idle_between_us",
    "shape", "rows", "us", "us_iqr", "bytes", "share", "gb_s", "agreement", "noise", "spread",
    "kernels", "part", "seconds", "gib_on_disk", "write_s", "target_parameters", "draft_parameters",
    "base_ms", "candidate_ms", "base_over_floor", "candidate_over_floor", "ratio", "limit", "base_tokens_per_pass",
    "candidate_tokens_per_pass", "tokens_ratio", "verdict",
)  # fmt: skip
PEERS = "of plain, static, assisted (transformers), vllm, sglang; or transformers, or all"
Rows = Iterator[list[Row]]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _words(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    part = int(index), int(count)
    if not 1 <= part[0] <= part[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted i/n with 1 <= i <= n")
    return part


def parser() -> argparse.ArgumentParser:
    """Commands and their options."""
    top = argparse.ArgumentParser(prog="python -m perf", description="Measures fastspec and its peers.")
    made = top.add_subparsers(dest="command", required=True)

    def command(function: Callable[[argparse.Namespace], Rows]) -> argparse.ArgumentParser:
        name = function.__name__.removeprefix("command_")
        one = made.add_parser(name, help=function.__doc__, description=function.__doc__)
        one.add_argument("--out", help="append rows to this file of JSON lines; a bare name lies in perf/results")
        one.add_argument("--commit", help="of the code measured, where its checkout is not at hand")
        one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        one.set_defaults(function=function, recorded=True, columns=COLUMNS, last_words=None)
        return one

    _add_run_options(command(suite.command_run))
    one = command(suite.command_peers)
    one.add_argument("--peers", "--engines", type=_words, default=("all",), help=PEERS)
    _add_case_options(one, "8b+1b")
    _add_case_options(command(suite.command_phases), "8b+1b")
    one = command(suite.command_nsys)
    _add_case_options(one, "shipped")
    one.add_argument("--read", type=Path, help="an SQLite export to read instead of profiling")
    one.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    auto.add_options(command(auto.command_auto))
    quantised.add_options(command(quantised.command_quantised))
    drafters.add_options(command(drafters.command_drafters))
    repeats.add_options(command(repeats.command_repeats))
    tasks.add_options(command(tasks.command_tasks))
    training.add_options(command(training.command_training))
    counted.add_options(command(counted.command_modes), "modes", counted.MODES_COLUMNS)
    counted.add_options(command(counted.command_formats), "formats", counted.FORMATS_COLUMNS)
    serving.add_serving_options(command(serving.command_serving))
    serving.add_servers_options(command(serving.command_servers))
    anchors.add_options(command(anchors.command_anchors))
    first_token.add_options(command(first_token.command_prompts))
    large_batches.add_options(command(large_batches.command_large_batches))
    arrivals.add_options(command(arrivals.command_arrivals))
    cpu.add_options(command(cpu.command_cpu))
    startup.add_options(command(startup.command_startup))
    ranks.add_options(command(ranks.command_ranks))
    first_calls.add_options(command(first_calls.command_first_calls))
    loading.add_options(command(loading.command_loading))
    lookup.add_options(command(lookup.command_lookup))
    perplexity.add_options(command(perplexity.command_perplexity))
    one = command(command_kernels)
    one.add_argument("--only", type=_words, default=(), help="names of benches")
    one.add_argument("--quick", action="store_true", help="smallest sizes")
    one = command(command_pair)
    one.add_argument("--workload", choices=SHAPED, default="8b+1b")
    one.add_argument("--acceptance", type=float, default=0.78)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--to", type=Path, required=True, help="directory that gets target/ and draft/")
    command(command_ceiling)
    gate.add_options(command(gate.command_gate))
    report.add_options(command(report.command_report))
    return top


def _add_run_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--cases", choices=sorted(SETS), default="core", help="set of cases, if no models are named")
    made.add_argument("--only", default="", help="cases whose name holds this")
    made.add_argument("--part", type=_part, default=(1, 1), help="i/n: the i-th of n parts of the cases")
    made.add_argument("--list", action="store_true", help="say what would be measured, and how long that may take")
    made.add_argument("--again", action="store_true", help="also cases that this commit has rows of on such a machine")
    made.add_argument("--within", type=float, help="seconds: leave out cases that are not expected to end in time")
    made.add_argument("--peers", type=_words, default=(), help=PEERS)
    _add_case_options(made, None)


def _add_case_options(made: argparse.ArgumentParser, workload: str | None) -> None:
    add_pair_options(made, workload)
    made.add_argument("--batch", type=int, default=1, help="prompts at once")
    made.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    made.add_argument("--new", type=int, default=256, help="new tokens a prompt")
    made.add_argument("--max-length", type=int, help="of the generator; default: the room of prompts and new tokens")
    made.add_argument("--prompts", type=int, default=8, help="prompts in all, cut into batches")
    made.add_argument("--k", type=_numbers, default=(0, 4), help="drafts per step, such as 0,4,5")
    made.add_argument("--sampled", action="store_true", help="temperature 1, whole vocabulary; else greedy")
    made.add_argument("--traced", type=_numbers, default=(), help="values of k whose steps are traced as well")
    made.add_argument("--restart", action="store_true", help="make the generator twice: starting up cold, and warm")


def command_kernels(given: argparse.Namespace) -> Rows:
    """The benches of single operations."""
    for row in bench.run_benches(given.only, device=torch.device(given.device), quick=given.quick, say=say):
        yield [row]


def command_pair(given: argparse.Namespace) -> Rows:
    """Writes a planted pair to disk; the row has its size and the time that this took."""
    workload = WORKLOADS[given.workload]
    pair = plant(workload, acceptance=given.acceptance, seed=given.seed, device=given.device)
    start = time.perf_counter()
    pair.save(given.to)
    took = round(time.perf_counter() - start, 1)
    row: Row = {"workload": workload.name, "status": "ok", **pair.report, "write_s": took}
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        row[f"{role}_parameters"] = sum(parameter.numel() for parameter in model.parameters())
        row[f"{role}_pass_bytes"] = Bytes.of(model.config, workload.dtype).weights
    yield [row]


def command_ceiling(given: argparse.Namespace) -> Rows:
    """The rate at which this machine reads memory."""
    yield [{"op": "read", "status": "ok", "gb_s": round(read_ceiling(device=given.device), 1)}]


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Runs one command; returns the rows it printed. Rows are written as they come: a run cut off keeps them."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    given = parser().parse_args(line)
    given.line = line
    all_rows: list[Row] = []
    for rows in given.function(given):
        if given.recorded and not getattr(given, "list", False):
            here = records.environment(given.device, given.commit)
            rows = [{**row, **here} for row in rows]
            if out := _out(given):
                records.append(out, rows)
        all_rows += rows
    if all_rows:
        print(records.table(all_rows, given.columns))
        if given.last_words:
            print("\n".join(given.last_words(all_rows)))
    return all_rows


def _out(given: argparse.Namespace) -> str | None:
    """The file for rows: a set of cases is always recorded, so that it can be taken up again."""
    named: str | None = given.out
    of_a_set = given.command == "run" and not given.workload and not given.target
    return named or (suite.FILE if of_a_set else None)


def exit_code(rows: Sequence[Row]) -> int:
    """1 if a gate's verdict is bad, steps wait or launch too much, or a case gave no rows; peers may fail."""
    failed = [row for row in rows if str(row.get("status", "")).startswith("failed")]
    invalid = any(row.get("bench") == "trace" or ("case" in row and "engine" not in row) for row in failed)
    return int(invalid or any(row.get("verdict") in (gate.REGRESSION, gate.UNDECIDED) for row in rows))


if __name__ == "__main__":
    sys.exit(exit_code(main()))
