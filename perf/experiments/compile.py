"""compile=True against our own kernels: start-up and milliseconds a step, on the same pair and prompts.

    python -m perf.experiments.compile [--workload 8b+1b] [--k 0,4]

Start-up is the constructor, of a machine whose kernel caches are as they are; the two take turns after it.
"""

from __future__ import annotations

import argparse
import time

from fastspec import FastSpecGenerator
from perf import records
from perf.e2e import Run, fastspec_call
from perf.opened import batches_of, opened
from perf.runs import Call, same_text, summary

COLUMNS = ("engine", "workload", "k", "ms_step", "tokens_per_pass", "start_up_s", "warm_up_s", "text_equal")


def made(run: Run, compiled: bool) -> tuple[FastSpecGenerator, float]:
    """A generator with just the room it needs, and the seconds that making it took."""
    start = time.perf_counter()
    generator = FastSpecGenerator(
        run.target,
        run.draft,
        num_speculative_tokens=max(run.ks),
        max_length=max(len(prompt) for batch in run.batches for prompt in batch) + run.new,
        dtype=run.dtype,
        device=run.device,
        exact=not compiled,
        compile=compiled,
        progress=False,
    )
    return generator, time.perf_counter() - start


def measured(run: Run, workload: str) -> list[records.Row]:
    """A row for each engine and k."""
    names = ("kernels", "torch.compile")
    generators, rows = {}, []
    for name in names:
        generator, start_up = made(run, name != "kernels")
        start = time.perf_counter()
        for k in run.ks:
            fastspec_call(generator, run, 0, k=k, new=16)
        generators[name] = (generator, round(start_up, 2), round(time.perf_counter() - start, 2))
    calls: dict[tuple[str, int], list[Call]] = {(name, k): [] for name in names for k in run.ks}
    for index in range(len(run.batches)):
        for name, k in calls:
            calls[name, k].append(fastspec_call(generators[name][0], run, index, k=k))
    for (name, k), mine in calls.items():
        equal, compared = same_text(mine, calls["kernels", run.ks[0]])
        took = {"start_up_s": generators[name][1], "warm_up_s": generators[name][2]}
        row = {"bench": "compile", "workload": workload, **summary(name, k, mine), **took}
        rows.append({**row, "text_equal": f"{equal} of {compared}"})
    for generator, _, _ in generators.values():
        generator.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="8b+1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--k", default="0,4")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--out")
    parser.add_argument("--commit")
    given = parser.parse_args()
    ks = tuple(int(k) for k in given.k.split(","))
    with opened(given.workload, acceptance=0.78, seed=0, device=given.device) as models:
        batches = batches_of(models.prompts(given.prompts, 128), 1)
        run = models.run(batches, new=given.new, ks=ks, sampled=False, device=given.device)
        rows = measured(run, given.workload)
    print(records.table(rows, COLUMNS))
    if given.out:
        records.append(given.out, [records.environment(given.device, given.commit) | row for row in rows])


if __name__ == "__main__":
    main()
