"""The runner of every experiment: arms that take turns, the result of one call, and the columns made of calls."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from fastspec import FastSpecGenerator, GenerateOutput
from perf.records import Row
from perf.timing import summarise

RESAMPLES, LEVEL = 2000, 0.95
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError)
ArmT = TypeVar("ArmT")
SampleT = TypeVar("SampleT")
Say = Callable[[str], None]
Sums = tuple[Sequence[float], Sequence[float]]  # numerators and denominators of a rate, one of each a sample


def say(line: str) -> None:
    """Prints progress to stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Experiment(Generic[ArmT, SampleT]):
    """Arms that are measured in turn, so that a machine that slows down slows all of them.

    Attributes:
        arms: by name.
        measure: gives the sample of one arm in one round.
        rounds: number of samples of each arm.
        mirrored: every second round goes through the arms backwards.
    """

    arms: Mapping[str, ArmT]
    measure: Callable[[ArmT, int], SampleT]
    rounds: int = 1
    mirrored: bool = False

    def run(self, tell: Say = lambda _: None) -> dict[str, list[SampleT]]:
        """Measures every arm in every round; samples by the arm's name."""
        samples: dict[str, list[SampleT]] = {name: [] for name in self.arms}
        for number in range(self.rounds):
            order = list(self.arms)
            for name in order[::-1] if self.mirrored and number % 2 else order:
                samples[name].append(self.measure(self.arms[name], number))
            tell(f"round {number + 1} of {self.rounds}")
        return samples


@dataclass(frozen=True, slots=True)
class Arm:
    """A way of decoding: a generator, and the drafts of a step (None: the generator's own)."""

    generator: FastSpecGenerator
    k: int | str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """The result of one `generate` of one engine.

    Attributes:
        tokens: new tokens of all rows.
        steps: passes of the target over the batch; None if the engine does not tell. transformers counts the pass
            over the prompt, which gives a token there; ours does not.
        row_steps: passes that a row took part in, summed over rows.
        seconds: duration of the whole call. first: seconds until the first token.
        text: the new tokens of each row.
        drafted, accepted: tokens of all rows; None if the engine does not tell.
        output: of our generator; None of other engines.
    """

    tokens: int
    steps: int | None
    row_steps: int | None
    seconds: float
    first: float | None
    text: list[list[int]]
    drafted: int | None = None
    accepted: int | None = None
    output: GenerateOutput | None = None

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step after the first; None if there is only one."""
        if self.steps is None or self.first is None or self.steps < 2 or self.seconds <= self.first:
            return None
        return (self.seconds - self.first) / (self.steps - 1)


def law(sampled: bool, seed: int, temperature: float = 1.0) -> dict[str, Any]:
    """Keywords of `generate`: greedy, or drawn from the whole vocabulary."""
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": seed}
    return drawn if sampled else {"do_sample": False}


def wait(device: torch.device | str) -> None:
    """Waits until all queued work of the device is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def generate(
    arm: Arm,
    prompts: list[list[int]],
    new: int,
    *,
    first: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Call:
    """One timed `generate` of our generator, prompt processing included.

    Args:
        arm: the generator and its drafts per step.
        prompts: ids of each row.
        new: new tokens of each row.
        first: seconds until the first token, measured by another call.
        clock: gives seconds.
        options: keywords of `generate`.
    """
    if arm.k is not None:
        options["num_speculative_tokens"] = arm.k
    options = {"eos_token_id": None, **options, "return_dict_in_generate": True}
    wait(arm.generator.device)
    start = clock()
    output = arm.generator.generate(prompts, max_new_tokens=new, **options)
    wait(arm.generator.device)
    seconds = clock() - start
    if not isinstance(output, GenerateOutput):
        raise TypeError(f"generate gave {type(output).__name__} although return_dict_in_generate was set")
    stats = output.stats
    steps, drafted = max(row.steps for row in stats.rows), stats.drafted or None
    return Call(stats.emitted, steps, stats.steps, seconds, first, output.new_tokens, drafted, stats.accepted, output)


def stats_of(call: Call) -> Any:
    """The statistics of a call of our generator."""
    assert call.output is not None
    return call.output.stats


def token_sums(calls: Sequence[Call]) -> Sums:
    """New tokens and seconds of each call."""
    return [float(call.tokens) for call in calls], [call.seconds for call in calls]


def step_sums(call: Call) -> Sums:
    """New tokens and steps of each row of one call; of a peer, of its one row."""
    if call.output is None and call.row_steps is not None:
        return [float(call.tokens)], [float(call.row_steps)]
    rows = stats_of(call).rows
    return [float(row.emitted) for row in rows], [float(row.steps) for row in rows]


def rate(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Sum over sum: tokens per second of a set of prompts weighs each prompt by its time."""
    return sum(numerators) / sum(denominators)


def rate_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95% bootstrap interval of `rate` over prompts drawn again with replacement.

    Raises:
        ValueError: no samples, or not as many numerators as denominators.
    """
    ones = [1.0] * len(numerators)
    return ratio_interval(numerators, denominators, ones, ones, resamples=resamples, seed=seed)


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    base_numerators: Sequence[float],
    base_denominators: Sequence[float],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """95% bootstrap interval of one rate over another on the same prompts: both are drawn together.

    Raises:
        ValueError: no samples, or the four are not of one length.
    """
    samples = list(zip(numerators, denominators, base_numerators, base_denominators, strict=True))
    if not samples:
        raise ValueError("no samples, so no interval")
    draw = random.Random(seed)
    drawn = []
    for _ in range(resamples):
        a, b, c, d = (sum(column) for column in zip(*draw.choices(samples, k=len(samples)), strict=True))
        drawn.append(a / b / (c / d))
    drawn.sort()
    outside = (1 - LEVEL) / 2
    return drawn[int(outside * resamples)], drawn[int((1 - outside) * resamples) - 1]


def rated(name: str, sums: Sums, digits: int) -> Row:
    """The columns `name` and `name_95`: a rate and its interval."""
    return {name: round(rate(*sums), digits), f"{name}_95": [round(bound, digits) for bound in rate_interval(*sums)]}


def compared(name: str, sums: Sums, base: Sums, digits: int) -> Row:
    """The columns `name` and `name_95`: one rate over another and its interval."""
    ratio = rate(*sums) / rate(*base)
    interval = ratio_interval(*sums, *base)
    return {name: round(ratio, digits), f"{name}_95": [round(bound, digits) for bound in interval]}


def summary(engine: str, k: int, calls: Sequence[Call]) -> Row:
    """The columns that every engine has; docs/results.md explains them.

    Raises:
        ValueError: there are no calls.
    """
    sums = token_sums(calls)
    rates = rated("tok_s", sums, 2)
    steps = [call.step_seconds for call in calls if call.step_seconds is not None]
    firsts = [call.first for call in calls if call.first is not None]
    counted = [call.row_steps for call in calls if call.row_steps is not None]
    per_pass = rate(sums[0], [float(count) for count in counted]) if len(counted) == len(calls) else None
    drafted, accepted = (sum(getattr(call, name) or 0 for call in calls) for name in ("drafted", "accepted"))
    return {
        "engine": engine,
        "k": k,
        "status": "ok",
        "calls": len(calls),
        "new_tokens": sum(call.tokens for call in calls),
        "ms_step": round(statistics.median(steps) * 1e3, 4) if steps else None,
        "ms_step_iqr": round(summarise(steps, "wall", "").spread * 1e3, 4) if steps else None,
        **rates,
        "ms_token": round(sum(call.seconds * len(call.text) for call in calls) / sum(sums[0]) * 1e3, 4),
        "tokens_per_pass": round(per_pass, 3) if per_pass is not None else None,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "first_ms": round(statistics.median(firsts) * 1e3, 3) if firsts else None,
        "samples": {"tokens": [call.tokens for call in calls], "seconds": [round(value, 5) for value in sums[1]]},
    }


def same_text(calls: Sequence[Call], others: Sequence[Call]) -> tuple[int, int]:
    """Rows whose new tokens are equal in both, and rows compared."""
    pairs = [
        (mine, theirs)
        for call, other in zip(calls, others, strict=True)
        for mine, theirs in zip(call.text, other.text, strict=True)
    ]
    return sum(mine == theirs for mine, theirs in pairs), len(pairs)
