"""Tokens per step of the shipped pair with its draft in every format: `python -m perf.formats`, on a CPU.

One row per format of the draft's weights, of K and V, and k, greedy, with a 95% bootstrap interval over prompts;
`over_stored` is the ratio to the draft as it is stored, on the same prompts. Counts, no times: the rows do not depend
on the machine. Texts of all formats with the same K and V are compared. --picture FOLDER draws what GPUs took instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fastspec import GenerateOutput, demo_pair
from fastspec.kernels.common.rounding import FORMATS
from perf import records
from perf.counts import NEW, PROMPT, Counts, counts_of, shipped_generator
from perf.prompts import code_prompts
from perf.records import Row
from perf.stats import rate, rate_interval, ratio_interval

DRAFTS = (4,)
STORED = "bf16"  # what the shipped draft is stored in
COLUMNS = ("draft", "kv", "k", "tokens_per_step", "tokens_per_step_95", "over_stored", "over_stored_95", "acceptance",
           "texts_equal")  # fmt: skip


def counted(form: str, kv: str | None, k: int, prompts: list[list[int]]) -> tuple[Counts, float, list[list[int]]]:
    """(counts, acceptance, new tokens) with the draft in one format."""
    quantization = None if form == STORED else form
    with shipped_generator(draft_quantization=quantization, kv_dtype=kv, num_speculative_tokens=k) as generator:
        output = generator.generate(prompts, max_new_tokens=NEW, eos_token_id=None, return_dict_in_generate=True)
    assert isinstance(output, GenerateOutput)
    return *counts_of(output), output.new_tokens


def rows_of(kv: str | None, k: int, prompts: list[list[int]]) -> list[Row]:
    """The rows of every format of the draft."""
    found: list[Row] = []
    base: Counts | None = None
    texts: list[list[int]] | None = None
    for form in (STORED, *FORMATS):
        print(f"draft in {form}, K and V in {kv or 'fp32'}, k = {k}", file=sys.stderr)
        counts, acceptance, new = counted(form, kv, k, prompts)
        base, texts = base or counts, texts or new
        found.append(
            {
                "bench": "formats",
                "workload": f"shipped pair, {len(prompts)} prompts of {PROMPT} tokens, {NEW} new, greedy",
                "draft": form,
                "kv": kv or "fp32",
                "k": k,
                "tokens_per_step": round(rate(*counts), 4),
                "tokens_per_step_95": [round(bound, 4) for bound in rate_interval(*counts)],
                "over_stored": round(rate(*counts) / rate(*base), 4),
                "over_stored_95": [round(bound, 4) for bound in ratio_interval(*counts, *base)],
                "acceptance": round(acceptance, 4),
                "texts_equal": new == texts,
                "new_tokens": int(sum(counts[0])),
            }
        )
    return found


def newest_of_pairs(rows: Sequence[Row]) -> list[Row]:
    """Rows of a pair by format, of the run that is recorded last: figures of two runs do not compare."""
    pairs = [row for row in rows if row["bench"] == "quantised pair"]
    return [row for row in pairs if row["commit"] == pairs[-1]["commit"]]


def picture(folder: Path) -> Path | None:
    """Draws the newest rows of a pair's tokens per second by format, as folder / formats.png."""
    from perf import plots  # matplotlib is needed here alone

    rows = newest_of_pairs(records.read("quantised"))
    for row in rows:
        row["target_weights"], row["draft_weights"] = row["case"].split("+")
    return plots.save("formats", folder, plots.by_format(rows))


def main() -> None:
    """Measures, prints a table and appends to perf/results/formats.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--commit", help="where there is no checkout")
    parser.add_argument("--picture", type=Path, help="folder to draw the GPU rows that there are in; measures nothing")
    options = parser.parse_args()
    if options.picture:
        print(picture(options.picture))
        return
    prompts = code_prompts(demo_pair()[0], options.prompts, PROMPT)
    rows = [row for k in DRAFTS for kv in (None, "fp8") for row in rows_of(kv, k, prompts)]
    environment = records.environment("cpu", options.commit)
    records.append("formats", [row | environment for row in rows])
    print(records.table(rows, COLUMNS))


if __name__ == "__main__":
    main()
