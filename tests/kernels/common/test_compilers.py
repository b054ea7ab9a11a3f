"""Kernels that processes compile: as text they come back whole, and what lies in the cache is what was asked for."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.engine import warmup
from fastspec.kernels.common import compilers
from fastspec.kernels.select import KERNELS
from tests.helpers.modules import module_output


@pytest.mark.parametrize(
    "arch", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_every_launch_comes_back_from_its_text(arch: int) -> None:
    (read,) = module_output("tests.helpers.compile_jobs", "keys", str(arch))
    assert read["jobs"] > 300
    assert read["other"] == []
    assert read["unclear"] == []
    assert read["launchers"] < read["jobs"] / 2, "kernels share them"


def test_processes_compile_and_this_one_only_reads() -> None:
    empty, compiled, ended, again, missed = module_output("tests.helpers.compile_jobs", "processes")
    assert empty["empty"]
    assert not compiled["empty"]
    assert compiled["hits"] == [True] * 4  # each once, though each was launched twice
    assert ended["status"] is not None
    assert (again["hits"], again["begun"]) == ([True] * 4, False)
    assert missed["begun"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 0])
def test_two_ranks_compile_every_kernel_once(processes: int) -> None:
    first, second, caches = module_output("tests.helpers.compile_ranks", str(processes))
    assert first["kernels"] == second["kernels"] == 4
    assert caches["compiled"] == first["kernels"]
    assert caches["left"] == [], "no lock stays"


def test_the_share_of_others_comes_behind_ones_own_and_from_its_end() -> None:
    order: list[int] = []
    with compilers.Compilers(0, kernels=KERNELS, rank=1, ranks=2) as executor:
        executor._places.get()  # one kernel at a time
        futures = [executor.submit(lambda number=number: order.append(number)) for number in range(1, 7)]
        assert not any(each.done() for each in futures[1::2])
        executor.queue_rest()
        for each in futures:
            each.result()
        executor._places.put(None)
    assert order == [1, 3, 5, 6, 4, 2]


def test_an_error_of_the_share_of_others_is_that_of_who_waits() -> None:
    with compilers.Compilers(0, kernels=KERNELS, rank=1, ranks=2) as executor:
        own, other = (executor.submit(lambda: 1 // 0) for _ in range(2))
        executor.queue_rest()
        for each in (own, other):
            with pytest.raises(ZeroDivisionError):
                each.result()


def test_who_waits_for_a_kernel_that_another_compiles_has_it_when_that_one_ends(tmp_path: Path) -> None:
    """Whoever has a lock and dies, or hangs for longer than any kernel takes, keeps nobody from compiling."""
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        patched.setattr(compilers, "_cache", lambda: str(tmp_path))
        with compilers._alone(b"a job"):
            assert [each.suffix for each in tmp_path.iterdir()] == [".compiling"]
            patched.setattr(compilers, "LONGEST", 0.0)
            with compilers._alone(b"a job"), compilers._alone(b"another"):
                pass
        assert list(tmp_path.iterdir()) == []
        patched.setattr(compilers, "_cache", lambda: "/proc/nothing/can/be/made/here")
        with compilers._alone(b"a job"):
            pass


def test_without_processes_this_one_compiles() -> None:
    killed, later, no_text = module_output("tests.helpers.compile_jobs", "broken")
    assert killed["hits"] == later["hits"] == [False] * 4
    assert later["mapped"] == [True, False], "what compiles has Triton and no torch"
    assert "another" in no_text["error"] or "something else" in no_text["error"]


@pytest.mark.parametrize(
    ("limit", "processes"),
    [("800000 100000\n", 8), ("50000 100000\n", 1), ("max 100000\n", 32), ("9900000 100000\n", 32), (None, 32)],
)
def test_a_container_has_as_many_processes_as_it_has_time_for(
    limit: str | None, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(compilers, "_LIMIT", str(tmp_path / "cpu.max"))
    monkeypatch.setattr(compilers.os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)
    assert compilers.of_this_machine() == processes
    assert compilers.of_this_machine(2) == processes // 2


def test_another_program_than_python_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers.sys, "executable", "/opt/app/serving")
    monkeypatch.setattr(compilers.subprocess, "Popen", lambda *given, **options: pytest.fail("started"))
    with compilers.Compilers(4, kernels=KERNELS, now=True) as executor:
        assert executor.submit(lambda: 5).result() == 5


@pytest.mark.parametrize(
    ("gpu", "target", "device", "graphs", "begun"),
    [
        (True, "a directory", None, None, True),
        (True, "a directory", "cuda:1", True, True),
        (True, "a directory", torch.device("cuda"), None, True),
        (True, "a directory", "cuda", False, False),
        (True, "a directory", "cpu", None, False),
        (True, torch.nn.Linear(2, 2), None, None, False),
        (True, torch.nn.Identity(), None, None, False),
        (False, "a directory", None, None, False),
        (False, "a directory", "cuda", None, False),
    ],
)
def test_compilers_are_started_only_where_steps_will_be_captured(
    gpu: bool, target: Any, device: Any, graphs: bool | None, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(warmup, "kernel_compilers", lambda *sharing: ("begun", *sharing))
    assert (warmup.compilers_for(target, device, graphs, 1, 2) == ("begun", 1, 2)) == begun


@pytest.mark.parametrize("given", [None, "those of the constructor"])
def test_what_a_later_call_lacks_is_compiled_by_processes_too(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "kernel_compilers", lambda *sharing: nullcontext(("begun", *sharing)))
    monkeypatch.setattr(warmup, "_choose_reading", lambda engine: None)
    monkeypatch.setattr(warmup, "steps_of_options", lambda engine, rows, choice: [(rows, "another step")])
    engine, choice = mock.MagicMock(sharing=(1, 2)), mock.MagicMock(controller=None)
    engine.missing.return_value = [(1, "a step")]
    warmup.warm_up_for(engine, 1, choice, 9, 0, progress=False, compilers=given)
    told = engine.compile.call_args.kwargs
    assert told["compilers"] == (given or ("begun", 1, 2))
    assert told["behind"] == ([(1, "another step")] if given else []), "only the constructor begins those of options"


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_the_constructor_begins_every_kernel_that_options_and_lengths_of_calls_need(arch: int) -> None:
    (found,) = module_output("tests.helpers.option_kernels", str(arch), "2")
    assert found["missing"] == []


@pytest.mark.parametrize("k", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_the_first_sampled_call_needs_no_kernel_that_is_begun_late(k: int) -> None:
    (found,) = module_output("tests.helpers.option_kernels", "90", str(k), "early")
    assert found["missing"] == []
