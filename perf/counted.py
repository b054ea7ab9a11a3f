"""Tokens per step of the shipped pair on a CPU: by rule of verification, and by format of the draft's weights.

A row has a 95% bootstrap interval over prompts, and the ratio to a base arm on the same prompts. Counts do not depend
on the machine, so no time is taken.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastspec import FastSpecGenerator, demo_pair
from perf.experiment import Arm, Call, Experiment, compared, generate, law, rated, say, stats_of, step_sums
from perf.prompts import code_prompts
from perf.records import Row

PROMPT, NEW, SEED = 48, 96, 1  # tokens of a prompt, new tokens, seed of sampled calls
RULES = ("rejection", "block", "coupled")  # the first is the base
TEMPERATURES = (0.3, 0.6, 0.8, 1.0, 1.2)
FORMATS = ("bf16", "fp8", "int8", "int4")  # of the draft; the first is how it is stored
MODES_COLUMNS = ("verification", "k", "temperature", "tokens_per_step", "tokens_per_step_95", "over_rejection",
                 "over_rejection_95", "acceptance")  # fmt: skip
FORMATS_COLUMNS = ("draft", "kv", "k", "tokens_per_step", "tokens_per_step_95", "over_stored", "over_stored_95",
                   "acceptance", "texts_equal")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Arms of the shipped pair that differ in one argument of the generator.

    Attributes:
        bench, law: labels of the rows.
        arms: columns of each arm; the first arm is the base.
        arguments: of the generator, for each arm.
        options: of the call.
        columns: further columns of all rows.
        over: name of the ratio to the base.
    """

    bench: str
    law: str
    arms: tuple[Row, ...]
    arguments: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    over: str
    columns: Row = field(default_factory=dict)

    def rows(self, prompts: list[list[int]]) -> Iterator[tuple[Row, Call, Call]]:
        """(row, call, base call) of each arm."""
        names = {str(index): arguments for index, arguments in enumerate(self.arguments)}

        def measure(arguments: dict[str, Any], _: int) -> Call:
            sizes: dict[str, Any] = {"max_batch_size": 8, "max_length": PROMPT + NEW, "device": "cpu"}
            target, draft = demo_pair()
            with FastSpecGenerator(target, draft, **{**sizes, **arguments}, progress=False) as generator:
                return generate(Arm(generator), prompts, NEW, **self.options)

        calls = [found[0] for found in Experiment(names, measure).run().values()]
        base = step_sums(calls[0])
        for arm, call in zip(self.arms, calls, strict=True):
            sums = step_sums(call)
            yield (
                {
                    "bench": self.bench,
                    "workload": f"shipped pair, {len(prompts)} prompts of {PROMPT} tokens, {NEW} new, {self.law}",
                    **arm,
                    **rated("tokens_per_step", sums, 4),
                    **compared(self.over, sums, base, 4),
                    "acceptance": round(stats_of(call).acceptance_rate or 0.0, 4),
                    "new_tokens": call.tokens,
                    **self.columns,
                },
                call,
                calls[0],
            )


def modes(k: int, temperature: float) -> Case:
    """Every rule of verification at one temperature."""
    return Case(
        "modes",
        "temperature alone",
        tuple({"verification": rule, "k": k, "temperature": temperature} for rule in RULES),
        tuple({"verification": rule, "num_speculative_tokens": k} for rule in RULES),
        law(True, SEED, temperature),
        "over_rejection",
        {"seed": SEED},
    )


def formats(k: int, kv: str | None) -> Case:
    """Every format of the draft's weights, with K and V in one format."""
    return Case(
        "formats",
        "greedy",
        tuple({"draft": form, "kv": kv or "fp32", "k": k} for form in FORMATS),
        tuple(
            {"draft_quantization": None if form == FORMATS[0] else form, "kv_dtype": kv, "num_speculative_tokens": k}
            for form in FORMATS
        ),
        {},
        "over_stored",
    )


MODES = tuple(modes(k, temperature) for k in (4, 8) for temperature in TEMPERATURES)
DRAFT_FORMATS = tuple(formats(4, kv) for kv in (None, "fp8"))


def add_options(made: argparse.ArgumentParser, file: str, columns: tuple[str, ...]) -> None:
    """Adds the options of `perf modes` and `perf formats`."""
    made.set_defaults(out=file, columns=columns, device="cpu")
    made.add_argument("--prompts", type=int, default=32)


def command_modes(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Tokens per step of the shipped pair by rule of verification, on a CPU."""
    prompts = code_prompts(demo_pair()[0], given.prompts, PROMPT)
    for case in MODES:
        yield [row for row, _, _ in case.rows(prompts)]
        say(f"{case.arms[0]}")


def command_formats(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Tokens per step of the shipped pair by format of its draft, on a CPU."""
    prompts = code_prompts(demo_pair()[0], given.prompts, PROMPT)
    for case in DRAFT_FORMATS:
        yield [row | {"texts_equal": call.text == base.text} for row, call, base in case.rows(prompts)]
        say(f"K and V in {case.arms[0]['kv']}")
