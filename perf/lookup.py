"""Drafts by lookup: the time of the search, and decoding where the text is known or not: `python -m perf lookup`.

The model has the shape of Llama-3.1-8B and drawn weights. Its text by plain decoding, with edits in some of the tokens,
is the prediction of the arms with lookup. So they write a text that is its prediction with edits.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastspec import FastSpecGenerator, Suffix
from fastspec.kernels import reference
from fastspec.kernels.reference.lookup import LookUp, Predictions, SharedTexts
from fastspec.proposers.texts import TextIndex, rungs_between
from perf import shaped
from perf.anchors import SHAPES, small, write_model
from perf.experiment import Arm, Call, Experiment, generate, rate, same_text, say, stats_of, step_sums, token_sums
from perf.records import Row
from perf.timing import graph_time

IDS = 128256
MIN_N, MAX_N = 2, 16
EDITED = 0.05  # share of the tokens that differ
PROMPT, NEW = 128, 256
COLUMNS = ("workload", "batch", "k", "engine", "us", "tok_s", "tokens_per_pass", "speed_up", "text_equal")
LAST = 2  # tokens of an edit at the end of a row
DRAWN, COPY, EDIT = "nothing matches", "a copy", "behind an edit"


@dataclass(frozen=True, slots=True)
class Search:
    """One search that is timed.

    Attributes:
        width: tokens of a row. predicted: of its prediction, 0: none. table: of each of two shared texts, 0: none.
        content: DRAWN, COPY or EDIT: what stands before the place at which rows go on, in every text.
        k: number of drafts.
    """

    width: int
    predicted: int = 0
    table: int = 0
    content: str = EDIT
    k: int = 15

    @property
    def words(self) -> str:
        """The setting, for a row."""
        sizes = f"rows of {self.width} tokens, prediction {self.predicted}, two texts of {self.table}"
        return f"{sizes}, {self.content}"


SEARCHES = (
    Search(2048, k=8),
    Search(2048, 1024),
    Search(2048, 4096),
    Search(2048, 0, 65536, COPY),
    Search(2048, 4096, 65536, DRAWN),
    Search(2048, 4096, 65536, COPY),
    Search(2048, 4096, 65536),
    Search(16384, 4096, 65536),
)


def with_edits(text: Sequence[int], share: float, ids: int, seed: int) -> list[int]:
    """A text with another token at a share of its places."""
    rng = random.Random(seed)
    return [rng.randrange(ids) if rng.random() < share else token for token in text]


def texts_of(search: Search, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of rows and of predictions, int64; rows repeat themselves and end in the middle of their prediction."""
    generator = torch.Generator().manual_seed(search.width)
    predicted = torch.randint(IDS, (rows, max(1, search.predicted)), generator=generator)
    tokens = torch.randint(IDS, (rows, search.width), generator=generator)
    if search.content != DRAWN:
        half = search.width // 2
        tokens[:, half:] = tokens[:, : search.width - half]
        size = min(half, search.predicted // 2)
        tokens[:, search.width - size :] = predicted[:, :size]
        for row in range(rows):
            copied = tokens[row, half:].tolist()
            tokens[row, half:] = torch.tensor(with_edits(copied, EDITED, IDS, row))
        if search.content == COPY:
            tokens[:, -MAX_N:] = predicted[:, size - MAX_N : size] if size else tokens[:, half - MAX_N : half]
        else:
            tokens[:, -LAST:] = torch.randint(IDS, (rows, LAST), generator=generator)
    return tokens.to(device), predicted.to(device)


def call_of(search: Search, rows: int, device: torch.device) -> LookUp:
    """The arguments of a search."""
    tokens, predicted = texts_of(search, rows, device)
    lengths = torch.full((rows,), search.width, device=device)
    given = Predictions(predicted, torch.full_like(lengths, predicted.shape[1]), lengths // 2)
    shared = []
    for number in range(2 if search.table else 0):
        index = TextIndex(search.table, rungs_between(MIN_N, MAX_N), device)
        text = torch.randint(IDS, (search.table,), generator=torch.Generator().manual_seed(number)).tolist()
        for row in range(0 if search.content == DRAWN else min(rows, search.table // search.width)):
            end = (row + 1) * search.width - (LAST if search.content == EDIT else 0)
            text[row * search.width : end] = tokens[row, : end - row * search.width].tolist()
        index.write(0, text, number, 0)
        index.sort()
        shared.append(SharedTexts(index.table, torch.zeros_like(lengths)))
    return LookUp(tokens, lengths, MIN_N, MAX_N, given if search.predicted else None, tuple(shared), per_match=2)


def search_rows(searches: Sequence[Search], batches: Sequence[int], device: torch.device) -> Iterator[Row]:
    """Times of the searches: of the kernels on a GPU, else of the torch definition."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        from fastspec.kernels.lookup.dispatch import look_up
    else:
        look_up = reference.look_up
    for search in searches:
        for rows in batches:
            call = call_of(search, rows, device)
            counts = look_up(call, search.k)[1]
            yield {
                "op": "look up",
                "engine": "kernel" if on_gpu else "torch",
                "batch": rows,
                "workload": search.words,
                "k": search.k,
                "us": round(graph_time(partial(look_up, call, search.k), repeats=9, device=device).us, 1),
                "drafts": int(counts.sum()),
            }


def compared(name: str, k: int | str, calls: Sequence[Call], plain: Sequence[Call]) -> Row:
    """The row of one arm of decoding, over plain decoding of the same prompts."""
    speeds = [rate(*token_sums(each)) for each in (calls, plain)]
    steps = [step_sums(call) for call in calls]
    emitted, taken = ([value for each in steps for value in each[column]] for column in (0, 1))
    same, of = same_text(calls, plain)
    return {
        "workload": name,
        "batch": len(calls[0].text),
        "prompt": PROMPT,
        "new": calls[0].tokens // len(calls[0].text),
        "k": k,
        "speed_up": round(speeds[0] / speeds[1], 3),
        "tok_s": round(speeds[0], 1),
        "plain_tok_s": round(speeds[1], 1),
        "tokens_per_pass": round(rate(emitted, taken), 2),
        "steps_at": {str(key): count for key, count in stats_of(calls[-1]).steps_at.items()},
        "text_equal": same == of,
    }


def decode_rows(
    generator: FastSpecGenerator, batch: int, ks: Sequence[int | str], new: int, rounds: int, ids: int
) -> Iterator[Row]:
    """Rows of decoding with predictions that the text repeats, and with some that nothing matches."""
    drawn = torch.Generator().manual_seed(batch)
    prompts = torch.randint(ids, (batch, PROMPT), generator=drawn).tolist()
    plain = Arm(generator, 0)
    written = generate(plain, prompts, new).text
    known = [with_edits(text, EDITED, ids, row) for row, text in enumerate(written)]
    strange = torch.randint(ids, (batch, new), generator=drawn).tolist()
    arms: dict[str, tuple[Arm, dict[str, Any]]] = {"plain": (plain, {})}
    names = "the text is its prediction with edits in 5% of its tokens", "a prediction that nothing matches"
    arms |= {f"{names[0]}|{k}": (Arm(generator, k), {"predictions": known}) for k in ks}
    arms[f"{names[1]}|auto"] = Arm(generator, "auto"), {"predictions": strange}

    def measure(arm: tuple[Arm, dict[str, Any]], number: int) -> Call:
        return generate(arm[0], prompts, new, **arm[1])

    for arm in arms.values():
        measure(arm, 0)  # captures its steps
    calls = Experiment(arms, measure, rounds, mirrored=True).run()
    for label, found in calls.items():
        if label != "plain":
            name, k = label.split("|")
            yield compared(f"8b, {name}", k if k == "auto" else int(k), found, calls["plain"])


def model_rows(given: argparse.Namespace) -> Iterator[Row]:
    """Rows of all batches, by one generator."""
    fields = small(SHAPES["8b"]) if given.small else SHAPES["8b"]
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    with tempfile.TemporaryDirectory() as scratch, shaped.drawn(given.device):
        place = write_model(Path(scratch, "8b"), fields)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # drafts may not pay: the rows say it
            start = time.perf_counter()
            generator = FastSpecGenerator(
                place,
                proposer=Suffix(MIN_N, MAX_N, prediction_tokens=given.new),
                num_speculative_tokens="auto",
                max_batch_size=max(given.batches),
                max_length=PROMPT + given.new + 16,
                dtype=dtype,
                device=given.device,
                prefix_cache=False,
                progress=False,
            )
            with generator:
                say(f"generator made in {time.perf_counter() - start:.1f} s")
                for batch in given.batches:
                    for row in decode_rows(generator, batch, given.k, given.new, given.rounds, fields["vocab_size"]):
                        yield {**row, "seconds": round(time.perf_counter() - start, 1)}


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options of `perf lookup`."""
    made.set_defaults(columns=COLUMNS)
    made.add_argument("--only", choices=("search", "model"), help="default: both")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    made.add_argument("--k", type=int, nargs="+", default=[8, 15])
    made.add_argument("--new", type=int, default=NEW, help="new tokens of a row")
    made.add_argument("--rounds", type=int, default=3, help="calls of each arm")
    made.add_argument("--small", action="store_true", help="a tiny model and short texts: shows that it works")


def command_lookup(given: argparse.Namespace) -> Iterator[list[Row]]:
    """Time of the search for drafts, and decoding of an 8B with and without a known text."""
    searches = [replace(one, width=256, predicted=one.predicted // 16, table=one.table // 64) for one in SEARCHES]
    rows = search_rows(searches if given.small else SEARCHES, given.batches, torch.device(given.device))
    for kind, made in (("search", rows), ("model", model_rows(given))):
        if given.only in (None, kind):
            for row in made:
                say(f"{row['workload']}, batch {row['batch']}: {row.get('us') or row['speed_up']}")
                yield [{"bench": "lookup", "status": "ok", **row}]
