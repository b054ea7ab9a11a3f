"""Measures cases, one pair after the other, and gives their rows as each case is done."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from statistics import mean

from transformers import PretrainedConfig

from fastspec import FastSpecGenerator
from perf import e2e, peers, phases
from perf.cases import Case, by_pair, case_seconds, pair_seconds
from perf.records import Row
from perf.workload_models import Models, batches_of, open_models
from perf.workloads import Bytes

Say = Callable[[str], None]
OWN = ("plain", "static", "assisted")  # engines that run on the live models, in this process


def measured(
    cases: Sequence[Case],
    *,
    device: str,
    ceiling: float,
    engines: Sequence[str] = (),
    seed: int = 0,
    within: float | None = None,
    say: Say = lambda _: None,
) -> Iterator[list[Row]]:
    """Rows of one case at a time, cases of one pair together.

    Args:
        ceiling: GB/s that this machine reads, for floors.
        engines: peers, on the cases that are meant for them.
        within: seconds; a case that is not expected to end by then is left out, and said.

    Raises:
        ValueError: there is no such peer.
    """
    known(engines)
    end = None if within is None else time.monotonic() + within
    for (workload, acceptance), group in groupby(by_pair(cases), key=lambda case: case.pair):
        chosen = [case for case in group if _fits(case, end, say, pair_seconds(workload))]
        if not chosen:
            continue
        save = any(case.peers for case in chosen) and needs_disk(engines)
        with ExitStack() as stack:
            try:
                pair = open_models(workload, acceptance=acceptance, seed=seed, device=device, save=save, say=say)
                models = stack.enter_context(pair)
            except peers.FAILURES as error:
                yield [failed(case, error, say) for case in chosen]
                continue
            for case in chosen:
                if _fits(case, end, say):
                    yield _rows_or_failure(case, models, device, ceiling, engines if case.peers else (), say)
            del models  # before the next pair is made


def _rows_or_failure(
    case: Case, models: Models, device: str, ceiling: float, engines: Sequence[str], say: Say
) -> list[Row]:
    """A case's rows; where it fails one that says so, and the other cases go on."""
    begun = time.monotonic()
    try:
        rows = list(case_rows(case, models, device, ceiling, engines, say))
    except peers.FAILURES as error:
        return [failed(case, error, say)]
    took = round(time.monotonic() - begun, 1)
    say(f"{case.name}: {took} s, expected {case_seconds(case):.0f}")
    return [{**row, "case_s": took} for row in rows]


def failed(case: Case, error: Exception, say: Say) -> Row:
    """The row of a case that gave none; what went wrong is said, for it may name places."""
    say(f"{case.name} failed\n{''.join(traceback.format_exception(error))}")
    return {"case": case.name, "workload": case.workload, "status": f"failed: {type(error).__name__}"}


def known(engines: Sequence[str]) -> None:
    """Checks names of peers.

    Raises:
        ValueError: there is no such peer.
    """
    every = (*OWN, *peers.EXTERNAL)
    if unknown := [name for name in engines if name not in every]:
        raise ValueError(f"no peer {unknown[0]!r}; there are {', '.join(every)}")


def needs_disk(engines: Sequence[str]) -> bool:
    """Whether one of these engines is here and reads checkpoints alone."""
    return any(name in peers.EXTERNAL and peers.importable(name) for name in engines)


def _fits(case: Case, end: float | None, say: Say, before: float = 0.0) -> bool:
    if end is None or time.monotonic() + before + case_seconds(case) <= end:
        return True
    say(f"left out, for it is not expected to end in time: {case.name}")
    return False


def run_of(case: Case, models: Models, device: str) -> e2e.Run:
    """What a case measures on its models."""
    work = batches_of(models.prompts(case.batch * case.calls, case.prompt), case.batch)
    return models.run(work, new=case.new, ks=case.ks, sampled=case.sampled, device=device, max_length=case.max_length)


def case_rows(
    case: Case, models: Models, device: str, ceiling: float, engines: Sequence[str], say: Say
) -> Iterator[Row]:
    """All rows of one case: our own ways, traces of steps, then the peers asked for."""
    run = run_of(case, models, device)

    def traces(generator: FastSpecGenerator) -> list[Row]:
        return [traced_row(generator, run, k, models.configs, ceiling) for k in case.traced]

    rows, _ = e2e.measure(run, say, restart=case.restart, extra=traces)
    for name in engines:
        rows += peer_rows(name, models, run, say)
    yield from labelled(rows, case, models, run, ceiling)


def traced_row(
    generator: FastSpecGenerator,
    run: e2e.Run,
    k: int,
    configs: tuple[PretrainedConfig, PretrainedConfig],
    ceiling: float,
) -> Row:
    """The trace of steps of k drafts, and how close its passes come to reading alone."""
    row: Row = {"bench": "trace", "engine": f"fastspec k={k}" if k else "fastspec plain", "k": k}
    return with_shares({**row, **phases.traced(generator, run, k)}, run, configs, ceiling)


def with_shares(row: Row, run: e2e.Run, configs: tuple[PretrainedConfig, PretrainedConfig], ceiling: float) -> Row:
    """Adds the bytes of a draft pass and of the scoring pass, and their share of the read ceiling."""
    context = mean(len(prompt) for batch in run.batches for prompt in batch) + run.new / 2
    found = dict(row)
    for phase, config in (("draft_pass", configs[1]), ("score", configs[0])):
        took = row.get(f"{phase}_us")
        if took:
            each = Bytes.of(config, run.dtype)
            nbytes = each.weights + len(run.batches[0]) * context * each.cache_token
            found[f"{phase}_bytes"] = round(nbytes)
            found[f"{phase}_share"] = round(nbytes / took / 1e3 / ceiling, 3)
    return found


def peer_rows(name: str, models: Models, run: e2e.Run, say: Say) -> list[Row]:
    """Rows of one peer on the same prompts, with 4 drafts if we were measured with as many, else with our most."""
    k = 4 if 4 in run.ks else max(run.ks)
    setting = peers.Setting(run.batches, run.new, k, run.sampled)
    if name not in OWN:
        target, draft = models.directories or (None, None)
        return peers.external_peers([name], target, draft, setting, say=say)
    return peers.transformers_peers(models.target, models.draft, setting, engines=[name], say=say)[0]


def labelled(rows: list[Row], case: Case, models: Models, run: e2e.Run, ceiling: float) -> Iterator[Row]:
    """Rows with their floors, and what they belong to."""
    for row in e2e.with_floors(rows, *models.configs, run, ceiling):
        yield {
            **row,
            "case": case.name,
            "workload": case.workload,
            "batch": case.batch,
            "prompt": case.prompt,
            "new": case.new,
            "sampled": case.sampled,
            "max_length": case.max_length,
            "pair": models.report,
            "source": "disk" if models.directories else "live",
            "read_gb_s": round(ceiling),
        }
