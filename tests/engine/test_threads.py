"""Threads on the CPU: how many are taken, by times that the test makes up, and where they work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fastspec import FastSpecGenerator
from fastspec.engine.threads import Threads, sampling_alone
from fastspec.kernels.ops import TORCH_OPS
from fastspec.torch_settings import shielded, using_threads
from tests.helpers.checkpoints import make_checkpoint

LARGE = 2.0**20


@pytest.mark.parametrize(
    ("times", "chosen", "asked"),
    [
        ({4: 1.0, 2: 1.9, 1: 3.8}, 4, [4, 2]),
        ({4: 1.0, 2: 1.1, 1: 2.0}, 2, [4, 2, 1]),
        ({4: 1.0, 2: 1.1, 1: 1.2}, 1, [4, 2, 1]),
        ({4: 60.0, 2: 20.0, 1: 0.5}, 1, [4, 2, 1]),  # others have the cores
        ({6: 1.0, 3: 2.0}, 6, [6, 3]),
    ],
)
def test_a_number_is_taken_that_pays(times: dict[int, float], chosen: int, asked: list[int]) -> None:
    seen: list[int] = []

    def seconds(count: int) -> float:
        seen.append(count)
        return times[count]

    threads = Threads.of(max(times), LARGE, seconds)
    assert (threads.chosen, threads.now, seen) == (chosen, chosen, asked)
    assert str(threads).startswith(f"{chosen} of torch's {max(times)} on the CPU (measured, ")


def test_nothing_is_measured_where_there_is_no_choice() -> None:
    def seconds(count: int) -> float:
        raise AssertionError(count)

    assert Threads.of(1, LARGE, seconds).now == 1
    small = Threads.of(8, 1000, seconds)
    assert (small.now, small.why) == (1, "products are too small for several threads")


def test_steps_that_become_many_times_slower_go_on_with_one_thread_and_come_back() -> None:
    threads = Threads(4, 4, "measured", 4)
    for seconds in (1.0, 1.1, 9.0, 9.0, 1.0, 9.0, 9.0):
        threads.took("a step", seconds)
        assert threads.now == 4
    threads.took("a step", 9.0)  # the third in a row
    assert threads.now == 1
    assert str(threads).endswith("1 for now: steps had become many times slower")
    for _ in range(255):
        threads.took("a step", 2.0)
        assert threads.now == 1
    threads.took("a step", 2.0)
    assert threads.now == 4
    assert not str(threads).endswith("slower")


def test_steps_that_one_thread_makes_no_faster_get_theirs_back() -> None:
    threads = Threads(4, 4, "measured", 4)
    for seconds in (1.0, 20.0, 20.0, 20.0):
        threads.took("a step", seconds)
    assert threads.now == 1
    for seconds in (60.0, 60.0, 60.0):
        threads.took("a step", seconds)
    assert threads.now == 4
    for _ in range(9):
        threads.took("a step", 20.0)
        assert threads.now == 4


def test_kinds_of_steps_have_their_own_times() -> None:
    threads = Threads(4, 4, "measured", 4)
    for _ in range(9):
        threads.took("a small step", 1.0)
        threads.took("a large step", 30.0)
        assert threads.now == 4


def test_the_callers_number_comes_back_and_other_threads_keep_theirs() -> None:
    with using_threads(3):
        begun, go, seen = threading.Event(), threading.Event(), []

        def other() -> None:
            seen.append(torch.get_num_threads())
            begun.set()
            go.wait()
            seen.append(torch.get_num_threads())

        thread = threading.Thread(target=other)
        thread.start()
        begun.wait()
        with shielded(torch.device("cpu"), threads=1):
            assert torch.get_num_threads() == 1
            go.set()
            thread.join()
        assert torch.get_num_threads() == 3
        assert seen == [3, 3]


def test_whole_distributions_are_one_threads_work() -> None:
    """A sum over a large vocabulary has other bits where several threads share it."""
    seen: list[int] = []

    def op(*args: Any, **options: Any) -> None:
        seen.append(torch.get_num_threads())

    ops = TORCH_OPS.replaced(sampled_commit=op, sampled_draw=op, verify_commit=op, commit=op, linear=op)
    with using_threads(2):
        alone = sampling_alone(ops)
        for each in (alone.sampled_commit, alone.sampled_draw, alone.verify_commit, alone.commit, alone.linear):
            each()
        assert torch.get_num_threads() == 2
    assert seen == [1, 1, 1, 1, 2]


class Steady(Threads):
    """Stays as it is, however busy the machine that the test runs on."""

    def took(self, kind: object, seconds: float) -> None:
        """Changes nothing."""


@pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning")
def test_a_generator_says_its_number_and_leaves_torchs_alone(tmp_path: Path) -> None:
    pair = make_checkpoint(tmp_path / "target", "llama2", seed=0), make_checkpoint(tmp_path / "draft", "llama2", seed=1)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 3, "eos_token_id": None, "logprobs": 2}
    found = []
    for count in (1, 2):
        with using_threads(count), FastSpecGenerator(*pair, max_length=64, device="cpu", progress=False) as generator:
            assert torch.get_num_threads() == count
            assert generator._open().engine.threads is not None
            object.__setattr__(generator._open().engine, "threads", Steady(count, count, "measured", count))
            assert f"threads    {count} of torch's {count} on the CPU" in generator.explain()
            for emitted in generator.stream([[1, 2, 3]], **options):
                assert emitted
                assert torch.get_num_threads() == count
            out: Any = generator.generate([[1, 2, 3]], return_dict_in_generate=True, **options)
            assert out.stats.threads == count
            found.append((out.new_tokens, out.logprobs, out.top_logprobs))
    assert found[0] == found[1]
