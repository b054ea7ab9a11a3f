"""Captured steps against launched ones: the same state after every step, whatever state they were captured at."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator, GenerateOutput, demo_pair, step
from fastspec.graphs.runner import EagerRunner
from fastspec.loop import DecodeLoop, Engine, Request
from fastspec.options import RowOptions
from fastspec.proposers.base import FILTERED, GREEDY, SAMPLED
from fastspec.state import DecodeState
from tests.helpers.tiny import VOCAB, tiny_engine


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


def snapshot(state: DecodeState) -> dict[str, torch.Tensor]:
    """Every field that a later step reads, less the column that takes junk writes and laws of rows at rest."""
    fields = {field.name: getattr(state, field.name).clone() for field in dataclasses.fields(state)}
    fields["tokens"] = fields["tokens"][:, :-1]
    return fields


def compare_runs(
    engines: tuple[Engine, Engine], seed: int, sampler: str, stop_ids: tuple[int, ...], ks: list[int]
) -> None:
    """Runs the same requests step by step through both engines and compares every field of the running rows."""
    loops = [
        DecodeLoop(engine, requests_of(seed, sampler != GREEDY), stop_ids, sampler, lambda made: ks[made % len(ks)], 2)
        for engine in engines
    ]
    for count, (ours, theirs) in enumerate(zip(*map(iter, loops), strict=True)):
        assert ours == theirs, f"step {count}"
        a, b = (snapshot(engine.state) for engine in engines)
        running = a["finish"] == 0
        for name in a:
            assert torch.equal(a[name][running], b[name][running]), (count, name)


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED, FILTERED])
def test_replay_equals_eager_field_by_field(sampler: str) -> None:
    """Captured at one state, replayed at others: lengths, tables, stops, buckets, k, admissions."""
    captured = tiny_engine(batch=4, device="cuda", graphs=True)
    launched = tiny_engine(batch=4, device="cuda")
    pointers = {
        field.name: getattr(captured.state, field.name).data_ptr() for field in dataclasses.fields(captured.state)
    }
    for seed in range(3):
        compare_runs((captured, launched), seed, sampler, stop_ids=(3, 50), ks=[4, 4, 0, 4, 2])
    assert pointers == {name: getattr(captured.state, name).data_ptr() for name in pointers}


@pytest.mark.gpu
def test_two_engines_and_poison_do_not_matter() -> None:
    """Two runners in one process, one of them over caches full of NaN."""
    first, second = (tiny_engine(batch=4, device="cuda", graphs=True) for _ in range(2))
    for model in (second.parts.target, second.parts.proposer.model):  # type: ignore[union-attr]
        model.cache.keys.fill_(float("nan"))  # type: ignore[attr-defined]
        model.cache.values.fill_(float("nan"))  # type: ignore[attr-defined]
    compare_runs((first, second), 5, GREEDY, (), ks=[4])


def generated(gen: FastSpecGenerator, **options: Any) -> list[list[int]]:
    prompts = gen.tokenizer(["import os", "class A:", "def f(x):"])["input_ids"]  # type: ignore[misc]
    out = gen.generate(prompts, return_dict_in_generate=True, **options)
    assert isinstance(out, GenerateOutput)
    return out.new_tokens


@pytest.mark.gpu
def test_the_shipped_pair_with_and_without_graphs() -> None:
    with (
        FastSpecGenerator(*demo_pair(), progress=False) as gen,
        FastSpecGenerator(*demo_pair(), graphs=False, progress=False) as eager,
    ):
        assert "none captured yet" in gen.explain()
        for options in (
            {"max_new_tokens": 200},
            {"max_new_tokens": 60, "do_sample": True, "temperature": [0.0, 0.8, 1.2], "seed": 3},
        ):
            assert generated(gen, **options) == generated(eager, **options)
            assert generated(gen, num_speculative_tokens=0, **options) == generated(
                eager, num_speculative_tokens=0, **options
            )
        assert "captured, one per kind of step" in gen.explain()
        assert "every step runs eagerly" in eager.explain()


@pytest.mark.gpu
def test_nothing_is_captured_twice() -> None:
    """50 prompt lengths and limits after the first call: no further capture, and no memory taken."""
    with FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=1) as gen:
        ids = list(range(100, 700))
        gen.generate([ids[:5]], max_new_tokens=5)
        runner = gen._engine.runner  # type: ignore[union-attr]
        before = (len(runner._graphs), torch.cuda.memory_allocated())  # type: ignore[attr-defined]
        for length in range(1, 500, 10):
            gen.generate([ids[:length]], max_new_tokens=1 + length % 7)
        assert (len(runner._graphs), torch.cuda.memory_allocated()) == before  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read inside the step: named with its key and the way out, and the generator goes on without it."""
    with FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=1) as gen:
        original = step.record_logprobs

        def reads(state: DecodeState, top: int, logits: torch.Tensor, block: torch.Tensor) -> None:
            original(state, top, logits, block)
            logits.sum().item()

        monkeypatch.setattr(step, "record_logprobs", reads)
        with pytest.raises(RuntimeError, match=r"step \(1 rows, k = 4, greedy, 2 top logprobs\) could not be captured"):
            gen.generate([[5, 6]], max_new_tokens=5, logprobs=2)
        monkeypatch.undo()
        fresh = gen.generate([[5, 6]], max_new_tokens=30)
        with FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=1) as other:
            assert torch.equal(fresh, other.generate([[5, 6]], max_new_tokens=30))  # type: ignore[arg-type]


def test_graphs_need_cuda(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="graphs=True needs a CUDA device, got cpu"):
        FastSpecGenerator(*demo_pair(), device="cpu", graphs=True, progress=False)


def test_the_eager_runner_just_calls() -> None:
    called = []
    EagerRunner().run("key", lambda: called.append(1), lambda: pytest.fail("idle is for captures"))  # type: ignore[arg-type, func-returns-value]
    assert called == [1]
