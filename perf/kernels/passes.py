"""Times whole passes of a target: the next tokens of every sequence at once, from the embedding to the logits.

Milliseconds a pass from graph replays (perf.timing), with random weights of a workload's shape behind a cache of random
keys. A pass reads all weights, so they are cold. `share` is what part of the read ceiling, measured in the same run,
the bytes of weights, K and V come to; `over_one` how many times as long it takes as one row behind as many positions.

Passes are named by sequences and tokens of each: 8x5 are 8 sequences with k = 4. --room is how many positions the
launch has room for where that is more than there are, as in captured steps over a longer cache.

Usage: python -m perf.kernels.passes [--workload 8b+1b] [--passes 1x1 1x8 8x8] [--positions 200 1000] [--room 4096]
       [--repeats 9] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fastspec import FastSpecGenerator, NGram
from fastspec.engine.engine import Engine
from fastspec.shapes import GREEDY, blocks
from fastspec.state import RUNNING
from fastspec.step import score
from perf import timing
from perf.pairs import unplanted
from perf.step_hooks import engine_of
from perf.workloads import WORKLOADS, Bytes, Workload

GPU_ONLY = True  # for perf.bench
PASSES = ["1x1", "1x5", "1x8", "8x1", "8x5", "8x8", "16x4", "32x1", "32x2", "32x5"]
POSITIONS = [200, 1000]
REPEATS = 9


@contextmanager
def engine_for(
    workload: Workload, passes: list[tuple[int, int]], length: int, device: torch.device
) -> Iterator[Engine]:
    """An engine over random weights, with room for these passes of rows of `length` tokens."""
    model = unplanted(workload.config("target"), workload.dtype, device)
    most_rows, most_tokens = (max(sizes) for sizes in zip(*passes, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing is generated: what a generator advises has no bearing
        generator = FastSpecGenerator(
            model,
            proposer=NGram(),
            num_speculative_tokens=max(1, most_tokens - 1),
            max_batch_size=most_rows,
            max_length=length,
            graphs=False,
            progress=False,
        )
    with generator:
        engine = engine_of(generator)
        with engine.on_device():
            yield engine


def fill(engine: Engine, positions: int) -> None:
    """Every row has `positions` tokens, drafts behind them, and pages of its own with random keys and values."""
    state, cache = engine.state, engine.modules.target.cache  # type: ignore[attr-defined]
    state.reset()
    engine.pages.release_all()
    for row in range(state.batch):
        pages = engine.pages.reserve(row, state.tokens.shape[1])
        state.block_table[row, : len(pages)] = torch.tensor(pages, device=state.block_table.device)
    vocab = engine.modules.target.vocab_size
    for ids in (state.tokens, state.draft_tokens):
        ids.copy_(torch.randint(vocab, ids.shape, device=ids.device))
    cache.keys.normal_()
    cache.values.normal_()
    state.lengths.fill_(positions)
    state.limits.fill_(state.tokens.shape[1] - 1)
    state.finish.fill_(RUNNING)


def pass_rows(
    workload: Workload,
    passes: list[tuple[int, int]],
    positions: list[int],
    device: torch.device,
    *,
    room: int = 0,
    repeats: int = REPEATS,
) -> Iterator[dict[str, Any]]:
    """A row for each pass behind each number of positions; one row alone is timed first, whether asked for or not."""
    ceiling = timing.read_ceiling(device=device)
    read = Bytes.of(workload.config("target"), workload.dtype)
    longest = max(*positions, room) + max(tokens for _, tokens in passes)
    with engine_for(workload, [(1, 1), *passes], longest + 1, device) as engine:
        for behind in positions:
            fill(engine, behind)
            one = 0.0
            for rows, tokens in dict.fromkeys([(1, 1), *passes]):
                shape = engine.shapes.step(tokens - 1, GREEDY, None, behind)
                shape = replace(shape, num_blocks=max(shape.num_blocks, blocks(room)))
                call = partial(score, engine.modules, engine.state.rows(0, rows), shape)
                found = timing.graph_time(call, repeats=repeats, device=device)
                one = one or found.us
                size = read.weights + rows * (behind + tokens - 1) * read.cache_token
                yield {
                    "op": f"{workload.name} target pass",
                    "shape": f"{rows}x{tokens} behind {behind}" + (f", room for {room}" if room else ""),
                    "rows": rows * tokens,
                    "us": round(found.us, 1),
                    "us_iqr": round(found.spread * 1e6, 2),
                    "bytes": size,
                    "share": round(size / found.us / 1e3 / ceiling, 3),
                    "over_one": round(found.us / one, 3),
                    "read_gb_s": round(ceiling),
                }


def sizes(text: str) -> tuple[int, int]:
    """(sequences, tokens of each) of a pass's name."""
    rows, tokens = (int(part) for part in text.split("x"))
    return rows, tokens


def rows(*, device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """For `python -m perf kernels`."""
    names = PASSES[:3] if quick else PASSES
    yield from pass_rows(
        WORKLOADS["8b+1b"], [sizes(name) for name in names], POSITIONS[:1] if quick else POSITIONS, device
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=[name for name in WORKLOADS if name != "shipped"], default="8b+1b")
    parser.add_argument("--passes", type=sizes, nargs="+", default=[sizes(name) for name in PASSES])
    parser.add_argument("--positions", type=int, nargs="+", default=POSITIONS)
    parser.add_argument("--room", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    given = parser.parse_args(arguments)
    options = {"room": given.room, "repeats": given.repeats}
    for row in pass_rows(WORKLOADS[given.workload], given.passes, given.positions, given.device, **options):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
