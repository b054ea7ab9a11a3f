"""Waiting times of requests that arrive at once: `python -m perf arrivals`, models of real shape, drawn weights.

Requests are submitted together to an idle generator, and each is read as a stream. A row has the time to the first
token and the time between two tokens of a stream, median and 99th percentile, over all requests of all rounds. Tokens
that arrive together have no time between them. Drafts are accepted at a set rate (`SyntheticAcceptance`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fastspec import FastSpecGenerator, SyntheticAcceptance
from perf import shaped
from perf.anchors import SHAPES, small, write_model
from perf.experiment import say
from perf.records import Row
from perf.serving import share_of

PROMPT, NEW, ROUNDS = 128, 128, 3
TOGETHER = 2e-4  # seconds: tokens that are closer were read at once
COLUMNS = ("arrivals", "k", "tok_s", "first_ms", "gap_ms", "acceptance")


async def _times(generator: FastSpecGenerator, prompts: list[list[int]], new: int, k: int) -> list[list[float]]:
    """Seconds at which each request was submitted and at which each of its tokens was read."""

    async def one(ids: list[int]) -> list[float]:
        found = [time.perf_counter()]
        options: dict[str, Any] = {"max_new_tokens": new, "num_speculative_tokens": k, "do_sample": False}
        async for _ in generator.submit(ids, **options, eos_token_id=[]):
            found.append(time.perf_counter())
        return found

    return list(await asyncio.gather(*map(one, prompts)))


def row_of(generator: FastSpecGenerator, arrivals: int, k: int, new: int, vocab: int) -> Row:
    """The row of so many requests with k drafts, after two rounds that pay for captures."""
    draw, first, gaps, speeds = torch.Generator().manual_seed(arrivals), list[float](), list[float](), list[float]()
    for number in range(ROUNDS + 2):
        ids = torch.randint(vocab, (arrivals, PROMPT), generator=draw).tolist()
        found = asyncio.run(_times(generator, ids, new, k))
        if any(len(times) != new + 1 for times in found):
            raise RuntimeError(f"streams of {sorted({len(times) - 1 for times in found})} tokens, wanted {new}")
        if number < 2:
            continue
        first += [1e3 * (times[1] - times[0]) for times in found]
        between = [1e3 * (b - a) for times in found for a, b in pairwise(times[1:])]
        gaps += [gap for gap in between if gap > 1e3 * TOGETHER]
        speeds.append(arrivals * new / (max(times[-1] for times in found) - min(times[0] for times in found)))
    return {
        "arrivals": arrivals,
        "k": k,
        "status": "ok",
        "calls": ROUNDS,
        "tok_s": round(statistics.median(speeds), 1),
        "first_ms": [round(share_of(first, share), 1) for share in (0.5, 0.99)],
        "gap_ms": [round(share_of(gaps, share), 2) for share in (0.5, 0.99)],
    }


def rows_of(given: argparse.Namespace) -> Iterator[Row]:
    """A row for each number of arrivals and each k."""
    fit = small if given.small else dict
    dtype = torch.float32 if torch.device(given.device).type == "cpu" else torch.bfloat16
    with tempfile.TemporaryDirectory() as scratch, shaped.drawn(given.device):
        target, draft = (write_model(Path(scratch, name), fit(SHAPES[name])) for name in ("8b", "1b"))
        options: dict[str, Any] = {"max_batch_size": max(given.arrivals), "max_length": PROMPT + given.new + 16}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the text is not the model's: the rows say it
            made = FastSpecGenerator(
                target, draft, **options, num_speculative_tokens=max(1, *given.ks), device=given.device, dtype=dtype,
                verification=SyntheticAcceptance(rate=given.rate), draft_quantization=None, prefix_cache=False,
                progress=False,
            )  # fmt: skip
        with made:
            for arrivals in given.arrivals:
                for k in given.ks:
                    start = time.perf_counter()
                    row = row_of(made, arrivals, k, given.new, fit(SHAPES["8b"])["vocab_size"])
                    say(f"{arrivals} arrivals, k = {k}: {time.perf_counter() - start:.1f} s")
                    yield {**row, "acceptance": given.rate if k else None}


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf arrivals`."""
    made.set_defaults(columns=COLUMNS)
    made.add_argument("--arrivals", type=int, nargs="+", default=[1, 8, 32, 64], help="requests at once")
    made.add_argument("--ks", type=int, nargs="+", default=[0, 4], help="drafts a step; 0 is plain")
    made.add_argument("--rate", type=float, default=0.78, help="of acceptance")
    made.add_argument("--new", type=int, default=NEW, help="new tokens of a request")
    made.add_argument("--small", action="store_true", help="tiny models: shows that the measuring works")


def command_arrivals(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Time to the first token, and between tokens, of requests that arrive at once."""
    about = {"bench": "arrivals", "workload": f"8b+1b, drawn weights, prompt {PROMPT}, {given.new} new, greedy"}
    for row in rows_of(given):
        yield [about | row]
