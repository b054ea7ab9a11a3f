"""Tokens per step of every rule of verification on the shipped pair: `python -m perf.modes`, on a CPU.

One row per rule, temperature and k, with a 95% bootstrap interval over prompts; `over_rejection` is the ratio to
rejection sampling on the same prompts. Counts, no times: the rows do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys

from fastspec import demo_pair
from fastspec.sampling.rules import BLOCK, COUPLED, MODES, REJECTION
from perf import records
from perf.counts import NEW, PROMPT, Counts, counts_of, shipped_generator
from perf.prompts import code_prompts
from perf.records import Row
from perf.stats import rate, rate_interval, ratio_interval

TEMPERATURES = (0.3, 0.6, 0.8, 1.0, 1.2)
DRAFTS = (4, 8)
SEED = 1
COLUMNS = ("verification", "k", "temperature", "tokens_per_step", "tokens_per_step_95", "over_rejection",
           "over_rejection_95", "acceptance")  # fmt: skip


def counted(verification: str, k: int, prompts: list[list[int]]) -> list[tuple[float, Counts, float]]:
    """(temperature, counts, acceptance) of one rule over all temperatures."""
    found = []
    with shipped_generator(verification=verification, num_speculative_tokens=k) as generator:
        for temperature in TEMPERATURES:
            output = generator.generate(
                prompts,
                max_new_tokens=NEW,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                seed=SEED,
                return_dict_in_generate=True,
            )
            found.append((temperature, *counts_of(output)))
    return found


def row_of(verification: str, k: int, temperature: float, counts: Counts, base: Counts, acceptance: float) -> Row:
    """The columns of one rule at one temperature."""
    return {
        "bench": "modes",
        "workload": f"shipped pair, {len(counts[0])} prompts of {PROMPT} tokens, {NEW} new, temperature alone",
        "verification": verification,
        "k": k,
        "temperature": temperature,
        "tokens_per_step": round(rate(*counts), 4),
        "tokens_per_step_95": [round(bound, 4) for bound in rate_interval(*counts)],
        "over_rejection": round(rate(*counts) / rate(*base), 4),
        "over_rejection_95": [round(bound, 4) for bound in ratio_interval(*counts, *base)],
        "acceptance": round(acceptance, 4),
        "new_tokens": int(sum(counts[0])),
        "seed": SEED,
    }


def main() -> None:
    """Measures, prints a table and appends to perf/results/modes.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--commit", help="where there is no checkout")
    options = parser.parse_args()
    prompts = code_prompts(demo_pair()[0], options.prompts, PROMPT)
    rows = []
    for k in DRAFTS:
        of = {}
        for mode in (REJECTION, BLOCK, COUPLED):
            print(f"{mode}, k = {k}", file=sys.stderr)
            of[mode] = counted(mode, k, prompts)
        for mode in MODES:
            for (temperature, counts, acceptance), (_, base, _) in zip(of[mode], of[REJECTION], strict=True):
                rows.append(row_of(mode, k, temperature, counts, base, acceptance))
    environment = records.environment("cpu", options.commit)
    records.append("modes", [row | environment for row in rows])
    print(records.table(rows, COLUMNS))


if __name__ == "__main__":
    main()
