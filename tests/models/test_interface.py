"""Settings, memory and explanations need of a model what ModelInfo says, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fastspec.config import Config
from fastspec.engine import explain
from fastspec.engine.settings import Settings, settings_of
from fastspec.kernels.ops import Ops
from fastspec.models.interface import ModelInfo
from fastspec.output import RowStats, Stats
from tests.helpers.tiny import tiny_spec


@dataclass(frozen=True)
class Hosted:
    """A model that is no ModelSpec, as one from another package would be."""

    parameters: int = 10_000
    family: str = "hosted"
    dtype: torch.dtype = torch.bfloat16
    vocab_size: int = 500
    max_length: int = 300
    num_layers: int = 3
    windows: tuple[int | None, ...] = (None, 8, None)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    intermediate_size: int = 96
    attention_shapes: tuple[tuple[int, int, int], ...] = ((4, 2, 16),) * 3
    hosting: str = ""
    routed_elements: int = 0

    def rotary_bytes(self, positions: int) -> int:
        return positions * self.head_dim * 4

    def state_bytes(self, max_drafts: int, dtype: torch.dtype) -> int:
        return 0

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return self.parameters * dtype.itemsize


@dataclass(frozen=True)
class Source:
    spec: ModelInfo
    name: str = "somewhere"
    stored: str = ""
    module: nn.Module | None = None

    ranks = 1

    def bytes_loaded(self, dtype: torch.dtype, device: torch.device, ops: Ops) -> int:
        return self.spec.weight_bytes(dtype)


def settings(target: Source, draft: Source | None, **changes: Any) -> Settings:
    given: dict[str, Any] = {"max_batch_size": 2, "page_size": 16, "device": "cpu", "verification": "rejection"}
    return settings_of(target, draft, Config(**{**given, **changes}))


def test_a_model_of_another_package_is_planned_for() -> None:
    made = settings(Source(Hosted()), Source(Hosted(parameters=100, max_length=200)))
    assert (made.max_length, made.length_reason) == (200, "the models' context")
    plan = made.memory
    assert (plan.target_weights, plan.draft_weights) == (40_000, 400)
    positions = (1 + 2 * -(-(200 + 5) // 16)) * 16
    assert plan.target_cache == plan.draft_cache == positions * 2 * 3 * 2 * 16 * 4
    with pytest.raises(MemoryError, match="max_length=300 with max_batch_size=2 needs"):
        settings(Source(Hosted(parameters=10**15)), None, max_length=300)


def test_it_is_explained_and_judged() -> None:
    words = explain._model(Source(Hosted()), "torch.float32")
    assert words == (
        "somewhere: hosted, 0.0 M parameters in 3 layers, 1 of them with a sliding window, float32, context 300"
    )
    stats = Stats.of((RowStats(100, 0, 400, 0, 100, 0, (100, 0, 0, 0, 0)),), 4, 1.0)
    layout = settings(Source(Hosted()), Source(Hosted())).layout
    assert "the 4 draft passes of a step alone cost as much as 4.00 tokens" in (
        explain.break_even_advice(stats, layout) or ""
    )


def test_our_own_spec_has_all_of_it() -> None:
    spec: ModelInfo = tiny_spec(layers=3, window=8)
    assert settings(Source(spec), None).memory.target_weights == spec.weight_bytes(torch.float32)
