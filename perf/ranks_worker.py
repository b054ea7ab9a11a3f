"""One rank of `perf ranks`: decodes what its argument says, and rank 0 writes the rows to stdout, a list a line."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from typing import Any

import torch

from fastspec import FastSpecGenerator
from perf.experiment import Arm, Call, generate, summary
from perf.records import Row

CALLS = 3
MEASURED = ("status", "ms_step", "ms_step_iqr", "tok_s", "tokens_per_pass")


def prompts_of(batch: int, length: int, ids: int) -> list[list[int]]:
    """Prompts that depend on their number alone. ids: they have ids below it."""
    draw = torch.Generator().manual_seed(batch)
    return [[int(token) for token in row] for row in torch.randint(ids, (batch, length), generator=draw)]


def digest(calls: list[Call]) -> str:
    """A short name of the texts of some calls."""
    return hashlib.sha256(repr([call.text for call in calls]).encode()).hexdigest()[:12]


def measured(arm: Arm, prompts: list[list[int]], new: int) -> list[Call]:
    """CALLS timed calls with the same prompts, after one that pays for captures."""
    generate(arm, prompts, new)
    first = statistics.median(generate(arm, prompts, 1).seconds for _ in range(CALLS))
    return [generate(arm, prompts, new, first=first) for _ in range(CALLS)]


def main(asked: dict[str, Any]) -> None:
    """Measures every batch and k of one generator.

    Args:
        asked: target, draft, options of the generator, prompt, new, ids, batches, ks, and `row`, which all rows begin
            with.
    """
    start = time.perf_counter()
    with FastSpecGenerator(asked["target"], asked["draft"], **asked["options"]) as generator:
        started = round(time.perf_counter() - start, 1)
        for batch in asked["batches"]:
            prompts = prompts_of(batch, asked["prompt"], asked["ids"])
            for k in asked["ks"]:
                calls = measured(Arm(generator, k), prompts, asked["new"])
                found, output = summary("fastspec", k, calls), calls[0].output
                assert output is not None, "of our generator"
                row: Row = {**asked["row"], "batch": batch, "k": k, "text": digest(calls), "start_s": started}
                row |= {name: found[name] for name in MEASURED} | {"same_text_on": output.stats.same_text_on}
                if os.environ.get("RANK", "0") == "0":
                    sys.stdout.write(json.dumps([row]) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
