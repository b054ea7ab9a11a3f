"""Whatever the options of a call are, its steps were captured before: on a CPU, with a runner that counts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

import fastspec.scheduling.requests as request_module
from fastspec import FastSpecGenerator
from fastspec.engine.engine import Engine
from fastspec.engine.prompt_passes import PromptPasses
from fastspec.graphs.keys import StepKey, describe
from fastspec.graphs.runner import EagerRunner
from fastspec.inputs.options import RowOptions
from fastspec.sampling.rules import MODES
from fastspec.scheduling.requests import Request, lengths_of
from fastspec.scheduling.scheduler import Scheduler
from fastspec.shapes import EARLY_BLOCKS, FULL, GREEDY
from tests.helpers.compiled import compiled_engine, graphs_compiled
from tests.helpers.fuzz_calls import DRAFTS, Call, calls
from tests.helpers.fuzzing import CI, Pair
from tests.helpers.scheduling import run_all
from tests.helpers.tiny import tiny_engine, with_runner

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the pair has no tokenizers


class Recorder(EagerRunner):
    """Stands for a runner of graphs: a step runs only after its key was captured."""

    static = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.keys: list[Hashable] = []
        self.ran: list[Hashable] = []

    def ready(self, key: Hashable) -> bool:
        return key in self.keys

    def capture(
        self,
        key: Hashable,
        body: Callable[[], None],
        idle: Callable[[], AbstractContextManager[None]],
        *,
        warm: bool = False,
    ) -> None:
        if self.ready(key):
            return
        with idle():
            body()
        self.keys.append(key)

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        assert key in self.keys, f"{describe(key)} was not captured"
        self.ran.append(key)
        body()


def steps_of(runner: Recorder) -> set[str]:
    """The steps that ran, without the passes over prompts."""
    return {describe(key) for key in runner.ran if isinstance(key, StepKey)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("pair"))


def recorded(pair: Pair, verification: str, proposer: str) -> tuple[FastSpecGenerator, Recorder]:
    """A generator that has captured what its calls may come to."""
    gen = pair.generator(page_size=16, batch=4, verification=verification, proposer=proposer)
    runner, scheduler = Recorder(), gen._open().scheduler
    scheduler.engine = with_runner(scheduler.engine, runner)
    for sampler in (GREEDY, FULL):
        gen.warmup(sampler=sampler)
    return gen, runner


def with_all_drafts(call: Call) -> Call:
    """The same call, but the rows' draft limits are below the generator's own k, or 0: not k of another graph."""
    first, *others = call.rows
    return replace(call, k=None, logprobs=None, rows=(replace(first, drafts=None), *others))


@pytest.mark.parametrize(
    ("verification", "proposer"),
    [*((mode, "model") for mode in MODES), ("block", "both"), ("coupled", "lookup"), ("rejection", "own")],
)
def test_options_change_no_key(pair: Pair, verification: str, proposer: str) -> None:
    gen, runner = recorded(pair, verification, proposer)
    steps = {(rows, k, kind) for rows in (1, 2, 4) for k in (0, DRAFTS) for kind in (GREEDY, FULL)}
    made = [key for key in runner.keys if isinstance(key, StepKey)]
    assert len(made) == len(steps)
    assert {(key.rows, key.shape.num_drafts, key.shape.sampler) for key in made} == steps
    expected = set(runner.keys)  # with the passes over prompts

    @settings(CI, max_examples=12)
    @given(calls(pair.oracle.text))
    def check(call: Call) -> None:
        call = with_all_drafts(call)
        arguments, options = call.arguments()
        out = gen.generate(*arguments, **options, return_dict_in_generate=True)
        pair.check(call, out, (verification, proposer))  # type: ignore[arg-type]
        assert set(runner.keys) == expected

    check()
    gen.generate([[1, 2]], max_new_tokens=2, logprobs=True)
    assert len(runner.keys) > len(expected), "another kind of step is another key: the count can change"


ROWS = [
    RowOptions(0.0, 0, 1.0, 0.0, seed=1),
    RowOptions(0.9, 5, 0.8, 0.1, seed=2, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    RowOptions(1.1, 0, 1.0, 0.0, seed=3, bias=((3, -2.0),), allowed=(1, 2, 3, 4), min_new_tokens=3, draft_limit=1),
]


@pytest.mark.parametrize("sampler", [GREEDY, FULL])
def test_nothing_is_missing_once_it_was_captured(sampler: str) -> None:
    """`engine.missing` knows rows, k, kind and log-probabilities; no option of a row is among them."""
    runner = Recorder()
    engine = with_runner(tiny_engine(batch=4), runner)
    first = engine.missing(4, {4, 0}, sampler, None)
    assert [(rows, shape.num_drafts) for rows, shape in first] == [(4, 4), (4, 0), (2, 4), (2, 0), (1, 4), (1, 0)]
    for rows, shape in first:
        engine.capture(rows, shape)
    for row in ROWS:
        engine.state.temperature.fill_(row.temperature)
        engine.state.repetition.fill_(row.repetition_penalty)
        assert engine.missing(4, {4, 0}, sampler, None) == []
    assert len(engine.missing(4, {4, 0}, sampler, 2)) == 6
    assert len(engine.missing(4, {3}, sampler, None)) == 3


def test_long_rows_have_steps_of_their_own() -> None:
    """A launch as wide as the longest row there may be is for calls that may come to such rows."""
    runner = Recorder()
    engine = with_runner(tiny_engine(batch=1, max_length=40_000), runner)
    rooms = [engine.shapes.room(positions) for positions in (0, 1024, 1025, 4096, 4097, 16384, 16385, 40_000)]
    assert rooms == [1024, 1024, 4096, 4096, 16384, 16384, 40_005, 40_005]
    for rows, shape in engine.missing(1, {4}, GREEDY, None, 100):
        engine.capture(rows, shape)
    assert engine.missing(1, {4}, GREEDY, None, 1020) == []
    assert len(engine.missing(1, {4}, GREEDY, None, 1021)) == 1, "the drafts are positions, too"
    assert [describe(key) for key in runner.keys] == ["1 rows, k = 4, greedy, 1024 positions"]

    requests = [Request([1, 2], cap, ROWS[0]) for cap in (3, 5000)]
    for rows, shape in engine.missing(1, {4}, GREEDY, None, requests[1].limit):
        engine.capture(rows, shape)
    loop = iter(run_all(engine, requests, (), GREEDY, lambda made: 4))
    for _ in range(5):
        next(loop)
    assert steps_of(runner) == {"1 rows, k = 4, greedy, 16384 positions"}
    short = tiny_engine(batch=1, max_length=5000)
    assert [short.shapes.room(positions) for positions in (0, 1025, 4096, 4097)] == [1024, 4096, 4096, 5005]
    assert [tiny_engine(batch=1, max_length=most).shapes.room(0) for most in (1100, 1500)] == [1105, 1024]
    assert tiny_engine(batch=1, max_length=4500).shapes.room(1025) == 4505


def test_calls_of_long_prompts_have_steps_without_what_is_for_early_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is fed a row's last two tokens: a prompt of 4354 has none before position 4352."""
    monkeypatch.setattr(
        PromptPasses, "feed_row", lambda *args, **options: None
    )  # which takes long here, and tells nothing
    engine = with_runner(tiny_engine(batch=2, max_length=40_000, long_prompt=10**6), Recorder())
    for shortest, first in ((0, 0), (4353, 0), (4354, EARLY_BLOCKS), (9000, EARLY_BLOCKS)):
        assert engine.shapes.step(4, GREEDY, None, 9000, shortest).first_block == first
    keys = []
    for prompts in ((5, 5000), (5000, 6000)):
        requests = [Request([1] * length, 8, ROWS[0]) for length in prompts]
        missing = engine.missing(2, {4}, GREEDY, None, *lengths_of(requests))
        keys.append([describe(StepKey(rows, shape)) for rows, shape in missing])
        for rows, shape in missing:
            engine.capture(rows, shape)
    wide = "k = 4, greedy, 16384 positions"
    assert keys == [[f"{rows} rows, {wide}{begin}" for rows in (2, 1)] for begin in ("", ", none before 4352")]
    runner = engine.runner
    assert isinstance(runner, Recorder)
    for prompts, key in (((5, 5000), keys[0][0]), ((5000, 6000), keys[1][0])):
        runner.ran.clear()
        next(iter(run_all(engine, [Request([1] * n, 8, ROWS[0]) for n in prompts], (), GREEDY, lambda made: 4)))
        assert steps_of(runner) == {key}


def test_steps_for_long_prompts_are_captured_ahead(pair: Pair) -> None:
    """`warmup` of a length has both kinds that calls of such rows may come to."""
    gen = pair.generator(page_size=16, batch=1)
    engine = with_runner(tiny_engine(batch=1, max_length=9000), Recorder())
    with mock.patch.object(gen._open(), "_scheduler", Scheduler(engine)), mock.patch.object(gen, "max_length", 9000):
        gen.warmup(0, length=100)
        assert [shape.first_token for _, shape in engine.missing(1, {0}, GREEDY, None, 9000)] == [False, True]
        gen.warmup(0, length=9000)
        assert engine.missing(1, {0}, GREEDY, None, 9000) == engine.missing(1, {0}, GREEDY, None, 9000, 4354) == []


def test_a_longer_request_that_joins_finds_steps_with_room_for_it() -> None:
    """Rows that run do not wait for a capture: steps for the longest rows, captured ahead, serve all lengths."""
    runner = Recorder()
    engine = with_runner(tiny_engine(batch=2, max_length=5000), runner)
    for longest in (100, 5000):
        for rows, shape in engine.missing(2, {4}, GREEDY, None, longest):
            engine.capture(rows, shape)
    scheduler, call = Scheduler(engine), request_module.CallPlan((), GREEDY, lambda made: 4, joined=True)
    for place, new in enumerate((60, 2000)):
        request = Request([1 + place] * 20, new, ROWS[0])
        call.lengths = request.limit, 20
        scheduler.add(request, call)
        scheduler.step()
        scheduler.step()
    assert {describe(key) for key in runner.keys if isinstance(key, StepKey)} == captured_all(engine)
    assert steps_of(runner) == {
        f"{rows} rows, k = 4, greedy, {room} positions" for rows, room in ((1, 1024), (2, 5120))
    }


def captured_all(engine: Engine) -> set[str]:
    """What was captured ahead, in words."""
    shapes = [engine.shapes.step(4, GREEDY, None, longest) for longest in (100, 5000)]
    firsts = [replace(shapes[1], num_drafts=0).for_first_tokens(grammars=False)]
    return {describe(StepKey(rows, shape)) for rows in (1, 2) for shape in (*shapes, *firsts)}


def test_options_compile_nothing_anew() -> None:
    """With torch.compile too: its graphs are passes of models, and options are not among what they read."""
    engine = compiled_engine(batch=2, k=2)

    def run(*rows: RowOptions) -> None:
        for _ in run_all(engine, [Request([1, 2, 3], 8, row) for row in rows], (), FULL, lambda made: 2):
            pass

    run(ROWS[0])
    before = graphs_compiled()
    for row in ROWS[1:]:
        run(row)
    assert graphs_compiled() == before
    run(ROWS[0], ROWS[1])
    assert graphs_compiled() > before, "another number of rows is another graph: the count can change"
