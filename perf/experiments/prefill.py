"""Taking in a prompt, against the forward pass of transformers with SDPA on the same weights and ids.

    python -m perf.experiments.prefill [--lengths 1024 8192] [--repeats 5]

Random weights of the 8B's shape. `us` is the passes over the prompt by CUDA events: ours leave K/V in the cache and end
before the last token, theirs return K/V and the last token's logits. `first_us` is the first token by the wall clock.
The two take turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from fastspec import FastSpecGenerator
from fastspec.runtime.engine import chunks_of
from fastspec.state import IDLE, RUNNING
from perf import records
from perf.inside import engine_of
from perf.workloads import WORKLOADS

COLUMNS = ("engine", "length", "us", "us_min", "first_us", "over_sdpa")


def model_8b() -> PreTrainedModel:
    """Random weights of Llama 3.1 8B's shape, on the GPU."""
    workload = WORKLOADS["8b+1b"]
    with torch.device("cuda"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(workload.config("target"), dtype=workload.dtype)
    model.eval()
    return model


def microseconds(call: Callable[[], object]) -> float:
    """Of one call, by events of the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(1e3 * start.elapsed_time(end))


def our_passes(generator: FastSpecGenerator, ids: list[int]) -> float:
    """Microseconds of the passes over a prompt, as a call queues them: replayed where they are captured."""
    engine = engine_of(generator)
    length = len(ids)
    with engine.on_device():
        state = engine.state.rows(0, 1)
        pages = engine.pages.reserve(0, length + 1)
        device = state.tokens.device
        state.tokens[0, :length] = torch.tensor(ids, device=device)
        state.block_table[0, : len(pages)] = torch.tensor(pages, device=device)
        state.lengths.fill_(length)
        state.finish.fill_(RUNNING)
        us = microseconds(lambda: engine.prefill_row(0, 0, chunks_of(engine.chunks, length - 1), draft=False))
        state.finish.fill_(IDLE)
        engine.pages.release_all()
    return us


def wall(call: Callable[[], object]) -> float:
    """Microseconds of one call by the clock."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start)


@torch.inference_mode()
def measured(model: PreTrainedModel, generator: FastSpecGenerator, length: int, repeats: int) -> list[records.Row]:
    """A row for each engine."""
    prompt = torch.randint(1, 128000, (1, length), generator=torch.Generator().manual_seed(length))
    ids, given = prompt[0].tolist(), prompt.cuda()

    def forward() -> object:
        return model(given, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()

    def first() -> object:
        return generator.generate([ids], max_new_tokens=1, num_speculative_tokens=0)

    forward(), first(), our_passes(generator, ids)
    rounds = [(our_passes(generator, ids), wall(first), microseconds(forward), wall(forward)) for _ in range(repeats)]
    ours, our_first, theirs, their_first = zip(*rounds, strict=True)
    ratio = statistics.median(ours) / statistics.median(theirs)
    return [
        {
            "bench": "prefill",
            "engine": engine,
            "length": length,
            "us": round(statistics.median(us)),
            "us_min": round(min(us)),
            "first_us": round(statistics.median(wall_us)),
            "over_sdpa": round(over, 3),
        }
        for engine, us, wall_us, over in (
            ("fastspec", ours, our_first, ratio),
            ("transformers, SDPA", theirs, their_first, 1.0),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--commit")
    given = parser.parse_args()
    model = model_8b()
    with FastSpecGenerator(model, max_length=max(given.lengths) + 64, max_batch_size=1, progress=False) as generator:
        rows = [row for length in given.lengths for row in measured(model, generator, length, given.repeats)]
    print(records.table(rows, COLUMNS))
    if given.out:
        records.append(given.out, [records.environment("cuda", given.commit) | row for row in rows])


if __name__ == "__main__":
    main()
