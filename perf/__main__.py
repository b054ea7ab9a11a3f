"""The command line: `python -m perf run | peers | phases | kernels | pair | ceiling | report`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fastspec import FastSpecGenerator, demo_pair
from perf import bench, e2e, peers, phases, records
from perf.pairs import PlantedPair, plant
from perf.prompts import code_prompts
from perf.records import Row
from perf.timing import read_ceiling
from perf.workloads import WORKLOADS, Bytes, Workload

ENGINES = ("plain", "static", "assisted")
COLUMNS = (
    "bench", "op", "engine", "workload", "batch", "prompt", "new", "k", "sampled", "part", "status", "tok_s",
    "tok_s_95",
    "ms_step", "floor_ms", "step_over_floor", "tokens_per_pass", "first_ms", "speed_up", "speed_up_95", "text_equal",
    "start_up_s", "warm_up_s", "planned_gib", "used_gib", "draft_ms", "steps", "trace", "graph_per_step",
    "launch_per_step", "sync_per_step", "copy_per_step", "gpu_copies_per_step", "graph_kernels", "step_us",
    "idle_within_us", "idle_between_us", "us", "us_iqr", "gb_s", "agreement", "noise", "spread",
    "seconds", "write_s", "target_parameters", "draft_parameters",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Models:
    """The two models of a workload, ready for every engine.

    Attributes:
        target, draft: live transformers models. directories: of the same on disk, where they were written.
        prompts: lists of ids, all of one length.
        configs: of both.
        report: how the pair was made.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    directories: tuple[Path, Path] | None
    prompts: list[list[int]]
    configs: tuple[PretrainedConfig, PretrainedConfig]
    report: Row


def say(line: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


@contextmanager
def opened(given: argparse.Namespace) -> Iterator[Models]:
    """Makes or loads the pair and its prompts, all of this part's."""
    workload = WORKLOADS[given.workload]
    with tempfile.TemporaryDirectory() as scratch:
        if workload.name == "shipped":
            yield _shipped(given)
            return
        pair = plant(workload, acceptance=given.acceptance, seed=given.seed, device=given.device)
        say(f"planted: {pair.report}")
        directories = pair.save(Path(scratch)) if given.save else None
        configs = (pair.target.config, pair.draft.config)
        prompts = pair.prompts(given.prompts, given.prompt)
        yield Models(pair.target, pair.draft, directories, prompts, configs, pair.report)


def _shipped(given: argparse.Namespace) -> Models:
    directories = demo_pair()
    dtype = WORKLOADS["shipped"].dtype
    models = [AutoModelForCausalLM.from_pretrained(str(place), dtype=dtype) for place in directories]
    target, draft = (model.to(given.device).eval() for model in models)
    configs = [AutoConfig.from_pretrained(str(place)) for place in directories]
    prompts = code_prompts(directories[0], given.prompts, given.prompt)
    return Models(target, draft, directories, prompts, (configs[0], configs[1]), {"pair": "shipped"})


def batches(prompts: list[list[int]], batch: int, part: tuple[int, int]) -> list[list[list[int]]]:
    """Prompts in batches; every n-th of them, from the i-th on, for part i of n.

    Raises:
        ValueError: there are none.
    """
    whole = [prompts[start : start + batch] for start in range(0, len(prompts) - batch + 1, batch)]
    if not (mine := whole[part[0] - 1 :: part[1]]):
        raise ValueError(f"{len(prompts)} prompts make {len(whole)} batches of {batch}; none is left for part {part}")
    return mine


def _run_of(given: argparse.Namespace, models: Models, work: list[list[list[int]]]) -> e2e.Run:
    """From disk where the models lie there, so that starting up is what a user waits for."""
    target, draft = models.directories or (models.target, models.draft)
    dtype = WORKLOADS[given.workload].dtype
    return e2e.Run(target, draft, work, given.new, given.k, given.sampled, given.device, dtype)


def _labels(given: argparse.Namespace, models: Models) -> Row:
    return {
        "workload": given.workload,
        "batch": given.batch,
        "prompt": given.prompt,
        "new": given.new,
        "sampled": given.sampled,
        "part": "/".join(map(str, given.part)),
        "pair": models.report,
    }


def _finished(given: argparse.Namespace, models: Models, run: e2e.Run, rows: list[Row], ceiling: float) -> list[Row]:
    """Rows with their floors, and what they belong to."""
    labels = {**_labels(given, models), "source": "disk" if models.directories else "live", "read_gb_s": round(ceiling)}
    return [{**row, **labels} for row in e2e.with_floors(rows, *models.configs, run, ceiling)]


def _peer_rows(given: argparse.Namespace, models: Models, work: list[list[list[int]]]) -> Iterator[list[Row]]:
    setting = peers.Setting(work, given.new, max(given.k), given.sampled)
    for engine in given.engines:
        yield peers.transformers_peers(models.target, models.draft, setting, engines=[engine], say=say)[0]
    target, draft = models.directories or (None, None)
    yield peers.external_peers(peers.EXTERNAL, target, draft, setting, say=say)


def command_run(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Our generator, and peers when asked for."""
    ceiling = read_ceiling(device=given.device)
    say(f"read ceiling {ceiling:.0f} GB/s")
    with opened(given) as models:
        work = batches(models.prompts, given.batch, given.part)
        run = _run_of(given, models, work)
        yield _finished(given, models, run, e2e.measure(run, say)[0], ceiling)
        if "transformers" in given.peers:
            for rows in _peer_rows(given, models, work):
                yield _finished(given, models, run, rows, ceiling)


def command_peers(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Peers alone."""
    ceiling = read_ceiling(device=given.device)
    with opened(given) as models:
        work = batches(models.prompts, given.batch, given.part)
        for rows in _peer_rows(given, models, work):
            yield _finished(given, models, _run_of(given, models, work), rows, ceiling)


def command_phases(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Where a step's time goes."""
    with opened(given) as models:
        run = _run_of(given, models, batches(models.prompts, given.batch, given.part))
        with FastSpecGenerator(
            run.target,
            run.draft if max(given.k) else None,
            num_speculative_tokens=max(given.k),
            max_batch_size=given.batch,
            max_length=given.prompt + given.new,
            dtype=run.dtype,
            device=given.device,
            progress=False,
        ) as generator:
            for row in phases.phase_rows(generator, run, say):
                yield [{**row, **_labels(given, models)}]


def command_kernels(given: argparse.Namespace) -> Iterator[list[Row]]:
    """The benches of single operations."""
    for row in bench.run_benches(given.only, device=torch.device(given.device), quick=given.quick, say=say):
        yield [row]


def command_pair(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Writes a planted pair to disk, and says how long that took and how large it is."""
    workload: Workload = WORKLOADS[given.workload]
    pair: PlantedPair = plant(workload, acceptance=given.acceptance, seed=given.seed, device=given.device)
    start = time.perf_counter()
    pair.save(given.to)
    row: Row = {
        "workload": workload.name,
        "status": "ok",
        **pair.report,
        "write_s": round(time.perf_counter() - start, 1),
    }
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        row[f"{role}_parameters"] = sum(parameter.numel() for parameter in model.parameters())
        row[f"{role}_pass_bytes"] = Bytes.of(model.config, workload.dtype).weights
    yield [row]


def command_ceiling(given: argparse.Namespace) -> Iterator[list[Row]]:
    """How fast this machine reads memory."""
    yield [{"op": "read", "status": "ok", "gb_s": round(read_ceiling(device=given.device), 1)}]


def command_report(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Prints a file of results."""
    yield records.read(given.file)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


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
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, function: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        made.set_defaults(function=function)
        made.add_argument("--out", help="append rows to this file of JSON lines; a bare name lies in perf/results")
        made.add_argument("--commit", help="of the code measured, where its checkout is not at hand")
        made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        return made

    for name, function in (("run", command_run), ("peers", command_peers), ("phases", command_phases)):
        made = command(name, function)
        _add_pair_options(made)
        made.add_argument("--batch", type=int, default=1, help="prompts at once")
        made.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
        made.add_argument("--new", type=int, default=256, help="new tokens a prompt")
        made.add_argument("--prompts", type=int, default=16, help="prompts in all, cut into batches")
        made.add_argument("--k", type=_numbers, default=(0, 4, 5), help="drafts per step, such as 0,4,5")
        made.add_argument("--sampled", action="store_true", help="temperature 1, whole vocabulary; else greedy")
        made.add_argument("--part", type=_part, default=(1, 1), help="i/n: measure every n-th batch from the i-th on")
        made.add_argument("--save", action="store_true", help="write checkpoints for engines that need them")
        made.add_argument("--peers", type=_words, default=(), help="transformers, or nothing")
        made.add_argument("--engines", type=_words, default=ENGINES, help=f"of transformers: {','.join(ENGINES)}")
    made = command("kernels", command_kernels)
    made.add_argument("--only", type=_words, default=(), help="names of benches")
    made.add_argument("--quick", action="store_true", help="smallest sizes")
    made = command("pair", command_pair)
    _add_pair_options(made)
    made.add_argument("--to", type=Path, required=True, help="directory that gets target/ and draft/")
    command("ceiling", command_ceiling)
    command("report", command_report).add_argument("file", help="name or path of a file of results")
    return top


def _add_pair_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("--workload", choices=sorted(WORKLOADS), default="8b+1b")
    made.add_argument("--acceptance", type=float, default=0.78, help="of a planted pair")
    made.add_argument("--seed", type=int, default=0, help="of a planted pair")


def main(arguments: list[str] | None = None) -> list[Row]:
    """Runs one command; returns the rows it printed. Rows are written as they come: a run cut off keeps them."""
    given = parser().parse_args(arguments)
    all_rows: list[Row] = []
    for rows in given.function(given):
        if given.function is not command_report:
            here = records.environment(given.device, given.commit)
            rows = [{**row, **here} for row in rows]
            if given.out:
                records.append(given.out, rows)
        all_rows += rows
    print(records.table(all_rows, COLUMNS))
    return all_rows


if __name__ == "__main__":
    main()
