"""Every kind of drafter on the shipped target, on text it was not trained on: `python -m perf.drafters --head DIR`.

Prompts are cut from the files that `tools.heads` and `tools.demo_pair` hold out of the standard library. Each prompt is
continued by all drafters in turn, so that what else the machine does falls on all of them alike. On a CPU a second is
one of processor time (set OMP_NUM_THREADS=1), on a GPU one on the clock.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastspec import FastSpecGenerator, GenerateOutput, NGram, demo_pair
from fastspec.output import RowStats
from perf import records
from perf.records import Row
from perf.stats import rate, rate_interval, ratio_interval
from tools.heads.corpus import cut_prompts, read_texts
from tools.heads.target import encode_all

PROMPT, NEW = 128, 128
TEMPERATURES = (0.0, 1.0)
COLUMNS = ("drafter", "k", "temperature", "tokens_per_step", "tokens_per_step_95", "accepted_at_least", "tok_s",
           "tok_s_95", "over_draft_model", "over_draft_model_95", "text_equal")  # fmt: skip


@dataclass(slots=True)
class Calls:
    """What one drafter did at one temperature, an entry a prompt."""

    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rows: list[RowStats] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)


def drafters(stack: ExitStack, options: argparse.Namespace) -> dict[tuple[str, int], FastSpecGenerator]:
    """The generators to compare, by name and tokens a step."""
    target, draft = demo_pair()
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "draft model": {"draft": draft}, "lookup": {"proposer": NGram()}}
    kinds |= {name: {"draft": Path(folder)} for name, folder in (each.split("=", 1) for each in options.head)}
    made = {}
    for name, how in kinds.items():
        for k in (0,) if name == "plain" else options.k:
            generator = FastSpecGenerator(
                target,
                **how,
                num_speculative_tokens=k,
                max_batch_size=1,
                max_length=PROMPT + NEW + k + 1,
                device=options.device,
                progress=False,
            )
            made[name, k] = stack.enter_context(generator)
    return made


def held_out_prompts(count: int, corpus: Path) -> list[list[int]]:
    """Pieces of PROMPT tokens from random places of held-out files."""
    documents = encode_all(demo_pair()[0], read_texts(corpus).held_out)
    return [row.tolist() for row in cut_prompts(documents, count, PROMPT, torch.Generator().manual_seed(11))]


def call(generator: FastSpecGenerator, prompt: list[int], temperature: float, seed: int, calls: Calls) -> None:
    """Continues one prompt, timed."""
    clock = time.process_time if generator.device.type == "cpu" else time.perf_counter
    law: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": seed}
    start = clock()
    output = generator.generate(
        [prompt],
        max_new_tokens=NEW,
        eos_token_id=None,
        return_dict_in_generate=True,
        **(law if temperature > 0 else {"do_sample": False}),
    )
    calls.seconds.append(clock() - start)
    assert isinstance(output, GenerateOutput)
    calls.tokens.append(float(output.stats.emitted))
    calls.rows += output.stats.rows
    calls.texts.append(list(output.sequences[0]))


def row_of(name: str, k: int, temperature: float, found: Calls, plain: Calls, model: Calls) -> Row:
    """The columns of one drafter at one temperature."""
    steps, emitted = ([float(getattr(row, what)) for row in found.rows] for what in ("steps", "emitted"))
    reaching = [sum(sum(row.histogram[place:]) for row in found.rows) for place in range(1, k + 1)]
    row: Row = {
        "bench": "drafters",
        "workload": f"shipped target, {len(steps)} held-out prompts of {PROMPT} tokens, {NEW} new, batch 1",
        "drafter": name,
        "k": k,
        "temperature": temperature,
        "tokens_per_step": round(rate(emitted, steps), 3),
        "tokens_per_step_95": [round(bound, 3) for bound in rate_interval(emitted, steps)],
        "accepted_at_least": [round(count / sum(steps), 3) for count in reaching],
        "accepted_at_least_95": [
            [round(bound, 3) for bound in rate_interval([sum(row.histogram[place:]) for row in found.rows], steps)]
            for place in range(1, k + 1)
        ],
        "tok_s": round(rate(found.tokens, found.seconds), 1),
        "tok_s_95": [round(bound, 1) for bound in rate_interval(found.tokens, found.seconds)],
        "over_draft_model": round(rate(found.tokens, found.seconds) / rate(model.tokens, model.seconds), 3),
        "over_draft_model_95": [
            round(bound, 3) for bound in ratio_interval(found.tokens, found.seconds, model.tokens, model.seconds)
        ],
    }
    if temperature == 0:
        same = sum(mine == theirs for mine, theirs in zip(found.texts, plain.texts, strict=True))
        row["text_equal"] = f"{same} of {len(plain.texts)}"
    return row


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of all drafters at all temperatures."""
    prompts = held_out_prompts(options.prompts, options.corpus)
    with ExitStack() as stack:
        made = drafters(stack, options)
        for temperature in TEMPERATURES:
            of = {key: Calls() for key in made}
            for generator in made.values():
                call(generator, prompts[0], temperature, 0, Calls())  # warm
            for seed, prompt in enumerate(prompts):
                for key, generator in made.items():
                    call(generator, prompt, temperature, seed, of[key])
                print(f"temperature {temperature}: prompt {seed + 1} of {len(prompts)}", file=sys.stderr, flush=True)
            model = max((calls for (name, _), calls in of.items() if name == "draft model"), key=_speed)
            for (name, k), calls in of.items():
                yield row_of(name, k, temperature, calls, of["plain", 0], model)


def _speed(calls: Calls) -> float:
    return rate(calls.tokens, calls.seconds)


def main() -> None:
    """Measures, prints a table and appends to perf/results/heads.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", action="append", default=[], metavar="NAME=DIR", help="a head; may be repeated")
    parser.add_argument("--k", type=int, nargs="+", default=[5])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="heads", help="a name under perf/results, or a file")
    parser.add_argument("--commit", help="where there is no checkout")
    options = parser.parse_args()
    rows = list(measured(options))
    environment = records.environment(options.device, options.commit)
    clock = "processor time" if environment["device"] == "cpu" else "wall"
    records.append(options.out, [row | {"seconds_of": clock} | environment for row in rows])
    print(records.table(rows, COLUMNS))


if __name__ == "__main__":
    main()
