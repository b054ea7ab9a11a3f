"""Steps whose kernels the constructor begins without waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from fastspec.engine.engine import Engine
from fastspec.shapes import FULL, GREEDY
from tests.helpers.tiny import tiny_engine

SHAPES = [(rows, k, sampler) for sampler in (GREEDY, FULL) for k in (0, 2) for rows in (1, 2)]
UNCACHED = {"none": frozenset[int](), "the first": {1}, "the last": {4}, "one between": {3}}


def begun(monkeypatch: pytest.MonkeyPatch, uncached: frozenset[int] | set[int], *, able: bool = True) -> list[Any]:
    """The steps that `Engine.compile` goes through: the first four to wait for, the others behind them.

    Args:
        uncached: which of the others have a kernel that is in no cache, from 1 on.
        able: True if there are processes that compile.
    """
    engine, ran = tiny_engine(k=2, batch=2), list[Any]()
    steps = [(rows, engine.shapes.step(k, sampler, None, 20)) for rows, k, sampler in SHAPES]
    waited, behind = steps[:4], steps[4:]
    missing = {behind[number - 1] for number in uncached}

    @contextmanager
    def compiling_behind(*, early: bool = False) -> Iterator[Callable[[], bool] | None]:
        yield (lambda: not missing.isdisjoint(ran)) if able else None

    ops = engine.modules.ops.replaced(compiling_behind=compiling_behind)
    engine.modules = replace(engine.modules, ops=ops)
    monkeypatch.setattr(Engine, "_body", lambda self, rows, shape: lambda: ran.append((rows, shape)))
    with ThreadPoolExecutor(1) as pool:
        engine.compile(waited, prompts=False, compilers=pool, behind=behind)
        assert ran[:2] == (behind[:2] if able else waited[:2]), "the slowest kernels are begun first"
        assert [step for step in ran if step in waited] == waited
        assert (engine.compilers is pool) == able
        engine.compile(waited, prompts=False)
        assert (engine.compilers is pool) == able, "a later call keeps it"
        engine.close()
        if able:
            with pytest.raises(RuntimeError, match="shutdown"):
                pool.submit(int)
    return [behind.index(step) + 1 for step in ran if step in behind]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("none", [1, 2, 1, 4]),
        ("the first", [1, 2, 1, 2, 3, 4]),
        ("the last", [1, 2, 1, 4, 1, 2, 3, 4]),
        ("one between", [1, 2, 1, 4]),
    ],
)
def test_all_steps_are_gone_through_if_the_first_or_the_last_has_a_new_kernel(
    name: str, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begun(monkeypatch, UNCACHED[name]) == order


def test_without_processes_no_step_is_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begun(monkeypatch, {1}, able=False) == []
