"""Tokens per second of a pair by the formats of its weights: `python -m perf quantised`, on a GPU.

One row for each pair of formats and each k, batch 1, greedy. A rate is that of the steps alone: the difference of two
calls of different length with the same prompt, the shorter of which pays for the prompt. Texts with drafts are
compared with those without drafts of the same target.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastspec import FastSpecGenerator
from perf.experiment import Arm, Call, Experiment, generate, say, stats_of
from perf.models import Models, Run, add_pair_options, opened
from perf.phases import traced
from perf.records import Row
from perf.workloads import OWN

STORED = "bf16"
CASES = ("bf16+bf16", "bf16+int4", "fp8+int4", "int4+int4")  # target + draft
PROMPT, NEW, SHORT = 128, 256, 16
COLUMNS = ("case", "k", "prompts", "tok_s", "ms_step", "tokens_per_step", "texts_equal")
Texts = dict[tuple[str, int], list[int]]  # by the target's format and the prompt's number


@dataclass(frozen=True, slots=True)
class Pair:
    """A short and a long call of one prompt."""

    short: Call
    long: Call


def columns(pairs: Sequence[Pair]) -> Row:
    """Rates of the steps by which long calls exceed short ones: tokens a second, milliseconds and tokens a step."""

    def more(name: str) -> float:
        return sum(float(getattr(stats_of(p.long), name) - getattr(stats_of(p.short), name)) for p in pairs)

    seconds, tokens, steps = more("seconds"), more("emitted"), more("steps")
    return {
        "tok_s": round(tokens / seconds, 1),
        "ms_step": round(1e3 * seconds / steps, 4),
        "tokens_per_step": round(tokens / steps, 3),
    }


def generator_of(models: Models, case: str, k: int, new: int) -> FastSpecGenerator:
    """A generator for a case such as "bf16+int4", and at most k drafts."""
    target, draft = (None if form == STORED else form for form in case.split("+"))
    return FastSpecGenerator(
        *models.sources,
        target_quantization=target,
        draft_quantization=draft,
        num_speculative_tokens=max(1, k),
        max_batch_size=1,
        max_length=PROMPT + new + SHORT,
        dtype=models.dtype,
        device=models.device,
        progress=False,
    )


def row_of(arm: Arm, case: str, prompts: list[list[int]], new: int, texts: Texts) -> Row:
    """The row of one arm. Without drafts half of the prompts are enough: all their steps are alike."""
    count = len(prompts) if arm.k else -(-len(prompts) // 2)
    generate(arm, prompts[:1], SHORT, eos_token_id=[])  # captures

    def both(arm: Arm, number: int) -> Pair:
        short, long = (generate(arm, [prompts[number]], length, eos_token_id=[]) for length in (SHORT, new))
        return Pair(short, long)

    pairs = Experiment({case: arm}, both, count).run()[case]
    target = case.split("+")[0]
    same = all(texts.setdefault((target, n), p.long.text[0]) == p.long.text[0] for n, p in enumerate(pairs))
    told = {"k": arm.k, "batch": 1, "prompt": PROMPT, "new": new, "prompts": count}
    return {"case": case, **told, **columns(pairs), "texts_equal": same, "status": "ok"}


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf quantised`."""
    made.set_defaults(columns=COLUMNS)
    add_pair_options(made, "8b+1b")
    made.add_argument("--cases", nargs="+", default=list(CASES), help="formats of target+draft, such as int8+int4")
    made.add_argument("--k", type=int, nargs="+", default=[0, 4, 5, 6])
    made.add_argument("--prompts", type=int, default=4)
    made.add_argument("--new", type=int, default=NEW)
    made.add_argument("--trace", type=int, help="also trace steps with so many drafts")


def command_quantised(given: argparse.Namespace) -> Iterator[list[Row]]:
    """A pair by the formats of its weights: tokens per second of the steps alone."""
    texts: Texts = {}
    with opened(given, say=say) as models:
        prompts = models.prompts(given.prompts, PROMPT)
        about = {"workload": OWN if given.target else given.workload}
        for case in given.cases:
            with generator_of(models, case, max(given.k), given.new) as generator:
                for k in given.k:
                    row = row_of(Arm(generator, k), case, prompts, given.new, texts)
                    yield [{"bench": "quantised pair", **about, **row}]
                if given.trace:
                    run = Run(*models.sources, [prompts[:1]], given.new, (), False, models.device, models.dtype)
                    row = {"case": case, "k": given.trace, **traced(generator, run, given.trace)}
                    yield [{"bench": "quantised trace", **about, **row}]
