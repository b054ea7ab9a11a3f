"""Kernels that processes compile: as text they come back whole, and what lies in the cache is what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton ships for Linux only")

from fastspec.kernels.common import compilers
from fastspec.runtime import warmup
from tests.helpers.modules import module_output


@pytest.mark.parametrize(
    "arch", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_every_launch_comes_back_from_its_text(arch: int) -> None:
    (read,) = module_output("tests.helpers.compile_jobs", "keys", str(arch))
    assert read["jobs"] > 300
    assert read["other"] == []


def test_processes_compile_and_this_one_only_reads() -> None:
    empty, compiled, ended, again = module_output("tests.helpers.compile_jobs", "processes")
    assert empty["empty"]
    assert not compiled["empty"]
    assert compiled["hits"] == [True] * 4  # each once, though each was launched twice
    assert ended["status"] is not None
    assert (again["hits"], again["begun"]) == ([True] * 4, False)


def test_without_processes_this_one_compiles() -> None:
    killed, later, no_text = module_output("tests.helpers.compile_jobs", "broken")
    assert killed["hits"] == later["hits"] == [False] * 4
    assert "another" in no_text["error"] or "something else" in no_text["error"]


def test_another_program_than_python_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers.sys, "executable", "/opt/app/serving")
    monkeypatch.setattr(compilers.subprocess, "Popen", lambda *given, **options: pytest.fail("started"))
    with compilers.Compilers(4, now=True) as executor:
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
def test_who_has_compilers(
    gpu: bool, target: Any, device: Any, graphs: bool | None, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(warmup, "compilers", lambda sharing: ("begun", sharing))
    assert (warmup.compilers_for(target, device, graphs, 2) == ("begun", 2)) == begun
