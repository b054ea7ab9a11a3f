"""num_speculative_tokens="auto" against every fixed k, over acceptance and batch: `python -m perf.auto`, on a GPU.

Drafts are accepted by fiat (`SyntheticAcceptance`), so that one pair of real shape serves for every acceptance: the
time of a step does not depend on what is accepted. At a rate of 0 the pair is built to lose. Fixed ks and auto take
turns over the same prompts. "auto, first call" is a controller that has seen no draft yet; the calls of "auto" follow
on it. A grid that runs out of time ends early, with the rows that it has. PLANTED in the place of a rate is the pair's
own agreement under the real rule: there the text of every way must be the same, and `calibrate` runs on one prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fastspec import FastSpecGenerator, GenerateOutput, SyntheticAcceptance
from fastspec.adaptive.controller import AUTO, Controller
from fastspec.sampling.rules import BLOCK
from perf import records
from perf.records import Row
from perf.workload_models import Models, open_models
from perf.workloads import WORKLOADS

FIRST = "auto, first call"
PLANTED = None  # instead of a rate
AGREEMENT = 0.78  # of the planted pair
COLUMNS = ("acceptance", "batch", "engine", "tok_s", "tok_s_min", "tok_s_max", "tokens_per_step", "over_plain",
           "predicted_over_plain", "step_ms", "draft_ms", "score_ms",
           "over_best", "best", "steps_at", "text_equal", "status")  # fmt: skip
SEED = 3
Way = int | str
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured.

    Attributes:
        rates: of acceptance, or PLANTED. batches: prompts at once. ks: fixed ones, 0 among them.
        prompt, new: tokens of a prompt, and new ones. rounds: calls of each way.
        seconds: after which no further cell is begun.
    """

    rates: tuple[float | None, ...] = (0.0, PLANTED, 0.85, 0.5)
    batches: tuple[int, ...] = (1, 32, 8)
    ks: tuple[int, ...] = (0, 1, 2, 4, 6, 8)
    prompt: int = 64
    new: int = 128
    rounds: int = 2
    seconds: float = 210.0


@dataclass(frozen=True, slots=True)
class Timed:
    """One call: tokens per second, tokens per step and row, steps at each k, and the new tokens."""

    tok_s: float
    tokens_per_step: float
    steps_at: dict[int, int]
    text: list[list[int]]


def timed(generator: FastSpecGenerator, prompts: list[list[int]], new: int, way: Way, seed: int = SEED) -> Timed:
    """One call of `generate`, prompt processing included; by one seed a place's draft has one fate, whatever the k."""
    _wait(generator.device)
    start = time.perf_counter()
    output = generator.generate(
        prompts,
        max_new_tokens=new,
        num_speculative_tokens=way,
        do_sample=False,
        seed=seed,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    _wait(generator.device)
    seconds = time.perf_counter() - start
    assert isinstance(output, GenerateOutput)
    stats = output.stats
    return Timed(stats.emitted / seconds, stats.tokens_per_step or 0.0, stats.steps_at, output.new_tokens)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(generator: FastSpecGenerator) -> None:
    """Lets every controller begin anew, with nothing but the times that were taken before the first call."""
    controllers = generator._drafting.controllers
    for key, old in list(controllers.items()):
        controllers[key] = Controller(old.ks)
        controllers[key].know(old.times.measured)


def cell(generator: FastSpecGenerator, prompts: list[list[int]], grid: Grid) -> list[Row]:
    """A row for every way of decoding these prompts."""
    timed(generator, prompts, min(16, grid.new), grid.ks[-1])  # prompts of this length are met for the first time
    forget(generator)
    calls: dict[str, list[Timed]] = {FIRST: [timed(generator, prompts, grid.new, AUTO)]}
    for turn in range(grid.rounds):
        ways: Sequence[Way] = (*grid.ks, AUTO) if turn % 2 == 0 else (AUTO, *reversed(grid.ks))
        for way in ways:
            name = f"k={way}" if isinstance(way, int) else way
            calls.setdefault(name, []).append(timed(generator, prompts, grid.new, way, SEED + turn))
    return compared(calls, grid.ks)


def compared(calls: dict[str, list[Timed]], ks: tuple[int, ...]) -> list[Row]:
    """Rows with each way's speed, and what it is of plain decoding's and of the best fixed k's."""
    rate = {name: statistics.median(call.tok_s for call in made) for name, made in calls.items()}
    best = max(ks, key=lambda k: rate[f"k={k}"])
    return [
        {
            "engine": name,
            "status": "ok",
            "calls": len(made),
            "tok_s": round(rate[name], 2),
            "tok_s_min": round(min(call.tok_s for call in made), 2),
            "tok_s_max": round(max(call.tok_s for call in made), 2),
            "tokens_per_step": round(statistics.mean(call.tokens_per_step for call in made), 3),
            "over_plain": round(rate[name] / rate["k=0"], 3),
            "over_best": round(rate[name] / rate[f"k={best}"], 3),
            "best": best,
            "steps_at": {str(k): count for k, count in made[-1].steps_at.items()},
            "text_equal": all(call.text == calls["k=0"][0].text for call in made),
        }
        for name, made in calls.items()
    ]


def calibrated(generator: FastSpecGenerator, prompts: list[list[int]], new: int, say: Say) -> list[Row]:
    """What `calibrate` predicts and measures, a row a k."""
    found = generator.calibrate(prompts, max_new_tokens=new, do_sample=False, eos_token_id=None)
    say(f"calibrate:\n{found}")
    return [
        {
            "engine": f"calibrate k={trial.k}",
            "status": "ok",
            "tokens_per_step": round(trial.tokens, 3),
            "over_plain": round(trial.measured, 3),
            "predicted_over_plain": round(trial.predicted, 3),
            "step_ms": round(trial.step_seconds * 1e3, 4),
            "draft_ms": round(trial.draft_seconds * 1e3, 4),
            "score_ms": round(trial.score_seconds * 1e3, 4),
            "best": found.best,
            "limit": found.limit,
        }
        for trial in found.trials
    ]


def generator_at(models: Models, rate: float | None, grid: Grid, device: str) -> FastSpecGenerator:
    """A generator that accepts drafts at this rate, or by the real rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the text is not the model's: the rows say it
        return FastSpecGenerator(
            models.target,
            models.draft,
            verification=BLOCK if rate is PLANTED else SyntheticAcceptance(rate=rate),
            num_speculative_tokens=AUTO,
            max_batch_size=max(grid.batches),
            max_length=grid.prompt + grid.new,
            dtype=WORKLOADS[models.workload].dtype,
            device=device,
            draft_quantization=None,
            prefix_cache=False,
            progress=False,
        )


def rows_of(grid: Grid, workload: str, device: str, say: Say = lambda _: None) -> Iterator[list[Row]]:
    """The grid, cell by cell; a last row says what there was no time for."""
    start = time.monotonic()
    left = [(rate, batch) for rate in grid.rates for batch in grid.batches]
    with open_models(workload, acceptance=AGREEMENT, seed=SEED, device=device, say=say) as models:
        prompts = models.prompts(max(grid.batches), grid.prompt)
        for rate in grid.rates:
            if time.monotonic() - start > grid.seconds:
                break
            begun = time.perf_counter()
            with generator_at(models, rate, grid, device) as generator:
                start_up = round(time.perf_counter() - begun, 2)
                say(f"acceptance {rate}: ready after {start_up} s")
                for batch in grid.batches:
                    if time.monotonic() - start > grid.seconds:
                        break
                    rows = cell(generator, prompts[:batch], grid)
                    yield [row | _labels(rate, batch) | {"start_up_s": start_up} for row in rows]
                    left.remove((rate, batch))
                    say(f"acceptance {rate}, batch {batch}: done {time.monotonic() - start:.0f} s after the start")
                if rate is PLANTED and time.monotonic() - start < grid.seconds:
                    yield [row | _labels(rate, 1) for row in calibrated(generator, prompts[:1], grid.new, say)]
                say(generator.explain().partition("verifying")[0])
    if left:
        yield [_labels(rate, batch) | {"status": "no time"} for rate, batch in left]


def _labels(rate: float | None, batch: int) -> Row:
    if rate is PLANTED:
        return {"acceptance": AGREEMENT, "acceptance_by": "the planted pair's own text", "batch": batch}
    by = "fiat (SyntheticAcceptance): the text is not the model's"
    return {"acceptance": rate, "acceptance_by": by, "batch": batch}


def verdict(rows: Sequence[Row]) -> list[str]:
    """Where auto is, in the worst cell, against the best fixed k and against plain decoding."""
    lines = []
    for name in (AUTO, FIRST):
        mine = [row for row in rows if row.get("engine") == name]
        for column, words in (("over_best", "the best fixed k"), ("over_plain", "plain decoding")):
            if mine:
                worst = min(mine, key=lambda row: float(row[column]))
                place = f"acceptance {worst['acceptance']}, batch {worst['batch']}"
                lines.append(f"{name}: {worst[column]:.3f} of {words} at worst ({place})")
    return lines


def _rates(text: str) -> tuple[float | None, ...]:
    return tuple(PLANTED if part == "planted" else float(part) for part in text.split(","))


def _whole(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measures, appends each cell to perf/results/auto.jsonl as it comes, and prints a table and a verdict."""
    default = Grid()
    parser = argparse.ArgumentParser(prog="python -m perf.auto", description=__doc__)
    parser.add_argument("--workload", choices=sorted(set(WORKLOADS) - {"shipped"}), default="8b+1b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rates", type=_rates, default=default.rates, help="such as 0,planted,0.8")
    parser.add_argument("--batches", type=_whole, default=default.batches)
    parser.add_argument("--ks", type=_whole, default=default.ks, help="fixed ones; 0 is always measured")
    parser.add_argument("--prompt", type=int, default=default.prompt)
    parser.add_argument("--new", type=int, default=default.new)
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--seconds", type=float, default=default.seconds, help="begin no cell after so many")
    parser.add_argument("--out", default="auto", help="file of JSON lines; a bare name lies in perf/results")
    parser.add_argument("--commit", help="where there is no checkout")
    given = parser.parse_args(arguments)
    ks = tuple(dict.fromkeys((0, *given.ks)))
    grid = Grid(given.rates, given.batches, ks, given.prompt, given.new, given.rounds, given.seconds)

    def say(line: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)

    about = {
        "bench": "auto",
        "workload": given.workload,
        "prompt": grid.prompt,
        "new": grid.new,
        "seed": SEED,
    }
    everything: list[Row] = []
    for rows in rows_of(grid, given.workload, given.device, say):
        everything += rows
        records.append(given.out, [about | row | records.environment(given.device, given.commit) for row in rows])
    print(records.table(everything, COLUMNS))
    print("\n".join(verdict(everything)))
    return everything


if __name__ == "__main__":
    main()
