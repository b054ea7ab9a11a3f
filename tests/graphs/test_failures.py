"""What goes wrong with captures is named, with its key and the way out, and the generator stays usable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fastspec import FastSpecGenerator, demo_pair, step
from fastspec.graphs.runner import EagerRunner, GraphRunner
from fastspec.state import DecodeState

CUDA = torch.device("cuda", 0)


def capture(runner: GraphRunner, body: Callable[[], None]) -> None:
    with runner.on():
        runner.capture("a key", body, lambda: nullcontext())


@pytest.mark.gpu
def test_a_key_that_was_never_captured() -> None:
    runner = GraphRunner(CUDA)
    with pytest.raises(RuntimeError, match=r"no CUDA graph for the step \(a key\): it was never captured. warmup\(\)"):
        runner.run("a key", lambda: None)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["host read", "kernel not warm", "kept memory", "other stream"])
def test_each_fault_is_named_and_leaves_the_runner_usable(fault: str) -> None:
    runner = GraphRunner(CUDA)
    x = torch.ones(8, device=CUDA)
    runs = 0
    kept: list[torch.Tensor] = []
    side = torch.cuda.Stream()

    def body() -> None:
        nonlocal runs
        runs += 1
        x.add_(1)
        if runs == 3:  # two warm-ups came before
            if fault == "host read":
                x.sum().item()
            elif fault == "kernel not warm":
                torch.cuda.synchronize()  # what loading a module does, and the driver forbids here
            elif fault == "kept memory":
                kept.append(torch.empty(2**20, device=CUDA))
            else:
                with torch.cuda.stream(side):
                    side.wait_stream(runner._stream._stream)
                    x.mul_(2)  # and nobody waits for it

    expected = "keeps" if fault == "kept memory" else "graphs=False launches every operation"
    with pytest.raises(RuntimeError, match=rf"step \(a key\) could not be captured(.|\n)*{expected}"):
        capture(runner, body)
    with pytest.raises(RuntimeError, match="its capture failed"):
        runner.run("a key", body)
    assert "not captured, its capture failed" in runner.describe()
    capture(runner, lambda: torch.add(x, 1, out=x))  # type: ignore[arg-type, return-value]
    with runner.on():
        before = x.clone()
        runner.run("a key", lambda: None)
        assert torch.equal(x, before + 1)


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
        [sys.executable, "-c", DEAD], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=240
    )
    assert "raised:" in done.stdout, done.stderr[-2000:]
    assert "CUDA error" in done.stdout or "device-side assert" in done.stdout


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
