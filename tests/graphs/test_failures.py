"""What goes wrong with captures is named, with its key and the way out, and the generator stays usable."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator, demo_pair, step
from fastspec.graphs import results as rings
from fastspec.graphs import runner as runners
from fastspec.graphs.results import ResultRing
from fastspec.graphs.runner import Captured, EagerRunner, GraphRunner
from fastspec.shapes import GREEDY
from tests.helpers.limits import HANGS
from tests.helpers.tiny import tiny_engine

CUDA = torch.device("cuda", 0)


def capture(runner: GraphRunner, body: Callable[[], None]) -> None:
    with runner.on_stream():
        runner.capture("a key", body, lambda: nullcontext())


def fresh_kernel() -> Any:
    """A Triton kernel that was never launched: nobody else's, so nobody has loaded it."""
    triton = pytest.importorskip("triton", reason="Triton ships for Linux only")

    @triton.jit
    def add_one(x_ptr):
        triton.language.store(x_ptr, triton.language.load(x_ptr) + 1)

    return add_one


class Replays:
    """Stands for a captured graph."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.error = error

    def replay(self) -> None:
        if self.error:
            raise self.error


def runner_with(**graphs: Any) -> GraphRunner:
    """A runner that has captured these, without a device."""
    runner = object.__new__(GraphRunner)
    runner._graphs = {key: Captured(graph, 1, 0.0, 0) for key, graph in graphs.items()}
    runner._failures, runner._nvtx = {"spoilt": "its capture failed: x"}, False
    return runner


def test_a_key_that_was_never_captured() -> None:
    runner = runner_with(known=Replays())
    runner.run("known", lambda: pytest.fail("it is replayed, not called"))
    with pytest.raises(RuntimeError, match=r"no CUDA graph for the step \(a key\): it was never captured. warmup\(\)"):
        runner.run("a key", lambda: None)
    with pytest.raises(RuntimeError, match=r"no CUDA graph for the step \(spoilt\): its capture failed: x. warmup\(\)"):
        runner.run("spoilt", lambda: None)


@pytest.mark.gpu
def test_a_step_that_nobody_captured_is_never_launched() -> None:
    """Whoever asks the engine for it: an error, and no step is counted."""
    engine = tiny_engine(batch=1, device="cuda", graphs=True)
    with (
        engine.on_device(),
        pytest.raises(RuntimeError, match=r"\(1 rows, k = 3, greedy, \d+ positions\): it was never"),
    ):
        engine.launch(1, engine.shapes.step(3, GREEDY, None, 5))
    engine.ring.correct_count()
    assert engine.ring.launched == 0


DEAD_CONTEXT = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")
SAID = "the CUDA device failed: CUDA error: device-side assert triggered. Nothing on it can go on in this process"


def test_a_dead_context_is_named_by_the_replay_that_meets_it() -> None:
    with pytest.raises(RuntimeError, match=SAID) as caught:
        runner_with(known=Replays(DEAD_CONTEXT)).run("known", lambda: None)
    assert caught.value.__cause__ is DEAD_CONTEXT


def test_a_dead_context_is_named_by_the_wait_that_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing came for a while, so the stream is asked."""

    class Dead:
        def query(self) -> bool:
            raise DEAD_CONTEXT

    ring = ResultRing(1, 0, 1, torch.device("cpu"), pinned=False)
    ring._device = CUDA
    monkeypatch.setattr(rings, "PATIENCE", 0.01)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Dead())
    with pytest.raises(RuntimeError, match=SAID) as caught:
        ring.read(1, 1)
    assert caught.value.__cause__ is DEAD_CONTEXT


def test_a_device_that_is_only_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = ResultRing(1, 0, 1, torch.device("cpu"), pinned=False)
    asked = []

    class Busy:
        def query(self) -> bool:
            asked.append(1)
            if len(asked) == 3:
                ring.outbox.entries[1, 0] = 1
            return False

    ring._device = CUDA
    monkeypatch.setattr(rings, "PATIENCE", 0.01)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Busy())
    assert ring.read(1, 1)[0].emitted == 0
    assert len(asked) == 3


def test_runners_have_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out its streams in turn, to others too."""
    turn = itertools.cycle(range(runners.STREAMS))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=next(turn)))
    monkeypatch.setattr(runners, "_taken_streams", cache(lambda device: set()))
    first = runners._new_stream(CUDA)
    for _ in range(runners.STREAMS - 1):
        torch.cuda.Stream(CUDA)  # another's
    second = runners._new_stream(CUDA)
    assert second != first
    rest = [runners._new_stream(CUDA) for _ in range(runners.STREAMS)]
    assert {each.cuda_stream for each in (first, second, *rest[:-2])} == set(range(runners.STREAMS))
    assert rest[-1] in (first, second, *rest[:-1])  # none is left: runners share


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["host read", "wait", "kept memory", "other stream"])
def test_each_fault_is_named_and_leaves_the_runner_usable(fault: str) -> None:
    runner = GraphRunner(CUDA)
    x = torch.ones(8, device=CUDA)
    runs = 0
    kept: list[torch.Tensor] = []
    own = runner._stream._stream
    # torch hands out few streams in turn, so the next one may be the runner's own
    side = next(stream for stream in iter(torch.cuda.Stream, None) if stream.cuda_stream != own.cuda_stream)

    def body() -> None:
        nonlocal runs
        runs += 1
        x.add_(1)
        if runs == 3:  # two warm-ups came before
            if fault == "host read":
                x.sum().item()
            elif fault == "wait":
                torch.cuda.synchronize()
            elif fault == "kept memory":
                kept.append(torch.empty(2**20, device=CUDA))
            else:
                with torch.cuda.stream(side):
                    side.wait_stream(own)
                    x.mul_(2)  # and nobody waits for it

    expected = "keeps" if fault == "kept memory" else "graphs=False launches every operation"
    with pytest.raises(RuntimeError, match=rf"step \(a key\) could not be captured(.|\n)*{expected}"):
        capture(runner, body)
    with pytest.raises(RuntimeError, match="its capture failed"):
        runner.run("a key", body)
    assert "not captured, its capture failed" in runner.describe()
    capture(runner, lambda: torch.add(x, 1, out=x))  # type: ignore[arg-type, return-value]
    with runner.on_stream():
        before = x.clone()
        runner.run("a key", lambda: None)
        assert torch.equal(x, before + 1)


@pytest.mark.gpu
def test_a_kernel_that_nobody_warmed_up() -> None:
    """Its module is loaded while the capture goes on. Where the driver allows that, it is in the graph like any other;
    where it does not, the error says what cannot be captured."""
    runner, runs = GraphRunner(CUDA), 0
    x = torch.ones(8, device=CUDA)

    def body() -> None:
        nonlocal runs
        runs += 1
        x.add_(1)
        if runs == 3:  # two warm-ups came before
            fresh_kernel()[(1,)](x)

    refusal = None
    try:
        capture(runner, body)
    except RuntimeError as error:
        refusal = str(error)
    if refusal is not None:
        assert re.search(r"step \(a key\) could not be captured(.|\n)*graphs=False", refusal)
        return
    with runner.on_stream():
        before = x.clone()
        runner.run("a key", body)
        assert x[0] == before[0] + 2, "the replay adds one twice to the first"
        assert torch.equal(x[1:], before[1:] + 1)


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read inside the step: named with its key and the way out, and the generator goes on without it."""
    with FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=1) as gen:
        original = step._scored

        def reads(*given: Any) -> tuple[Any, ...]:
            scored = original(*given)
            scored[0].sum().item()
            return scored

        monkeypatch.setattr(step, "_scored", reads)
        with pytest.raises(
            RuntimeError, match=r"step \(1 rows, k = 4, greedy, 2 top logprobs, \d+ positions\) could not be"
        ):
            gen.generate([[5, 6]], max_new_tokens=5, logprobs=2)
        monkeypatch.undo()
        fresh = gen.generate([[5, 6]], max_new_tokens=30)
        with FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=1) as other:
            assert torch.equal(fresh, other.generate([[5, 6]], max_new_tokens=30))  # type: ignore[arg-type]


DEAD = """
import torch
from fastspec import FastSpecGenerator, demo_pair
gen = FastSpecGenerator(*demo_pair(), progress=False, max_batch_size=1)
stream = gen.stream([[5, 6]], max_new_tokens=300)
next(stream)
torch.ones(4, device="cuda")[torch.tensor([9], device="cuda")]  # fails on the device
try:
    for _ in stream:
        pass
except RuntimeError as error:
    print("raised:", str(error).splitlines()[0])
"""


@pytest.mark.gpu
def test_a_dead_device_is_an_error_and_not_a_hang() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEAD], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=HANGS
    )
    assert "raised: the CUDA device failed: " in done.stdout, done.stdout + done.stderr[-2000:]
    assert "device-side assert" in done.stdout
    assert "Nothing on it can go on in this process" in done.stdout


def test_graphs_need_cuda() -> None:
    with pytest.raises(ValueError, match="graphs=True needs a CUDA device, got cpu"):
        FastSpecGenerator(*demo_pair(), device="cpu", graphs=True, progress=False)


def test_the_eager_runner_just_calls() -> None:
    called = []
    runner = EagerRunner(torch.device("cpu"))
    runner.capture("key", lambda: pytest.fail("nothing is captured"), nullcontext)
    assert runner.ready("key")
    runner.run("key", lambda: called.append(1))
    assert called == [1]
