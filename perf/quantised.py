"""Tokens per second of a planted pair by the formats of its weights: `python -m perf.quantised`, on a GPU.

One row for each pair of formats and each k, batch 1, greedy. A rate is that of the steps alone: the difference of two
calls of different length with the same prompt, the shorter of which pays for what comes before. Texts with drafts are
compared with those without, of the same target. `python -m perf.formats --picture FOLDER` draws the newest run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fastspec import FastSpecGenerator, GenerateOutput
from perf import records
from perf.e2e import Run
from perf.pairs import PlantedPair, plant
from perf.phases import traced
from perf.records import Row
from perf.workloads import WORKLOADS, Workload

STORED = "bf16"
CASES = ("bf16+bf16", "bf16+int4", "fp8+int4", "int4+int4")  # target + draft
PROMPT, NEW, SHORT = 128, 256, 16
COLUMNS = ("case", "k", "prompts", "tok_s", "ms_step", "tokens_per_step", "texts_equal")


@dataclass(slots=True)
class Sums:
    """What calls of two lengths differ by, summed over prompts."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0

    def add(self, short: GenerateOutput, long: GenerateOutput) -> None:
        """One prompt's calls."""
        self.seconds += long.stats.seconds - short.stats.seconds
        self.tokens += long.stats.emitted - short.stats.emitted
        self.steps += long.stats.steps - short.stats.steps

    def columns(self) -> Row:
        """Rates: tokens a second, milliseconds and tokens a step."""
        return {
            "tok_s": round(self.tokens / self.seconds, 1),
            "ms_step": round(1e3 * self.seconds / self.steps, 4),
            "tokens_per_step": round(self.tokens / self.steps, 3),
        }


@dataclass(slots=True)
class Pair:
    """A planted pair, its prompts, and the texts that its targets have given so far.

    Attributes:
        new: tokens of a long call.
        texts: by the target's format and the prompt's number.
    """

    workload: Workload
    models: PlantedPair
    prompts: list[list[int]]
    new: int
    device: str
    texts: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def generator(self, case: str, k: int) -> FastSpecGenerator:
        """One for a case such as "bf16+int4", and at most k drafts."""
        target, draft = (None if form == STORED else form for form in case.split("+"))
        return FastSpecGenerator(
            self.models.target,
            self.models.draft,
            target_quantization=target,
            draft_quantization=draft,
            num_speculative_tokens=max(1, k),
            max_batch_size=1,
            max_length=PROMPT + self.new + SHORT,
            dtype=self.workload.dtype,
            device=self.device,
            progress=False,
        )

    def call(self, generator: FastSpecGenerator, number: int, new: int, k: int) -> GenerateOutput:
        """`new` tokens behind a prompt."""
        output = generator.generate(
            [self.prompts[number]],
            max_new_tokens=new,
            num_speculative_tokens=k,
            eos_token_id=[],
            return_dict_in_generate=True,
        )
        assert isinstance(output, GenerateOutput)
        return output

    def measured(self, generator: FastSpecGenerator, case: str, k: int) -> Row:
        """A row. Without drafts half of the prompts are enough: all their steps are alike."""
        self.call(generator, 0, SHORT, k)  # captures
        sums, same, target = Sums(), True, case.split("+")[0]
        count = len(self.prompts) if k else -(-len(self.prompts) // 2)
        for number in range(count):
            short, long = self.call(generator, number, SHORT, k), self.call(generator, number, self.new, k)
            sums.add(short, long)
            text = long.new_tokens[0]
            same &= self.texts.setdefault((target, number), text) == text
        told = {"k": k, "batch": 1, "prompt": PROMPT, "new": self.new, "prompts": count}
        return {"case": case, **told, **sums.columns(), "texts_equal": same, "status": "ok"}

    def trace(self, generator: FastSpecGenerator, case: str, k: int) -> Row:
        """Where a step's time goes, by `perf.phases`."""
        models = (self.models.target, self.models.draft)
        run = Run(*models, [[self.prompts[0]]], self.new, (k,), False, self.device, self.workload.dtype)
        return {"case": case, "k": k, **traced(generator, run, k)}


def rows_of(pair: Pair, cases: Sequence[str], ks: Sequence[int], trace: int | None) -> Iterator[Row]:
    """The rows of every case, as they are measured; those of traces say so."""
    for case in cases:
        with pair.generator(case, max(ks)) as generator:
            for k in ks:
                yield {"bench": "quantised pair", "workload": pair.workload.name, **pair.measured(generator, case, k)}
            if trace:
                yield {"bench": "quantised trace", "workload": pair.workload.name, **pair.trace(generator, case, trace)}


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measures, prints each row as a line of JSON, and a table; --out appends rows to perf/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=sorted(set(WORKLOADS) - {"shipped"}), default="8b+1b")
    parser.add_argument("--acceptance", type=float, default=0.78)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="formats of target+draft, such as int8+int4")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 4, 5, 6])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--trace", type=int, help="also trace steps with so many drafts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="where there is no checkout")
    parser.add_argument("--out", help="a file of JSON lines; a bare name lies in perf/results")
    given = parser.parse_args(arguments)
    workload = WORKLOADS[given.workload]
    models = plant(workload, acceptance=given.acceptance, device=given.device)
    pair = Pair(workload, models, models.prompts(given.prompts, PROMPT), given.new, given.device)
    environment = records.environment(given.device, given.commit)
    rows = records.follow(rows_of(pair, given.cases, given.k, given.trace), environment, given.out)
    print(records.table([row for row in rows if "tok_s" in row], COLUMNS))
    return rows


if __name__ == "__main__":
    main()
