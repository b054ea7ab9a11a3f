"""Trial: many decode steps in one launch, by a conditional WHILE node around the captured step.

The loop in the graph makes up to n steps and is left as soon as a row finishes; the host reads their results from the
ring while they run. It is set against what fastspec does (one launch a step, some launched ahead), against replays
that nobody reads, and against n steps in a row in one graph, which cannot be left. All decode the same prompt, from
the second step to the end, and their tokens must be the same.

    python -m perf.experiments.while_node

Needs a GPU of sm_90 or later and cuda-bindings, which torch's own wheels bring along. Columns: `us` per step, by the
wall clock until the last result is there; `gap_us`, from a second run with a time stamp on both sides of every step,
is the median time from the end of one step to the start of the next; `device_steps` counts the steps that were run
until the device had nothing more to do, `steps` those that it took.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastspec import FastSpecGenerator, demo_pair
from fastspec.graphs.keys import StepKey
from fastspec.graphs.results import SLOTS
from fastspec.inputs.options import RowOptions
from fastspec.runtime.engine import Engine
from fastspec.runtime.scheduler import Request, Scheduler
from fastspec.shapes import GREEDY
from perf import records
from perf.experiments.while_graph import (
    Fill,
    Launch,
    WhileGraph,
    bare_costs,
    child_node,
    fill_by_capture,
    fill_with_child,
    instantiated,
    launch_kernel,
    new_graph,
)
from perf.timing import summarise

DEPTHS, SIZES = (1, 2, 3, 4), (8, 16, 32)
STAMPS = 8192
COLUMNS = ("variant", "n", "ahead", "us", "us_min", "us_iqr", "gap_us", "steps", "device_steps", "same_tokens")
PROMPT = "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n"

_pools: list[torch.cuda.MemPool] = []  # graphs go on using them

Loop = Iterator[dict[int, list[int]]]
Go = Callable[[Loop, Request], None]  # makes the steps after the first


@dataclass(slots=True)
class Step:
    """One decode step of one row: as a callable, and captured."""

    body: Launch
    graph: torch.cuda.CUDAGraph


class Trial:
    """One engine and one prompt, which all variants decode.

    Args:
        engine: captured for one greedy row with all its drafts.
        prompt: token ids.
        new: tokens at most.

    Attributes:
        plain, stamped: the step, and the step between two time stamps.
        expected: the tokens.
        steps: what they take.
    """

    def __init__(self, engine: Engine, prompt: list[int], new: int) -> None:
        self.engine, self._prompt, self._new = engine, prompt, new
        self.graphs: dict[Hashable, Any] = engine.runner._graphs  # type: ignore[attr-defined]
        shape = engine.shape(engine.max_drafts, GREEDY, None, len(prompt) + new)
        self.key = StepKey(1, shape)
        engine.capture(1, shape)
        self.plain = Step(engine._body(1, shape), self.graphs[self.key].graph)
        self.stamps = torch.zeros(STAMPS, dtype=torch.int64, device=engine.state.finish.device)
        engine.runner.capture("stamped", self._stamped, lambda: engine._idle(1))
        self.stamped = Step(self._stamped, self.graphs["stamped"].graph)
        self.expected, self.steps = self.decode(run_ahead(self, 1))

    def _stamped(self) -> None:
        arguments = ((self.stamps.data_ptr(), STAMPS), (ctypes.c_ulonglong, ctypes.c_longlong))
        launch_kernel("stamp", arguments, 1)
        self.plain.body()
        launch_kernel("stamp", arguments, 1)

    def decode(self, go: Go, stop_ids: tuple[int, ...] = ()) -> tuple[list[int], int]:
        """Tokens and steps of a decode of which `go` makes all steps but the first: both as the device has them."""
        request = Request(list(self._prompt), self._new, RowOptions(0.0, 0, 1.0, 0.0, seed=0))
        engine, drafts = self.engine, self.engine.max_drafts
        engine.runner.depth = 1
        loop = iter(Scheduler(engine, [request], stop_ids, GREEDY, lambda made: drafts))
        before = int(engine.ring.outbox.counter)
        next(loop)
        torch.cuda.synchronize()
        go(loop, request)
        torch.cuda.synchronize()
        engine.ring.resync()
        length = int(engine.state.lengths[0])
        tokens: list[int] = engine.state.tokens[0, len(self._prompt) : length].tolist()
        return tokens, engine.ring.launched - before


def run_ahead(trial: Trial, depth: int, *, stamped: bool = False) -> Go:
    """What fastspec does: a replay a step, `depth` of them launched before the first is read."""

    def go(loop: Loop, request: Request) -> None:
        kept = trial.graphs[trial.key]
        trial.graphs[trial.key] = trial.graphs["stamped"] if stamped else kept
        trial.engine.runner.depth = depth
        try:
            for _ in loop:
                pass
        finally:
            trial.graphs[trial.key] = kept

    return go


def unread(trial: Trial, launch: Launch, each: int) -> Go:
    """The steps in launches of `each` that nobody reads; the last one may have steps without anything to do."""

    def go(loop: Loop, request: Request) -> None:
        for _ in range(-(-(trial.steps - 1) // each)):
            launch()
        torch.cuda.current_stream().synchronize()

    return go


def looping(trial: Trial, graph: WhileGraph, n: int, ahead: int) -> Go:
    """Launches of loops of up to n steps, `ahead` of them queued; the host reads the steps one by one."""

    def go(loop: Loop, request: Request) -> None:
        graph.control[0] = n
        read_loops(trial.engine, request, graph.launch, n, ahead)

    return go


def read_loops(engine: Engine, request: Request, launch: Launch, n: int, ahead: int) -> None:
    """Reads the steps of launches, each of up to n steps and left when the row finishes, until it has finished.

    Args:
        launch: queues one of them.
        ahead: launches under way at once.

    Raises:
        ValueError: the ring could be overrun.
    """
    if n * ahead > SLOTS:
        raise ValueError(f"{ahead} launches of {n} steps are more than the ring's {SLOTS} slots")
    queued = 0
    while request.finish_reason is None:
        while queued < ahead:
            launch()
            queued += 1
        for _ in range(n):
            engine.ring.launched += 1
            request.record(engine.ring.read(engine.ring.launched, 1)[0], engine.max_drafts)
            if request.finish_reason is not None:
                break
        queued -= 1


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of making the steps: with the plain step, and with the stamped one."""

    name: str
    n: int
    ahead: int
    go: Go
    stamped: Go


def variants(trial: Trial) -> list[Variant]:
    """Those that need no condition."""
    listed = [
        Variant("run-ahead replay", 1, depth, run_ahead(trial, depth), run_ahead(trial, depth, stamped=True))
        for depth in DEPTHS
    ]
    steps = (trial.plain, trial.stamped)
    listed.append(Variant("bare replays", 1, 0, *(unread(trial, step.graph.replay, 1) for step in steps)))
    for n in SIZES:
        listed.append(Variant("unrolled", n, 0, *(unread(trial, unrolled(step, n), n) for step in steps)))
    return listed


def unrolled(step: Step, n: int) -> Launch:
    """One graph of n steps in a row."""
    graph = new_graph()
    after: list[Any] = []
    for _ in range(n):
        after = [child_node(graph, after, step.graph)]
    return instantiated(graph)


def loops(trial: Trial, refused: list[str]) -> dict[str, tuple[WhileGraph, WhileGraph]]:
    """Loops over the plain and the stamped step by how they are built; adds to `refused` what the driver refused."""
    pool = torch.cuda.MemPool()
    ways: dict[str, Callable[[Step], Fill]] = {
        "WHILE, child graph": lambda step: fill_with_child(step.graph),
        "WHILE, captured": lambda step: fill_by_capture(step.body, pool, pdl=False),
        "WHILE, captured, PDL": lambda step: fill_by_capture(step.body, pool, pdl=True),
    }
    built = {}
    finish = trial.engine.state.finish[:1]
    for name, way in ways.items():
        try:
            built[name] = WhileGraph(finish, way(trial.plain)), WhileGraph(finish, way(trial.stamped))
        except RuntimeError as error:
            refused.append(f"{name}: {error}")
    _pools.append(pool)
    return built


def measured(trial: Trial, listed: list[Variant], rounds: int) -> list[records.Row]:
    """A row per variant: time per step over rounds in turn, gaps, and whether its tokens are the expected ones."""
    samples: list[list[float]] = [[] for _ in listed]
    outcomes: list[list[tuple[list[int], int]]] = [[] for _ in listed]
    for _ in range(rounds + 1):
        for index, variant in enumerate(listed):
            outcomes[index].append(trial.decode(timed(variant.go, samples[index])))
    rows = []
    for variant, taken, seen in zip(listed, samples, outcomes, strict=True):
        gap, stamped = gap_of(trial, variant)
        made = seen[-1][1] if variant.ahead == 0 else trial.steps
        timing = summarise([seconds / (made - 1) for seconds in taken[1:]], "wall", "cuda").row()
        same = all(tokens == trial.expected for tokens in (stamped, *(tokens for tokens, _ in seen)))
        row = {"variant": variant.name, "n": variant.n, "ahead": variant.ahead, **timing, "gap_us": gap}
        rows.append(row | {"steps": trial.steps, "device_steps": seen[-1][1], "same_tokens": same})
    return rows


def timed(go: Go, samples: list[float]) -> Go:
    """Adds the seconds it took to `samples`."""

    def run(loop: Loop, request: Request) -> None:
        start = time.perf_counter()
        go(loop, request)
        samples.append(time.perf_counter() - start)

    return run


def gap_of(trial: Trial, variant: Variant) -> tuple[float, list[int]]:
    """Median microseconds from the end of a step to the start of the next, and the tokens."""

    def go(loop: Loop, request: Request) -> None:
        trial.stamps.zero_()
        variant.stamped(loop, request)

    tokens, _ = trial.decode(go)
    count = min(int(trial.stamps[0]), STAMPS - 1) // 2 * 2
    pairs = trial.stamps[1 : 1 + count].view(-1, 2).tolist()
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(pairs)]
    return round(statistics.median(gaps) / 1e3, 3), tokens


def leaves_early(trial: Trial, graph: WhileGraph) -> str:
    """Whether loops stop at a stop id in the midst of a launch: the tokens up to it, and not a step too many."""
    first: dict[int, int] = {}
    for place, token in enumerate(trial.expected[: len(trial.expected) // 2]):
        first.setdefault(token, place)
    stop_ids = (max(first, key=lambda token: first[token]),)
    tokens, steps = trial.decode(run_ahead(trial, 1), stop_ids)
    right = trial.decode(looping(trial, graph, 32, 2), stop_ids) == (tokens, steps)
    ahead = trial.decode(run_ahead(trial, 4), stop_ids)[1]
    verdict = "as one by one" if right else "WRONG"
    return f"{verdict}: {len(tokens)} tokens in {steps} steps; replays 4 ahead make {ahead}"


def run(trial: Trial, rounds: int) -> list[records.Row]:
    """Builds, checks and measures everything."""
    refused: list[str] = []
    built = loops(trial, refused)
    listed = variants(trial)
    for way, graphs in built.items():
        print(f"{way} leaves early:", leaves_early(trial, graphs[0]))
        listed += [
            Variant(way, n, ahead, *(looping(trial, graph, n, ahead) for graph in graphs))
            for n in SIZES
            for ahead in (1, 2)
        ]
    for reason in refused:
        print("refused:", reason)
    return measured(trial, listed, rounds)


def main() -> None:
    """Prints a table; with OUT set, also writes its rows to while_node.jsonl there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=600, help="tokens to decode")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        parser.error("this needs a GPU of sm_90 or later")
    with FastSpecGenerator(*demo_pair(), max_batch_size=1, progress=False) as generator:
        ids = generator.tokenizer(PROMPT)["input_ids"]  # type: ignore[misc]
        engine = generator._engine
        assert engine is not None, "it was just made"
        with engine.on_device():
            trial = Trial(engine, ids, chosen.new)
            print(f"{len(trial.expected)} tokens in {trial.steps} steps")
            costs = {name: round(us, 3) for name, us in bare_costs().items()}
            print("without a step:", costs)
            rows = run(trial, chosen.rounds)
    print(records.table(rows, COLUMNS))
    if "OUT" in os.environ:
        common = {"pair": "shipped", **records.environment(), **costs}
        records.append(Path(os.environ["OUT"]) / "while_node.jsonl", [common | row for row in rows])


if __name__ == "__main__":
    main()
