"""Captured steps against launched ones: the same state after every step, whatever state they were captured at."""

from __future__ import annotations

import dataclasses
import gc
import re
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator, GenerateOutput, demo_pair
from fastspec.engine.engine import Engine
from fastspec.inputs.options import RowOptions
from fastspec.scheduling.requests import Request
from fastspec.shapes import FULL, GREEDY
from fastspec.state import DecodeState
from tests.helpers.scheduling import run_all
from tests.helpers.tiny import VOCAB, capture_all, tiny_engine

pytestmark = pytest.mark.gpu


def requests_of(seed: int, sampled: bool) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (7,), generator=generator).tolist()
    caps = torch.randint(1, 60, (7,), generator=generator).tolist()
    return [
        Request(
            torch.randint(VOCAB, (length,), generator=generator).tolist(),
            cap,
            RowOptions(float(sampled and index % 3 > 0), 0, 1.0 if index % 2 else 0.9, 0.0, seed=index),
        )
        for index, (length, cap) in enumerate(zip(lengths, caps, strict=True))
    ]


def snapshot(state: DecodeState, sampler: str, top: int | None) -> dict[str, torch.Tensor]:
    """Every field that such steps write or read, less tokens that do not count."""
    torch.cuda.synchronize()  # the engine has a stream of its own
    unused = {"draft_probs"} if sampler == GREEDY else set()
    unused |= {"logprobs", "top_ids", "top_logprobs"} if top is None else set()
    names = {field.name for field in dataclasses.fields(state)} - unused
    fields = {name: getattr(state, name).clone() for name in sorted(names)}
    places = torch.arange(fields["tokens"].shape[1], device=state.tokens.device)
    fields["tokens"][places >= state.lengths[:, None]] = -1
    return fields


def compare_runs(
    engines: tuple[Engine, Engine],
    seed: int,
    sampler: str,
    stop_ids: tuple[int, ...],
    ks: list[int],
    top: int | None = None,
) -> None:
    """Runs the same requests step by step through both engines and compares every field of the running rows."""
    for engine in engines:
        capture_all(engine, set(ks), sampler, top)
    loops = [
        run_all(engine, requests_of(seed, sampler != GREEDY), stop_ids, sampler, lambda made: ks[made % len(ks)], top)
        for engine in engines
    ]
    for count, (ours, theirs) in enumerate(zip(*map(iter, loops), strict=True)):
        assert ours == theirs, f"step {count}"
        a, b = (snapshot(engine.state, sampler, top) for engine in engines)
        running = a["finish"] == 0
        for name in a:
            assert torch.equal(a[name][running], b[name][running]), (count, name)


@pytest.mark.parametrize("top", [None, 2])
@pytest.mark.parametrize("sampler", [GREEDY, FULL])
def test_replay_equals_eager_field_by_field(sampler: str, top: int | None) -> None:
    """Captured at one state, replayed at others: lengths, tables, stops, buckets, k, admissions, moves."""
    captured = tiny_engine(batch=4, device="cuda", graphs=True)
    launched = tiny_engine(batch=4, device="cuda")
    pointers = {
        field.name: getattr(captured.state, field.name).data_ptr() for field in dataclasses.fields(captured.state)
    }
    for seed in range(3):
        compare_runs((captured, launched), seed, sampler, stop_ids=(3, 50), ks=[4, 4, 0, 4, 2], top=top)
    assert pointers == {name: getattr(captured.state, name).data_ptr() for name in pointers}


def test_captured_steps_equal_eager_ones_where_all_drafts_are_accepted() -> None:
    """A model that drafts for itself: the hole that full acceptance leaves is filled in the captured step too."""
    engines = tuple(tiny_engine(batch=4, device="cuda", graphs=graphs, same=True) for graphs in (True, False))
    compare_runs(engines, 4, GREEDY, (), ks=[4])  # type: ignore[arg-type]


def test_two_engines_and_poison_do_not_matter() -> None:
    """Two runners in one process, one of them over caches and idle rows full of NaN and of other tokens."""
    first, second = (tiny_engine(batch=4, device="cuda", graphs=True) for _ in range(2))
    for model in (second.modules.target, second.modules.proposer.model):  # type: ignore[union-attr]
        model.cache.keys.fill_(float("nan"))  # type: ignore[attr-defined]
        model.cache.values.fill_(float("nan"))  # type: ignore[attr-defined]
    second.state.draft_probs.fill_(float("nan"))
    second.state.logprobs.fill_(float("nan"))
    second.state.tokens.fill_(VOCAB - 1)
    second.state.draft_tokens.fill_(VOCAB - 1)
    torch.cuda.synchronize()
    compare_runs((first, second), 5, GREEDY, (), ks=[4])
    compare_runs((first, second), 6, FULL, (), ks=[4, 0])


def test_what_the_host_held_at_capture_does_not_matter() -> None:
    """Shapes, lists and options of the host are used up at capture: overwriting them later changes no replay."""
    engine, other = (tiny_engine(batch=4, device="cuda", graphs=True) for _ in range(2))
    capture_all(engine, {4}, GREEDY)
    weights = engine.modules.target.weights  # type: ignore[attr-defined]  # the graphs read this memory, so it is kept
    object.__setattr__(engine.modules.target, "spec", None)
    object.__setattr__(engine.modules.target, "weights", None)
    expected, got = ([r.new_tokens for r in ran(e)] for e in (other, engine))
    assert got == expected
    assert weights.layers


def ran(engine: Engine) -> list[Request]:
    """Prompts of one token, which need no prefill and no catching up."""
    capture_all(engine, {4}, GREEDY)
    requests = [Request([index], 20, RowOptions(0.0, 0, 1.0, 0.0, seed=0)) for index in range(4)]
    for _ in run_all(engine, requests, (), GREEDY, lambda made: 4):
        if engine.modules.target.spec is None:  # type: ignore[attr-defined]
            engine.modules.proposer.catch_up = None  # type: ignore[union-attr, method-assign, assignment]
    return requests


def generated(gen: FastSpecGenerator, **options: Any) -> list[list[int]]:
    prompts = gen.tokenizer(["import os", "class A:", "def f(x):"])["input_ids"]  # type: ignore[misc]
    out = gen.generate(prompts, return_dict_in_generate=True, **options)
    assert isinstance(out, GenerateOutput)
    return out.new_tokens


def test_the_shipped_pair_with_and_without_graphs() -> None:
    with (
        FastSpecGenerator(*demo_pair(), progress=False) as gen,
        FastSpecGenerator(*demo_pair(), graphs=False, progress=False) as eager,
    ):
        for options in (
            {"max_new_tokens": 200},
            {"max_new_tokens": 60, "do_sample": True, "temperature": [0.0, 0.8, 1.2], "seed": 3},
        ):
            assert generated(gen, **options) == generated(eager, **options)
            assert generated(gen, num_speculative_tokens=0, **options) == generated(
                eager, num_speculative_tokens=0, **options
            )
        assert "captured, one per shape of a step" in gen.explain()
        assert "4 rows, k = 4, greedy, " in gen.explain()
        assert "every step runs eagerly" in eager.explain()


def test_construction_and_calls_capture_what_they_need() -> None:
    """Both ks and every bucket at construction; another sampler at the first call that wants it; nothing twice."""

    def steps(gen: FastSpecGenerator) -> list[str]:
        return sorted(re.findall(r"(\d+ rows, k = \d+, \w+), ", gen.explain()))

    with FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=2) as gen:
        made = ["1 rows, k = 0, greedy", "1 rows, k = 4, greedy", "2 rows, k = 0, greedy", "2 rows, k = 4, greedy"]
        assert steps(gen) == made
        gen.generate([[5]], max_new_tokens=3, do_sample=True, top_k=0)
        made = sorted([*made, "1 rows, k = 4, full"])
        assert steps(gen) == made
        gen.warmup(2)
        made = sorted([*made, "1 rows, k = 2, greedy", "2 rows, k = 2, greedy"])  # k = 0 was there
        assert steps(gen) == made
        gen.warmup(2)
        assert steps(gen) == made


def test_nothing_is_captured_or_allocated_after_warm_up() -> None:
    """50 prompt lengths and limits after one pass over the chunk sizes: no further capture, no memory taken."""
    with FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=1) as gen:
        ids = list(range(100, 700))
        runner = gen._open().engine.runner
        for length in (5, 70, 140, 300, 500):
            gen.generate([ids[:length]], max_new_tokens=5)
        before = (len(runner._graphs), torch.cuda.memory_allocated())  # type: ignore[attr-defined]
        for length in range(1, 500, 10):
            gen.generate([ids[:length]], max_new_tokens=1 + length % 7)
        assert (len(runner._graphs), torch.cuda.memory_allocated()) == before  # type: ignore[attr-defined]


def test_side_streams_and_work_in_flight() -> None:
    """Ids made on a stream of the caller's, calls from there, and a generator closed while steps run."""
    side = torch.cuda.Stream()

    def check() -> None:
        with FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=1) as gen:
            expected = gen.generate([[5, 6, 7]], max_new_tokens=40)
            with torch.cuda.stream(side):
                torch.cuda._sleep(10_000_000)
                ids = torch.arange(5, 8, device="cuda")[None] * 1
                got = gen.generate(ids, max_new_tokens=40)
            assert torch.equal(got.cpu(), expected)  # type: ignore[union-attr, arg-type]
            stream = gen.stream([[5, 6, 7]], max_new_tokens=400)
            next(stream)
            stream.close()  # type: ignore[attr-defined]

    check()  # cuBLAS has its work area afterwards, and what an earlier test left has had time to go
    gc.collect()  # what is left in cycles
    before = torch.cuda.memory_allocated()
    check()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one() -> None:
    with (
        FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=2) as here,
        FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=2, device="cuda:1") as there,
    ):
        assert torch.cuda.current_device() == 0
        for options in ({}, {"do_sample": True, "temperature": 0.8, "seed": 1}):
            a = here.generate([[5, 6, 7], [8]], max_new_tokens=60, **options)
            b = there.generate([[5, 6, 7], [8]], max_new_tokens=60, **options)
            assert torch.equal(a, b)  # type: ignore[arg-type]
        assert torch.cuda.current_device() == 0
