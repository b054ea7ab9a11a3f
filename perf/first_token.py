"""Time to the first token of prompts, on models of real shape with drawn weights: `python -m perf prompts`.

No prefix cache. vLLM's times of the same settings stand beside ours; they are of another day and another card. With
several `--formats` of the target's weights, each case is measured with every format, and compared with the first.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fastspec import FastSpecGenerator
from perf import shaped
from perf.anchors import SHAPES, small, write_model
from perf.experiment import Arm, generate, say
from perf.records import Row

CALLS = 5
STORED = "bf16"
COLUMNS = ("gpu", "format", "batch", "prompt", "k", "first_ms", "vllm_ms", "over_vllm", "over_first_format", "commit")
# milliseconds of vLLM 0.26 by batch and prompt: Llama-3.1-8B's shape in bf16 on one H100
VLLM = MappingProxyType({
    (1, 128): 10.8, (1, 512): 15.4, (1, 2048): 53.7, (1, 8192): 219, (1, 32000): 1188,
    (8, 512): 97.5, (8, 2048): 397, (64, 128): 201, (128, 128): 401,
})  # fmt: skip
Case = tuple[int, int]


def case_of(text: str) -> Case:
    """(batch, tokens of a prompt) of a text such as 8x512."""
    batch, _, prompt = text.partition("x")
    return int(batch), int(prompt)


def measured(generator: FastSpecGenerator, case: Case, k: int, vocab: int, vllm: float | None) -> Row:
    """The row of a case with k drafts: the median of CALLS calls, each with prompts of its own.

    vllm: milliseconds of vLLM in this case; None: not known.
    """
    batch, prompt = case
    draw, found = torch.Generator().manual_seed(1), []
    for _ in range(CALLS + 2):  # two that pay for captures
        ids = torch.randint(vocab, (batch, prompt), generator=draw).tolist()
        found.append(generate(Arm(generator, k), ids, 1).seconds * 1e3)
    first = round(statistics.median(found[2:]), 2)
    row: Row = {"bench": "first token", "workload": "8b+1b, drawn weights", "batch": batch, "prompt": prompt, "k": k}
    row |= {"status": "ok", "first_ms": first, "calls": CALLS}
    return row | ({} if vllm is None else {"vllm_ms": vllm, "over_vllm": round(first / vllm, 3)})


def rows_of(
    cases: list[Case], ks: list[int], device: str, formats: Sequence[str] = (STORED,), *, tiny: bool = False
) -> Iterator[list[Row]]:
    """Measures cases, with a generator of its own for each format, that is as large as the case needs."""
    fit = small if tiny else dict
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    vocab = fit(SHAPES["8b"])["vocab_size"]
    with tempfile.TemporaryDirectory() as scratch, shaped.drawn(device):
        target, draft = (write_model(Path(scratch, name), fit(SHAPES[name])) for name in ("8b", "1b"))
        for batch, prompt in cases:
            base: dict[int, float] = {}  # k -> time of the first format
            for form in formats:
                start = time.perf_counter()
                options: dict[str, Any] = {"max_batch_size": batch, "max_length": prompt + 32, "dtype": dtype}
                options["target_quantization"] = None if form == STORED else form
                if max(ks):
                    options |= {"draft": draft, "num_speculative_tokens": max(ks), "draft_quantization": None}
                vllm = None if tiny or form != STORED else VLLM.get((batch, prompt))
                with FastSpecGenerator(target, **options, device=device, prefix_cache=False, progress=False) as made:
                    rows = [measured(made, (batch, prompt), k, vocab, vllm) for k in ks]
                for row in rows:
                    first = row["first_ms"]
                    row |= {"format": form, "over_first_format": round(first / base.setdefault(row["k"], first), 3)}
                say(f"{batch} prompts of {prompt}, {form}: {time.perf_counter() - start:.1f} s")
                yield rows


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf prompts`."""
    made.set_defaults(columns=COLUMNS)
    made.add_argument("--cases", type=case_of, nargs="+", default=list(VLLM), help="such as 8x512: batch and tokens")
    made.add_argument("--ks", type=int, nargs="+", default=[0, 4], help="drafts a step; 0 is plain")
    made.add_argument("--formats", nargs="+", default=[STORED], help=f"of the target: {STORED}, fp8, int8, int4 ..")
    made.add_argument("--small", action="store_true", help="tiny models: shows that the measuring works")


def command_prompts(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Time to the first token of prompts, beside vLLM's as measured on another day."""
    yield from rows_of(given.cases, given.ks, given.device, given.formats, tiny=given.small)
