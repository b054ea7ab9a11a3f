"""Kernels that processes compile: as text they come back whole, and what lies in the cache is what was asked for."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton ships for Linux only")

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
    killed, no_text = module_output("tests.helpers.compile_jobs", "broken")
    assert killed["hits"] == [False] * 4
    assert "another" in no_text["error"] or "something else" in no_text["error"]
