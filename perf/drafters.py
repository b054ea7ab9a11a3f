"""Every kind of drafter on one target, on text it was not trained on: `python -m perf drafters --head NAME=DIR`.

Prompts are cut from the files that `tools.heads` and `tools.demo_pair` hold out of the standard library. All drafters
continue each prompt in turn. On a CPU a second is one of processor time (set OMP_NUM_THREADS=1), on a GPU one on the
clock. Target and draft model are the shipped pair, unless `--target` and `--draft` name others.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fastspec import FastSpecGenerator, NGram, demo_pair
from perf.experiment import (
    Arm,
    Call,
    Experiment,
    compared,
    generate,
    law,
    rate,
    rate_interval,
    rated,
    same_text,
    say,
    stats_of,
    token_sums,
)
from perf.records import Row
from tools.heads.corpus import cut_prompts, read_texts
from tools.heads.target import encode_all

PROMPT, NEW = 128, 128
TEMPERATURES = (0.0, 1.0)
COLUMNS = ("drafter", "k", "temperature", "tokens_per_step", "tokens_per_step_95", "accepted_at_least", "tok_s",
           "tok_s_95", "over_draft_model", "over_draft_model_95", "text_equal")  # fmt: skip
PLAIN, MODEL = "plain", "draft model"


def arms_of(stack: ExitStack, given: argparse.Namespace, target: Path, draft: Path) -> dict[str, Arm]:
    """The arms, by "name k"; their generators close with the stack."""
    kinds: dict[str, dict[str, Any]] = {PLAIN: {}, MODEL: {"draft": draft}, "lookup": {"proposer": NGram()}}
    kinds |= {name: {"draft": Path(folder)} for name, folder in (each.split("=", 1) for each in given.head)}
    arms = {}
    for name, how in kinds.items():
        for k in (0,) if name == PLAIN else given.k:
            sizes: dict[str, Any] = {"max_batch_size": 1, "max_length": PROMPT + NEW + k + 1, "device": given.device}
            generator = FastSpecGenerator(target, **how, **sizes, num_speculative_tokens=k, progress=False)
            arms[f"{name} {k}"] = Arm(stack.enter_context(generator))
    return arms


def held_out_prompts(target: Path, count: int, corpus: Path) -> list[list[int]]:
    """Pieces of PROMPT tokens from random places of held-out files."""
    documents = encode_all(target, read_texts(corpus).held_out)
    return [row.tolist() for row in cut_prompts(documents, count, PROMPT, torch.Generator().manual_seed(11))]


def row_of(name: str, temperature: float, found: Sequence[Call], plain: Sequence[Call], model: Sequence[Call]) -> Row:
    """The columns of one arm at one temperature.

    Args:
        name: "drafter k".
        temperature: 0 for greedy.
        found: calls of the arm. plain, model: calls of plain decoding and of the draft model.
    """
    drafter, _, drafts = name.rpartition(" ")
    rows = [row for call in found for row in stats_of(call).rows]
    steps, emitted = ([float(getattr(row, what)) for row in rows] for what in ("steps", "emitted"))
    reaching = [[float(sum(row.histogram[place:])) for row in rows] for place in range(1, int(drafts) + 1)]
    row: Row = {
        "bench": "drafters",
        "workload": f"shipped target, {len(steps)} held-out prompts of {PROMPT} tokens, {NEW} new, batch 1",
        "drafter": drafter,
        "k": int(drafts),
        "temperature": temperature,
        **rated("tokens_per_step", (emitted, steps), 3),
        "accepted_at_least": [round(rate(counts, steps), 3) for counts in reaching],
        "accepted_at_least_95": [[round(bound, 3) for bound in rate_interval(counts, steps)] for counts in reaching],
        **rated("tok_s", token_sums(found), 1),
        **compared("over_draft_model", token_sums(found), token_sums(model), 3),
    }
    if temperature == 0:
        row["text_equal"] = "{} of {}".format(*same_text(found, plain))
    return row


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf drafters`."""
    made.set_defaults(out="heads", columns=COLUMNS)
    made.add_argument("--target", type=Path, help="a checkpoint of your own, in place of the shipped target")
    made.add_argument("--draft", type=Path, help="its draft model")
    made.add_argument("--head", action="append", default=[], metavar="NAME=DIR", help="a head; may be repeated")
    made.add_argument("--k", type=int, nargs="+", default=[5])
    made.add_argument("--prompts", type=int, default=32)
    made.add_argument("--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")))


def command_drafters(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Draft model, lookup and heads on the shipped target, on text that none was trained on."""
    target, draft = (given.target, given.draft) if given.target else demo_pair()
    if draft is None:
        raise SystemExit("--target needs --draft, the draft model that the others are compared with")
    prompts = held_out_prompts(target, given.prompts, given.corpus)
    on_cpu = torch.device(given.device).type == "cpu"
    clock, words = (time.process_time, "processor time") if on_cpu else (time.perf_counter, "wall")
    with ExitStack() as stack:
        arms = arms_of(stack, given, target, draft)
        for temperature in TEMPERATURES:

            def measure(arm: Arm, number: int, temperature: float = temperature) -> Call:
                options = law(temperature > 0, number, temperature)
                return generate(arm, [prompts[number]], NEW, clock=clock, **options)

            for arm in arms.values():
                measure(arm, 0)  # warm
            calls = Experiment(arms, measure, len(prompts)).run(say)
            models = [found for name, found in calls.items() if name.startswith(f"{MODEL} ")]
            best = max(models, key=lambda found: rate(*token_sums(found)))
            rows = [row_of(name, temperature, found, calls[f"{PLAIN} 0"], best) for name, found in calls.items()]
            own = {"workload": rows[0]["workload"].replace("shipped", "own")} if given.target else {}
            yield [{**row, **own, "seconds_of": words} for row in rows]
