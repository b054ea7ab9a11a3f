"""The step reads nothing back to the host and has no shape that depends on data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fastspec.engine.engine import Engine
from fastspec.sampling.distribution import PhiloxDraws
from fastspec.shapes import FULL, GRAMMARS, GREEDY, StepShape
from fastspec.state import RUNNING, DecodeState
from fastspec.step import prefill, step
from tests.helpers.tiny import STEP_TILING, tiny_engine

DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)


class NoHostReads(TorchDispatchMode):
    """Fails on ops that hand a value to the host, or whose output's shape depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in INDEXING:  # tagged as dynamic for the sake of boolean masks alone
            if any(index is not None and index.dtype == torch.bool for index in args[1]):
                raise AssertionError(f"{func} by a boolean mask depends on data")
        elif DATA_DEPENDENT & set(func.tags):
            raise AssertionError(f"{func} depends on data")
        return func(*args, **(kwargs or {}))


def shape(k: int, sampler: str) -> StepShape:
    return StepShape(num_drafts=k, sampler=sampler, num_blocks=1, tiling=STEP_TILING)


def run_step(engine: Engine, k: int, sampler: str) -> None:
    """One step, a catch-up and a prefill chunk over two rows: all that is ever captured."""
    view = engine.state.rows(0, 2)
    assert engine.modules.proposer is not None
    prefill(engine.modules, view.rows(0, 1), shape(0, sampler), 0, 32)
    engine.modules.proposer.catch_up(view, shape(0, sampler), 32)
    step(engine.modules, view, shape(k, sampler), PhiloxDraws(view.seeds))


def start_rows(state: DecodeState) -> None:
    state.lengths.fill_(5)
    state.limits.fill_(50)
    state.finish.fill_(RUNNING)


@pytest.mark.parametrize("sampler", [GREEDY, FULL])
@pytest.mark.parametrize("k", [0, 1, 4, 16])
def test_step_reads_nothing(k: int, sampler: str) -> None:
    engine = tiny_engine(k=16, max_length=100)
    start_rows(engine.state)
    with NoHostReads(), torch.inference_mode():
        run_step(engine, k, sampler)
    assert engine.state.emitted[:2].min() >= 1


@pytest.mark.parametrize("grammars", GRAMMARS)
@pytest.mark.parametrize("sampler", [GREEDY, FULL])
def test_a_step_with_grammars_reads_nothing(sampler: str, grammars: str) -> None:
    engine = tiny_engine(k=4, max_length=100)
    start_rows(engine.state)
    engine.state.constrained[0] = True
    view = engine.state.rows(0, 2)
    kind = replace(shape(4, sampler), grammars=grammars, top_logprobs=2)
    with NoHostReads(), torch.inference_mode():
        step(engine.modules, view, kind, PhiloxDraws(view.seeds))
    assert engine.state.emitted[:2].min() >= 1


@pytest.mark.parametrize("sampler", [GREEDY, FULL])
def test_step_runs_on_tensors_without_values(sampler: str) -> None:
    """Fake tensors have shapes only: reading any value, by whatever road, raises."""
    with FakeTensorMode(), torch.inference_mode():
        engine = tiny_engine(k=4)
        start_rows(engine.state)
        run_step(engine, 4, sampler)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).any()),
    ],
    ids=["item", "tolist", "nonzero", "mask", "bool"],
)
def test_the_checks_see_a_host_read(read: Callable[[torch.Tensor], object]) -> None:
    """Reads by way of an op are seen by the first mode; tolist(), which is none on a CPU, by the second alone."""
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)), FakeTensorMode():
        read(torch.zeros(3))


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0]])
def test_the_first_mode_sees_ops_that_depend_on_data(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="depends on data"), NoHostReads():
        read(torch.zeros(3))


@pytest.mark.parametrize(("k", "sampler"), [(4, GREEDY), (2, FULL), (0, GREEDY)])
def test_step_traces_as_one_graph(k: int, sampler: str) -> None:
    """fullgraph=True raises on any graph break; the traced step then does what the plain one does."""
    plain, traced = tiny_engine(k=4), tiny_engine(k=4)
    for engine in (plain, traced):
        start_rows(engine.state)
        engine.state.temperature.fill_(0.0 if sampler == GREEDY else 1.0)
    torch._dynamo.reset()
    with torch.no_grad():
        step(plain.modules, plain.state, shape(k, sampler), PhiloxDraws(plain.state.seeds))
        compiled = torch.compile(step, fullgraph=True, backend="eager")
        compiled(traced.modules, traced.state, shape(k, sampler), PhiloxDraws(traced.state.seeds))
    assert torch.equal(plain.state.tokens, traced.state.tokens)
    assert torch.equal(plain.state.lengths, traced.state.lengths)
    assert traced.state.emitted.min() >= 1
