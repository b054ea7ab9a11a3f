"""Tiny engines whose models run through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch._dynamo.utils import counters

from fastspec.engine.engine import Engine
from fastspec.kernels.compiled_ops import CompiledOps
from fastspec.models.compiled import CompiledDecoder
from fastspec.proposers.draft_model import DraftModel
from fastspec.shapes import UNTILED
from fastspec.step import StepModules
from tests.helpers.tiny import tiny_engine


def compiled_engine(backend: str | Callable[..., Any] = "aot_eager", **options: Any) -> Engine:
    """What `tiny_engine` makes, with both models compiled."""
    engine = tiny_engine(tiling=UNTILED, **options)
    modules, proposer = engine.modules, engine.modules.proposer
    assert isinstance(proposer, DraftModel)
    drafting = DraftModel(
        _compiled(modules, proposer.model, backend),
        modules.ops,
        proposer.shared_vocab,
        proposer.max_length,
        work=modules.work,
    )
    return replace(
        engine, modules=replace(modules, target=_compiled(modules, modules.target, backend), proposer=drafting)
    )


def _compiled(modules: StepModules, model: Any, backend: str | Callable[..., Any]) -> CompiledDecoder:
    positions = model._tables[0][0].shape[0]
    ops = CompiledOps(modules.ops)
    return CompiledDecoder(
        model.spec, model.weights, model.cache, ops, max_positions=positions, batch=8, max_queries=5, backend=backend
    )


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])
