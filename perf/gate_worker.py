"""One side of the gate: a process with one tree's fastspec, which measures a call whenever it is told to.

It is started by perf.gate, reads requests as lines of JSON from stdin, and answers each with one line. Both sides run
the gate's own perf, so that both are measured alike. The tree may be older and have its modules elsewhere, so this
module, and all that it imports from perf, uses only public names of fastspec.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import fastspec
from fastspec import FastSpecGenerator
from perf.models import Run, add_pair_options, batches_of, generator_of, opened
from perf.records import Row
from perf.step_hooks import around_steps
from perf.timing import event_time

SETTLE = 4  # steps before the first that is timed: prompts are passed and steps launched ahead by then
CYCLES = 10**7  # of the pause that shows how long a cycle is


def timed_call(generator: FastSpecGenerator, run: Run, index: int, k: int) -> Row:
    """Milliseconds of a step, and tokens a step and row."""
    stream = generator.stream(
        run.batches[index % len(run.batches)], max_new_tokens=run.new, num_speculative_tokens=k, **run.options(index)
    )
    stamps, tokens, row_steps = [], 0, 0
    for emitted in stream:
        stamps.append(time.perf_counter())
        tokens += sum(map(len, emitted.values()))
        row_steps += len(emitted)
    if len(stamps) < SETTLE + 2:
        raise ValueError(f"{run.new} new tokens make {len(stamps)} steps at k = {k}; ask for more")
    step = (stamps[-1] - stamps[SETTLE]) / (len(stamps) - 1 - SETTLE)
    return {"ms": step * 1e3, "tokens_per_pass": tokens / row_steps}


class Delay:
    """Makes every step longer by a share of what it takes.

    On CUDA a kernel that counts cycles follows each step in its stream, as a slower kernel would; launches run ahead
    all the same. On a CPU the host waits, busily.
    """

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._cycle = event_time(lambda: torch.cuda._sleep(CYCLES), repeats=5).median / CYCLES if self._cuda else 0.0
        self.seconds = 0.0

    @contextmanager
    def __call__(self, key: str) -> Iterator[None]:
        """Around the launch of a step."""
        yield
        if self._cuda and self.seconds:
            torch.cuda._sleep(round(self.seconds / self._cycle))
        elif self.seconds:
            end = time.perf_counter() + self.seconds
            while time.perf_counter() < end:
                pass


def planted(
    generator: FastSpecGenerator, run: Run, share: float
) -> tuple[AbstractContextManager[None], dict[int, float], Delay]:
    """A delay of every step by that share of what it takes now: to enter, seconds by k, and the delay itself."""
    delays = {}
    for k in run.ks:
        steps = [timed_call(generator, run, index, k)["ms"] for index in range(3)]
        delays[k] = share * sorted(steps)[1] / 1e3
    delay = Delay(run.device)
    return around_steps(generator, delay), delays, delay


def serve(answer: Callable[[Row], None], requests: Any, given: argparse.Namespace) -> None:
    """Opens the pair and a generator, says so, and then answers requests until they end."""
    with ExitStack() as stack:
        models = stack.enter_context(opened(given))
        work = batches_of(models.prompts(given.batch * given.calls, given.prompt), given.batch)
        run = models.run(work, new=given.new, ks=tuple(given.k), sampled=given.sampled)
        generator = stack.enter_context(generator_of(run, k=max(run.ks)))
        models.let_go()  # the generator has copies, and both sides must fit on one GPU
        for k in run.ks:
            for index in range(2):
                timed_call(generator, run, index, k)
        delays: dict[int, float] = {}
        if given.plant:
            around, delays, delay = planted(generator, run, given.plant)
            stack.enter_context(around)
        answer({"ready": str(Path(fastspec.__file__).resolve().parent.parent)})
        for line in requests:
            asked = json.loads(line)
            if given.plant:
                delay.seconds = delays[asked["k"]]
            answer(timed_call(generator, run, asked["index"], asked["k"]))


def main() -> None:
    """Answers on the process's stdout; all other output goes to stderr."""
    parser = argparse.ArgumentParser()
    add_pair_options(parser, None)
    parser.add_argument("--device", required=True)
    for name in ("batch", "prompt", "new", "calls"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--plant", type=float, default=0.0)
    parser.add_argument("--k", type=int, nargs="+", required=True)
    parser.add_argument("--sampled", action="store_true")
    out, sys.stdout = sys.stdout, sys.stderr

    def answer(row: Row) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    serve(answer, sys.stdin, parser.parse_args())


if __name__ == "__main__":
    main()
