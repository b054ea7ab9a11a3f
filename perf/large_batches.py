"""Large batches on models of real shape with drawn weights: `python -m perf large_batches`.

Steps without drafts, with fixed numbers of drafts, and with the number that "auto" picks. Drafts are accepted at a set
rate (`SyntheticAcceptance`), because those of drawn weights never would be. The rows also have the temporary memory
that the plan allows for, and what the calls took at most.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fastspec import FastSpecGenerator, SyntheticAcceptance
from fastspec.adaptive.controller import AUTO
from perf import shaped
from perf.anchors import SHAPES, small, write_model
from perf.experiment import Arm, Experiment, generate, say, stats_of
from perf.records import Row

PROMPT, NEW, ROUNDS = 64, 64, 2
RATES = (0.3, 0.9)  # one at which drafts do not pay at 64 rows, and one at which they do
COLUMNS = ("batch", "exact", "acceptance", "k", "tok_s", "over_plain", "over_best", "ms_step", "steps_at",
           "workspace_gib", "taken_gib")  # fmt: skip


def rows_of_batch(generator: FastSpecGenerator, batch: int, ks: Sequence[int], new: int, vocab: int) -> list[Row]:
    """A row for each k and for "auto", whose calls take turns over the same prompts."""
    ids = torch.randint(vocab, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).tolist()
    arms: dict[int | str, Arm] = {k: Arm(generator, k) for k in ks}
    arms[AUTO] = Arm(generator, AUTO)
    for arm in arms.values():
        generate(arm, ids, min(new, 12))  # captures
    before = _allocated(generator, reset=True)
    first = {k: generate(arm, ids, 1).seconds for k, arm in arms.items()}
    calls = Experiment({str(k): arm for k, arm in arms.items()}, lambda arm, _: generate(arm, ids, new), ROUNDS).run()
    taken = _allocated(generator) - before
    speed = {k: statistics.median(call.tokens / (call.seconds - first[k]) for call in calls[str(k)]) for k in arms}
    best = max(ks, key=lambda k: speed[k])
    rows = []
    for k in arms:
        made = calls[str(k)]
        steps = [1e3 * (call.seconds - first[k]) / max(1, (call.steps or 1) - 1) for call in made]
        rows.append({
            "k": k,
            "status": "ok",
            "tok_s": round(speed[k], 1),
            "over_plain": round(speed[k] / speed[0], 3),
            "over_best": round(speed[k] / speed[best], 3),
            "ms_step": round(statistics.median(steps), 3),
            "steps_at": {str(n): count for n, count in stats_of(made[-1]).steps_at.items()},
            "workspace_gib": round(generator._settings.memory.workspace / 2**30, 3),
            "buffers_gib": round(generator._settings.memory.buffers / 2**30, 3),
            "taken_gib": round(taken / 2**30, 3),
        })  # fmt: skip
    return rows


def _allocated(generator: FastSpecGenerator, *, reset: bool = False) -> int:
    """The most bytes that torch had allocated on the device; with `reset` it forgets them, and tells those of now."""
    device = torch.device(generator.device)
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return torch.cuda.max_memory_allocated(device)


def rows_of(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Measures every batch at every rate. No case begins after `given.seconds`."""
    fit = small if given.small else dict
    dtype = torch.float32 if torch.device(given.device).type == "cpu" else torch.bfloat16
    begun, ks = time.perf_counter(), sorted({0, *given.ks})
    with tempfile.TemporaryDirectory() as scratch, shaped.drawn(given.device):
        target, draft = (write_model(Path(scratch, name), fit(SHAPES[name])) for name in ("8b", "1b"))
        for batch in given.batches:
            for rate in given.rates:
                labels: Row = {"batch": batch, "acceptance": rate, "acceptance_by": "SyntheticAcceptance"}
                labels["exact"] = not given.inexact
                if time.perf_counter() - begun > given.seconds:
                    yield [{**labels, "status": "no time"}]
                    continue
                options: dict[str, Any] = {"max_batch_size": batch, "max_length": PROMPT + given.new + 16}
                options |= {"num_speculative_tokens": max(ks), "verification": SyntheticAcceptance(rate=rate)}
                start = time.perf_counter()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that the text is not the model's: the rows say it
                    made = FastSpecGenerator(
                        target, draft, **options, dtype=dtype, device=given.device, draft_quantization=None,
                        prefix_cache=False, progress=False, exact=not given.inexact,
                    )  # fmt: skip
                with made:
                    rows = rows_of_batch(made, batch, ks, given.new, fit(SHAPES["8b"])["vocab_size"])
                say(f"{batch} rows, acceptance {rate}: {time.perf_counter() - start:.1f} s")
                yield [labels | row for row in rows]


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf large_batches`."""
    made.set_defaults(columns=COLUMNS)
    made.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256])
    made.add_argument("--ks", type=int, nargs="+", default=[1, 2], help="drafts a step; 0 is always measured")
    made.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="of acceptance")
    made.add_argument("--new", type=int, default=NEW, help="new tokens of a row")
    made.add_argument("--inexact", action="store_true", help="exact=False: other bits, other kernels beyond 160 rows")
    made.add_argument("--seconds", type=float, default=80.0, help="begin no case after so many")
    made.add_argument("--small", action="store_true", help="tiny models: shows that the measuring works")


def command_large_batches(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Steps over 64 to 256 rows, plain and with drafts, and what "auto" picks there."""
    about = {"bench": "large batches", "workload": "8b+1b, drawn weights", "prompt": PROMPT, "new": given.new}
    for rows in rows_of(given):
        yield [about | row for row in rows]
