"""What each command of `python -m perf` does: given its options, it yields lists of rows as they come."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from perf import anatomy, bench, cases, nsys, phases, records, suite
from perf.cases import Case
from perf.e2e import Run, generator_of
from perf.pairs import plant
from perf.records import Row
from perf.timing import read_ceiling
from perf.workload_models import Models, open_models
from perf.workloads import WORKLOADS, Bytes

Rows = Iterator[list[Row]]
SUITE = "suite"  # where rows of the cases lie, unless --out says otherwise


def say(line: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def case_of(given: argparse.Namespace) -> Case:
    """The one case that the options describe."""
    calls = max(1, given.prompts // given.batch)
    return Case(
        given.workload,
        given.batch,
        given.prompt,
        given.new,
        given.k,
        sampled=given.sampled,
        calls=calls,
        traced=tuple(given.traced),
        restart=given.restart,
        peers=True,
        acceptance=given.acceptance,
        max_length=given.max_length,
    )


def engines_of(given: argparse.Namespace) -> tuple[str, ...]:
    """The peers asked for, "all" and "transformers" spelt out."""
    groups = {"all": (*suite.OWN, "vllm", "sglang"), "transformers": ("plain", "static", "assisted")}
    return tuple(dict.fromkeys(name for asked in given.peers for name in groups.get(asked, (asked,))))


def chosen_cases(given: argparse.Namespace) -> list[Case]:
    """The case that the options describe, or those of the set that are not recorded yet, of this part."""
    if given.workload:
        return [case_of(given)]
    picked = [case for case in cases.SETS[given.cases] if given.only in case.name]
    mine = cases.part_of(picked, given.part)
    if given.again or given.list:
        return mine
    file = records.place(given.out or SUITE)
    left = cases.pending(
        mine, records.read(file) if file.is_file() else [], records.environment(given.device, given.commit)
    )
    if len(left) < len(mine):
        say(f"{len(mine) - len(left)} of {len(mine)} cases are recorded already; --again measures them once more")
    return left


def command_run(given: argparse.Namespace) -> Rows:
    """Our generator on a set of cases, or on one that the options describe; and peers when asked for."""
    chosen = chosen_cases(given)
    if given.list:
        yield cases.listed(chosen)
        return
    if not chosen:
        return
    expected = cases.seconds(chosen)
    say(
        f"{len(chosen)} cases, on a large GPU expected to take {expected:.0f} s"
        + ("" if expected < cases.PART_SECONDS else ": share them out with --part")
    )
    ceiling = read_ceiling(device=given.device)
    say(f"read ceiling {ceiling:.0f} GB/s")
    yield from suite.measured(
        chosen,
        device=given.device,
        ceiling=ceiling,
        engines=engines_of(given),
        seed=given.seed,
        within=given.within,
        say=say,
    )


@contextmanager
def one_pair(given: argparse.Namespace, *, save: bool = False) -> Iterator[tuple[Case, Models, Run]]:
    """The case that the options describe, its models, and what is run on them."""
    case = case_of(given)
    options = {"acceptance": given.acceptance, "seed": given.seed, "device": given.device}
    with open_models(case.workload, **options, save=save, say=say) as models:
        yield case, models, suite.run_of(case, models, given.device)


def command_peers(given: argparse.Namespace) -> Rows:
    """Peers alone, on one case."""
    engines = engines_of(given)
    suite.known(engines)
    ceiling = read_ceiling(device=given.device)
    with one_pair(given, save=suite.needs_disk(engines)) as (case, models, run):
        for name in engines:
            yield list(suite.labelled(suite.peer_rows(name, models, run, say), case, models, run, ceiling))


def command_phases(given: argparse.Namespace) -> Rows:
    """Where a step's time goes, on one case."""
    ceiling = read_ceiling(device=given.device)
    with one_pair(given) as (case, models, run), generator_of(run, k=max(given.k)) as generator:
        for row in phases.phase_rows(generator, run, say):
            shares = suite.with_shares({"bench": "trace", **row}, run, models.configs, ceiling)
            yield list(suite.labelled([shares], case, models, run, ceiling))


def command_nsys(given: argparse.Namespace) -> Rows:
    """Steps under Nsight Systems, or torch.profiler without it: a step must be one launch without a sync."""
    if given.inside:
        with one_pair(given) as (_, _, run), generator_of(run, k=max(given.k), nvtx=True) as generator:
            say(f"{nsys.record_steps(generator, run, max(given.k))} steps recorded")
        return
    if given.read:
        yield [{"bench": "trace", **anatomy.rows_of(nsys.of_sqlite(given.read), phases.TRACED)}]
        return
    with tempfile.TemporaryDirectory() as scratch:
        export = nsys.profile([*given.line, "--inside"], Path(scratch), say) if given.device != "cpu" else None
        if export is None:
            say("no nsys here, or no GPU: torch.profiler instead")
            yield from _by_torch_profiler(given)
            return
        row = anatomy.rows_of(nsys.of_sqlite(export), phases.TRACED)
        yield [{"bench": "trace", "workload": given.workload, "k": max(given.k), **row}]


def _by_torch_profiler(given: argparse.Namespace) -> Rows:
    ceiling = read_ceiling(device=given.device)
    with one_pair(given) as (case, models, run), generator_of(run, k=max(given.k)) as generator:
        row = suite.traced_row(generator, run, max(given.k), models.configs, ceiling)
        yield list(suite.labelled([row], case, models, run, ceiling))


def command_kernels(given: argparse.Namespace) -> Rows:
    """The benches of single operations."""
    for row in bench.run_benches(given.only, device=torch.device(given.device), quick=given.quick, say=say):
        yield [row]


def command_pair(given: argparse.Namespace) -> Rows:
    """Writes a planted pair to disk, and says how long that took and how large it is."""
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
    """How fast this machine reads memory."""
    yield [{"op": "read", "status": "ok", "gb_s": round(read_ceiling(device=given.device), 1)}]
