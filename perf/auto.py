"""num_speculative_tokens="auto" against every fixed k, over acceptance and batch: `python -m perf auto`, on a GPU.

Drafts are accepted at a set rate (`SyntheticAcceptance`), so that one pair of real shape serves for every acceptance:
the time of a step does not depend on what is accepted. At a rate of 0 drafting always loses. Fixed ks and auto take
turns over the same prompts. "auto, first call" is a controller that has seen no draft yet; the calls of "auto" follow
it. A grid that runs out of time ends early and keeps its rows. The rate PLANTED (None) is the pair's own agreement
under the real rule: there the text of every arm must be the same, and `calibrate` runs on one prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastspec import FastSpecGenerator, SyntheticAcceptance
from fastspec.adaptive.controller import AUTO, Controller
from fastspec.sampling.rules import BLOCK
from perf.experiment import Arm, Call, Experiment, generate, say, stats_of
from perf.models import Models, open_models
from perf.records import Row
from perf.workloads import OWN, SHAPED

FIRST = "auto, first call"
PLANTED = None  # instead of a rate
AGREEMENT = 0.78  # of the planted pair
COLUMNS = ("acceptance", "batch", "engine", "tok_s", "tok_s_min", "tok_s_max", "tokens_per_step", "over_plain",
           "predicted_over_plain", "step_ms", "draft_ms", "score_ms",
           "over_best", "best", "steps_at", "text_equal", "status")  # fmt: skip
SEED = 3


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of the grid, and the calls of each cell.

    Attributes:
        rates: of acceptance, or PLANTED. batches: prompts at once. ks: fixed ones, 0 among them.
        prompt, new: tokens of a prompt, and new ones.
        rounds: calls of each arm.
        seconds: time after which no further cell begins.
    """

    rates: tuple[float | None, ...] = (0.0, PLANTED, 0.85, 0.5)
    batches: tuple[int, ...] = (1, 32, 8)
    ks: tuple[int, ...] = (0, 1, 2, 4, 6, 8)
    prompt: int = 64
    new: int = 128
    rounds: int = 2
    seconds: float = 210.0


def forget(generator: FastSpecGenerator) -> None:
    """Resets every controller to the times that were taken before the first call."""
    controllers = generator._drafting.controllers
    for key, old in list(controllers.items()):
        controllers[key] = Controller(old.ks)
        controllers[key].know(old.times.measured)


def cell(generator: FastSpecGenerator, prompts: list[list[int]], grid: Grid) -> list[Row]:
    """A row for every arm on these prompts. By one seed a draft at a place has one fate, whatever the k."""

    def timed(arm: Arm, number: int, new: int = grid.new) -> Call:
        return generate(arm, prompts, new, do_sample=False, seed=SEED + number)

    timed(Arm(generator, grid.ks[-1]), 0, min(16, grid.new))  # captures the steps of prompts of this length
    forget(generator)
    first = timed(Arm(generator, AUTO), 0)
    arms = {f"k={k}": Arm(generator, k) for k in grid.ks} | {AUTO: Arm(generator, AUTO)}
    return compared({FIRST: [first], **Experiment(arms, timed, grid.rounds, mirrored=True).run()}, grid.ks)


def compared(calls: Mapping[str, Sequence[Call]], ks: tuple[int, ...]) -> list[Row]:
    """Rows with the speed of each arm, over plain decoding and over the best fixed k."""
    speeds = {name: [call.tokens / call.seconds for call in made] for name, made in calls.items()}
    rate = {name: statistics.median(found) for name, found in speeds.items()}
    best = max(ks, key=lambda k: rate[f"k={k}"])
    return [
        {
            "engine": name,
            "status": "ok",
            "calls": len(made),
            "tok_s": round(rate[name], 2),
            "tok_s_min": round(min(speeds[name]), 2),
            "tok_s_max": round(max(speeds[name]), 2),
            "tokens_per_step": round(statistics.mean(stats_of(call).tokens_per_step or 0.0 for call in made), 3),
            "over_plain": round(rate[name] / rate["k=0"], 3),
            "over_best": round(rate[name] / rate[f"k={best}"], 3),
            "best": best,
            "steps_at": {str(k): count for k, count in stats_of(made[-1]).steps_at.items()},
            "text_equal": all(call.text == calls["k=0"][0].text for call in made),
        }
        for name, made in calls.items()
    ]


def calibrated(generator: FastSpecGenerator, prompts: list[list[int]], new: int) -> list[Row]:
    """The predictions and measurements of `calibrate`, one row for each k."""
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


def generator_at(models: Models, rate: float | None, grid: Grid) -> FastSpecGenerator:
    """A generator that accepts drafts at this rate, or by the real rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the text is not the model's: the rows say it
        return FastSpecGenerator(
            *models.sources,
            verification=BLOCK if rate is PLANTED else SyntheticAcceptance(rate=rate),
            num_speculative_tokens=AUTO,
            max_batch_size=max(grid.batches),
            max_length=grid.prompt + grid.new,
            dtype=models.dtype,
            device=models.device,
            draft_quantization=None,
            prefix_cache=False,
            progress=False,
        )


def rows_of(grid: Grid, given: argparse.Namespace) -> Iterator[list[Row]]:
    """The grid, cell by cell; the last rows name the cells that there was no time for."""
    start = time.monotonic()
    cells = [(rate, batch) for rate in grid.rates for batch in grid.batches]
    options = {"target": given.target, "draft": given.draft, "device": given.device}
    with open_models(given.workload, acceptance=AGREEMENT, seed=SEED, **options, say=say) as models:
        prompts = models.prompts(max(grid.batches), grid.prompt)
        for rate in grid.rates:
            if time.monotonic() - start > grid.seconds:
                break
            begun = time.perf_counter()
            with generator_at(models, rate, grid) as generator:
                start_up = round(time.perf_counter() - begun, 2)
                say(f"acceptance {rate}: ready after {start_up} s")
                for batch in grid.batches:
                    if time.monotonic() - start > grid.seconds:
                        break
                    rows = cell(generator, prompts[:batch], grid)
                    yield [row | _labels(rate, batch) | {"start_up_s": start_up} for row in rows]
                    cells.remove((rate, batch))
                    say(f"acceptance {rate}, batch {batch}: done {time.monotonic() - start:.0f} s after the start")
                if rate is PLANTED and time.monotonic() - start < grid.seconds:
                    yield [row | _labels(rate, 1) for row in calibrated(generator, prompts[:1], grid.new)]
                say(generator.explain().partition("verifying")[0])
    if cells:
        yield [_labels(rate, batch) | {"status": "no time"} for rate, batch in cells]


def _labels(rate: float | None, batch: int) -> Row:
    if rate is PLANTED:
        return {"acceptance": AGREEMENT, "acceptance_by": "the planted pair's own text", "batch": batch}
    by = "fiat (SyntheticAcceptance): the text is not the model's"
    return {"acceptance": rate, "acceptance_by": by, "batch": batch}


def verdict(rows: Sequence[Row]) -> list[str]:
    """Lines that compare auto, in its worst cell, with the best fixed k and with plain decoding."""
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


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf auto`."""
    default = Grid()
    made.set_defaults(out="auto", columns=COLUMNS, last_words=verdict)
    made.add_argument("--workload", choices=SHAPED, default="8b+1b")
    made.add_argument("--target", type=Path, help="a checkpoint of your own, in place of a workload")
    made.add_argument("--draft", type=Path, help="its draft")
    made.add_argument("--rates", type=_rates, default=default.rates, help="such as 0,planted,0.8")
    made.add_argument("--batches", type=_whole, default=default.batches)
    made.add_argument("--ks", type=_whole, default=default.ks, help="fixed ones; 0 is always measured")
    for name in ("prompt", "new", "rounds"):
        made.add_argument(f"--{name}", type=int, default=getattr(default, name))
    made.add_argument("--seconds", type=float, default=default.seconds, help="begin no cell after so many")


def command_auto(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Drafts per step chosen while decoding, against every fixed k, over acceptance and batch."""
    ks = tuple(dict.fromkeys((0, *given.ks)))
    grid = Grid(given.rates, given.batches, ks, given.prompt, given.new, given.rounds, given.seconds)
    about: Row = {"bench": "auto", "workload": OWN if given.target else given.workload}
    about |= {"prompt": grid.prompt, "new": grid.new, "seed": SEED}
    for rows in rows_of(grid, given):
        yield [about | row for row in rows]
