"""Whole calls of our generator and of other engines, case by case, and the commands that measure them."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

import torch

from fastspec import FastSpecGenerator
from perf import anatomy, cases, nsys, peers, phases, records
from perf.cases import Case
from perf.experiment import (
    FAILURES,
    Arm,
    Call,
    Experiment,
    Say,
    generate,
    rate,
    ratio_interval,
    same_text,
    say,
    summary,
    token_sums,
    wait,
)
from perf.models import Models, Run, batches_of, generator_of, open_models, opened
from perf.records import Row
from perf.timing import read_ceiling
from perf.workloads import OWN, Bytes, step_bytes

Rows = Iterator[list[Row]]
FILE = "suite"  # rows of sets of cases, unless --out says otherwise
WARM_UP_TOKENS = 12  # new tokens of the calls that are not timed: graphs are captured, kernels compiled
PLAIN, PLAIN_LOOSE = "fastspec plain", "fastspec plain, exact=False"
LIVE = ("plain", "static", "assisted")  # peers that run on the live models, in this process
GROUPS = {"all": (*LIVE, *peers.EXTERNAL), "transformers": LIVE}
_MIB = 2**20


def engine(k: int) -> str:
    """The name of our generator with k drafts."""
    return f"fastspec k={k}" if k else PLAIN


def timed(arm: Arm, run: Run, index: int, new: int | None = None) -> Call:
    """One timed `generate`; another call of the same prompts measures the time to the first token before it."""
    prompts, options, count = run.batches[index], run.options(index), new or run.new
    wait(run.device)
    start = time.perf_counter()
    stream = arm.generator.stream(prompts, max_new_tokens=count, num_speculative_tokens=arm.k, **options)
    next(iter(stream))
    first = time.perf_counter() - start
    close: Callable[[], None] | None = getattr(stream, "close", None)
    if close is not None:
        close()
    return generate(arm, prompts, count, first=first, **options)


class _Opened:
    """A generator, its start-up time, and the memory it holds."""

    def __init__(self, run: Run, *, exact: bool, k: int) -> None:
        self._cuda = torch.device(run.device).type == "cuda"
        self._used_before = self._used()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._reserved_before = torch.cuda.memory_reserved()
        start = time.perf_counter()
        self.generator = generator_of(run, k=k, exact=exact)
        wait(run.device)
        self.start_up = time.perf_counter() - start

    def _used(self) -> int:
        """Bytes of the GPU in use by anyone; gives back torch's cached blocks first."""
        if not self._cuda:
            return 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def memory(self) -> Row:
        """MiB planned, MiB taken at most, and MiB that the GPU has less now; on a CPU only the first.

        Call it after a `generate`, which takes all that a call needs.
        """
        row: Row = {"planned_mib": round(self.generator.memory_plan.total / _MIB, 1)}
        if not self._cuda:
            return row | {"peak_mib": None, "used_mib": None}
        peak = torch.cuda.max_memory_reserved() - self._reserved_before
        used = self._used() - self._used_before
        return row | {"peak_mib": round(max(peak, used) / _MIB, 1), "used_mib": round(used / _MIB, 1)}


def measure(
    run: Run,
    say: Say = lambda _: None,
    *,
    restart: bool = False,
    extra: Callable[[FastSpecGenerator], list[Row]] | None = None,
) -> list[Row]:
    """Plain decoding with exact True and False, then every k, in turn over the same batches.

    Args:
        run: the calls.
        say: told of progress.
        restart: True to make the generator a second time, when everything is compiled.
        extra: gives more rows, from the generator with all drafts, after the calls.

    Returns:
        One row a way of decoding, then the extra ones.
    """
    ks = tuple(k for k in dict.fromkeys(run.ks) if k and run.draft is not None)
    with ExitStack() as stack:
        main = _Opened(run, exact=True, k=max(ks, default=0))
        facts: Row = {"start_up_s": round(main.start_up, 2)}
        if restart:
            main.generator.close()
            main = _Opened(run, exact=True, k=max(ks, default=0))
            facts["start_up_warm_s"] = round(main.start_up, 3)
        stack.enter_context(main.generator)
        exact = {engine(k): Arm(main.generator, k) for k in (0, *ks)}
        facts["warm_up_s"] = _warm_up(exact.values(), run)
        facts |= main.memory()
        loose = _Opened(run, exact=False, k=0)
        stack.enter_context(loose.generator)
        arms = {PLAIN: exact[PLAIN], PLAIN_LOOSE: Arm(loose.generator, 0), **exact}
        _warm_up([arms[PLAIN_LOOSE]], run)
        say("warm")
        calls = Experiment(arms, lambda arm, index: timed(arm, run, index), len(run.batches)).run(say)
        more = extra(main.generator) if extra else []
    rows = [summary(name, int(arm.k or 0), calls[name]) for name, arm in arms.items()]
    for row in rows:
        if row["ms_step"] is not None and row["first_ms"] is not None:
            row["prefill_ms"] = round(max(0.0, row["first_ms"] - row["ms_step"]), 3)
        if row["engine"] == PLAIN_LOOSE:
            row["start_up_s"] = round(loose.start_up, 2)
            continue
        row |= facts
        equal, compared = same_text(calls[row["engine"]], calls[PLAIN])
        row["text_equal"] = None if run.sampled else f"{equal} of {compared}"
    return [*with_speed_ups(rows, calls), *more]


def _warm_up(arms: Iterable[Arm], run: Run) -> float:
    """Seconds of a short call of each arm."""
    start = time.perf_counter()
    for arm in arms:
        timed(arm, run, 0, min(WARM_UP_TOKENS, run.new))
    return round(time.perf_counter() - start, 2)


def with_speed_ups(rows: Sequence[Row], calls: dict[str, list[Call]]) -> list[Row]:
    """Adds to each row its speed over the faster of our plain ways, with an interval over the same prompts."""
    sums = {name: token_sums(made) for name, made in calls.items()}
    base = max((PLAIN, PLAIN_LOOSE), key=lambda name: rate(*sums[name]))
    found = []
    for row in rows:
        mine = sums[row["engine"]]
        ratio, interval = rate(*mine) / rate(*sums[base]), ratio_interval(*mine, *sums[base])
        columns = {"speed_up": round(ratio, 3), "speed_up_95": [round(bound, 3) for bound in interval], "over": base}
        found.append({**row, **columns})
    return found


class Bench:
    """Measures one case on its models: our rows, traces and peers, each with its floor and labels.

    Args:
        case: the setting.
        models: opened.
        ceiling: GB/s that this machine reads.
        tell: told of progress.
    """

    def __init__(self, case: Case, models: Models, ceiling: float, tell: Say) -> None:
        self.case, self.models, self.ceiling, self._tell = case, models, ceiling, tell
        work = batches_of(models.prompts(case.batch * case.calls, case.prompt), case.batch)
        self.run = models.run(work, new=case.new, ks=case.ks, sampled=case.sampled, max_length=case.max_length)
        bytes_of = [None if config is None else Bytes.of(config, self.run.dtype) for config in models.configs]
        self._target, self._draft = bytes_of
        self._context = statistics.mean(len(prompt) for batch in work for prompt in batch) + case.new / 2

    def rows(self, engines: Sequence[str]) -> list[Row]:
        """All rows of the case: our own ways, traces of steps, then the peers asked for."""

        def traces(generator: FastSpecGenerator) -> list[Row]:
            return [self.traced(generator, k) for k in self.case.traced]

        rows = measure(self.run, self._tell, restart=self.case.restart, extra=traces)
        for name in engines:
            rows += self.peer(name)
        return self.labelled(rows)

    def traced(self, generator: FastSpecGenerator, k: int) -> Row:
        """The trace of steps of k drafts, and how close its passes come to reading alone."""
        row: Row = {"bench": "trace", "engine": engine(k), "k": k}
        return self.with_shares({**row, **phases.traced(generator, self.run, k)})

    def with_shares(self, row: Row) -> Row:
        """Adds the bytes of a draft pass and of the scoring pass, and their share of the read ceiling."""
        found = dict(row)
        for phase, each in (("draft_pass", self._draft), ("score", self._target)):
            took = row.get(f"{phase}_us")
            if took and each is not None:
                nbytes = each.weights + len(self.run.batches[0]) * self._context * each.cache_token
                found[f"{phase}_bytes"] = round(nbytes)
                found[f"{phase}_share"] = round(nbytes / took / 1e3 / self.ceiling, 3)
        return found

    def peer(self, name: str) -> list[Row]:
        """Rows of one peer on the same prompts, with 4 drafts if we had as many, else with our most."""
        k = 4 if 4 in self.run.ks else max(self.run.ks)
        setting = peers.Setting(self.run.batches, self.run.new, k, self.run.sampled)
        if name not in LIVE:
            target, draft = self.models.directories or (None, None)
            return peers.external_peers([name], target, draft, setting, say=self._tell)
        target_model, draft_model = [*self.models.live, None][:2]
        assert target_model is not None
        return peers.transformers_peers(target_model, draft_model, setting, engines=[name], say=self._tell)[0]

    def labelled(self, rows: Sequence[Row]) -> list[Row]:
        """Adds the floor of a step, its multiple, and what the rows belong to."""
        case, found = self.case, []
        assert self._target is not None
        for row in rows:
            k, step = row.get("k") or 0, row.get("ms_step")
            batch, draft = len(self.run.batches[0]), self._draft if k else None
            nbytes = step_bytes(self._target, draft, k=k, batch=batch, context=self._context)
            floor = nbytes / self.ceiling / 1e6
            labels = {
                "floor_ms": round(floor, 4),
                "step_over_floor": None if step is None else round(step / floor, 3),
                "case": case.name,
                "workload": case.workload,
                "batch": case.batch,
                "prompt": case.prompt,
                "new": case.new,
                "sampled": case.sampled,
                "max_length": case.max_length,
                "pair": self.models.report,
                "source": "disk" if self.models.directories else "live",
                "read_gb_s": round(self.ceiling),
            }
            found.append({**row, **labels})
        return found


def measured(chosen: Sequence[Case], given: argparse.Namespace, ceiling: float, engines: Sequence[str]) -> Rows:
    """Rows of one case at a time, cases of one pair together."""
    end = None if given.within is None else time.monotonic() + given.within
    for (workload, acceptance), group in groupby(cases.by_pair(chosen), key=lambda case: case.pair):
        here = [case for case in group if _fits(case, end, cases.pair_seconds(workload))]
        if not here:
            continue
        options = {"target": given.target, "draft": given.draft, "acceptance": acceptance, "seed": given.seed}
        options |= {"device": given.device, "save": any(case.peers for case in here) and needs_disk(engines)}
        with ExitStack() as stack:
            try:
                models = stack.enter_context(open_models(workload, **options, say=say))
            except FAILURES as error:
                yield [failed(case, error) for case in here]
                continue
            for case in here:
                if _fits(case, end):
                    yield _rows_or_failure(case, models, ceiling, engines if case.peers else ())
            del models  # before the next pair is made


def _rows_or_failure(case: Case, models: Models, ceiling: float, engines: Sequence[str]) -> list[Row]:
    """A case's rows; if it fails, one row that says so, and the other cases go on."""
    begun = time.monotonic()
    try:
        rows = Bench(case, models, ceiling, say).rows(engines)
    except FAILURES as error:
        return [failed(case, error)]
    took = round(time.monotonic() - begun, 1)
    say(f"{case.name}: {took} s, expected {cases.case_seconds(case):.0f}")
    return [{**row, "case_s": took} for row in rows]


def failed(case: Case, error: Exception) -> Row:
    """The row of a case that gave none; the traceback goes to stderr, for it may name places."""
    say(f"{case.name} failed\n{''.join(traceback.format_exception(error))}")
    return {"case": case.name, "workload": case.workload, "status": f"failed: {type(error).__name__}"}


def _fits(case: Case, end: float | None, before: float = 0.0) -> bool:
    if end is None or time.monotonic() + before + cases.case_seconds(case) <= end:
        return True
    say(f"left out, for it is not expected to end in time: {case.name}")
    return False


def needs_disk(engines: Sequence[str]) -> bool:
    """True if one of these engines is installed and reads checkpoints alone."""
    return any(name in peers.EXTERNAL and peers.importable(name) for name in engines)


def engines_of(given: argparse.Namespace) -> tuple[str, ...]:
    """The peers asked for, "all" and "transformers" spelt out.

    Raises:
        ValueError: there is no such peer.
    """
    asked = tuple(dict.fromkeys(name for word in given.peers for name in GROUPS.get(word, (word,))))
    if unknown := [name for name in asked if name not in GROUPS["all"]]:
        raise ValueError(f"no peer {unknown[0]!r}; there are {', '.join(GROUPS['all'])}")
    return asked


def case_of(given: argparse.Namespace) -> Case:
    """The one case that the options describe."""
    return Case(
        OWN if given.target else given.workload,
        given.batch,
        given.prompt,
        given.new,
        given.k,
        sampled=given.sampled,
        calls=max(1, given.prompts // given.batch),
        traced=tuple(given.traced),
        restart=given.restart,
        peers=True,
        acceptance=given.acceptance,
        max_length=given.max_length,
    )


def chosen_cases(given: argparse.Namespace) -> list[Case]:
    """The case that the options describe, or those of the set that are not recorded yet, of this part."""
    if given.workload or given.target:
        return [case_of(given)]
    picked = [case for case in cases.SETS[given.cases] if given.only in case.name]
    mine = cases.part_of(picked, given.part)
    if given.again or given.list:
        return mine
    file = records.place(given.out or FILE)
    recorded = records.read(file) if file.is_file() else []
    left = cases.pending(mine, recorded, records.environment(given.device, given.commit))
    if len(left) < len(mine):
        say(f"{len(mine) - len(left)} of {len(mine)} cases are recorded already; --again measures them once more")
    return left


def command_run(given: argparse.Namespace) -> Rows:
    """Our generator on a set of cases, or on one that the options describe; and peers when asked for."""
    chosen, engines = chosen_cases(given), engines_of(given)
    if given.list:
        yield cases.listed(chosen)
        return
    if not chosen:
        return
    expected = cases.seconds(chosen)
    advice = "" if expected < cases.PART_SECONDS else ": share them out with --part"
    say(f"{len(chosen)} cases, on a large GPU expected to take {expected:.0f} s{advice}")
    ceiling = read_ceiling(device=given.device)
    say(f"read ceiling {ceiling:.0f} GB/s")
    yield from measured(chosen, given, ceiling, engines)


@contextmanager
def one_case(given: argparse.Namespace, *, save: bool = False) -> Iterator[Bench]:
    """The bench of the case that the options describe."""
    ceiling = read_ceiling(device=given.device)
    with opened(given, save=save, say=say) as models:
        yield Bench(case_of(given), models, ceiling, say)


def command_peers(given: argparse.Namespace) -> Rows:
    """Peers alone, on one case."""
    engines = engines_of(given)
    with one_case(given, save=needs_disk(engines)) as bench:
        for name in engines:
            yield bench.labelled(bench.peer(name))


def command_phases(given: argparse.Namespace) -> Rows:
    """Where a step's time goes, on one case."""
    with one_case(given) as bench, generator_of(bench.run, k=max(given.k)) as generator:
        plain: float | None = None
        for k in dict.fromkeys((0, *given.k)):
            arm = Arm(generator, k)
            timed(arm, bench.run, 0, min(phases.SETTLE, bench.run.new))
            row = phases.phase_row(engine(k), k, timed(arm, bench.run, 0), plain)
            plain = plain if k else row["ms_step"]
            row |= phases.traced(generator, bench.run, k)
            yield bench.labelled([bench.with_shares({"bench": "trace", **row})])


def command_nsys(given: argparse.Namespace) -> Rows:
    """Steps under Nsight Systems, or torch.profiler without it: a step must be one launch without a sync."""
    k = max(given.k)
    if given.inside:
        with one_case(given) as bench, generator_of(bench.run, k=k, nvtx=True) as generator:
            say(f"{nsys.record_steps(generator, bench.run, k)} steps recorded")
        return
    if given.read:
        yield [{"bench": "trace", **anatomy.rows_of(nsys.of_sqlite(given.read), phases.TRACED)}]
        return
    with tempfile.TemporaryDirectory() as scratch:
        export = nsys.profile([*given.line, "--inside"], Path(scratch), say) if given.device != "cpu" else None
        if export is not None:
            row = anatomy.rows_of(nsys.of_sqlite(export), phases.TRACED)
            yield [{"bench": "trace", "workload": case_of(given).workload, "k": k, **row}]
            return
    say("no nsys here, or no GPU: torch.profiler instead")
    with one_case(given) as bench, generator_of(bench.run, k=k) as generator:
        yield bench.labelled([bench.traced(generator, k)])
