"""Which modules are RMSNorms is told by what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fastspec.models.hosted import swaps
from fastspec.models.hosted.swaps import KnownNorm, KnownNorms, known_norm

WIDTH = 48


class Doubled(LlamaRMSNorm):
    """Named and built as an RMSNorm, and not one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Twice the norm."""
        return 2 * super().forward(hidden_states)


class Grouped(LlamaRMSNorm):
    """Norms halves of a row."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Of [..., K] as of [..., 2, K / 2]."""
        halves = hidden_states.unflatten(-1, (2, -1)).float()
        normed = halves * torch.rsqrt(halves.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.flatten(-2).to(hidden_states.dtype)


class Gated(LlamaRMSNorm):
    """Takes a gate beside the rows."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """The norm times the gate."""
        return super().forward(hidden_states) * gate


@pytest.mark.parametrize(
    ("kind", "given", "known"),
    [
        (LlamaRMSNorm, (WIDTH, 1e-5), KnownNorm("rounded", 1e-5)),
        (HeliumRMSNorm, (WIDTH, 1e-8), KnownNorm("wide", 1e-8)),
        (Gemma3RMSNorm, (WIDTH, 1e-6), KnownNorm("plus_one", 1e-6)),
        (nn.LayerNorm, (WIDTH,), None),
        (nn.Linear, (WIDTH, 1, False), None),
        (nn.Embedding, (WIDTH, 8), None),
        (nn.SiLU, (), None),
        (Doubled, (WIDTH,), None),
        (Grouped, (WIDTH,), None),
        (Gated, (WIDTH,), None),
    ],
)
def test_norms_are_told_by_what_they_compute(kind: Any, given: tuple[Any, ...], known: KnownNorm | None) -> None:
    with torch.device("meta"):
        part = kind(*given)
    assert known_norm(part) == known


def test_one_norm_of_each_class_size_and_epsilon_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []

    def counted(part: nn.Module) -> KnownNorm | None:
        tried.append(part)
        return known_norm(part)

    monkeypatch.setattr(swaps, "known_norm", counted)
    with torch.device("meta"):
        first, again = LlamaRMSNorm(WIDTH, 1e-5), LlamaRMSNorm(WIDTH, 1e-5)
        others = [LlamaRMSNorm(WIDTH, 1e-6), LlamaRMSNorm(WIDTH + 16, 1e-5), Doubled(WIDTH, 1e-5)]
        holder = nn.Sequential(LlamaRMSNorm(WIDTH, 1e-5))
    norms = KnownNorms()
    found = [norms.of(part) for part in (first, again, *others, others[2], nn.SiLU(), holder)]
    rounded = KnownNorm("rounded", 1e-5)
    assert found == [rounded, rounded, KnownNorm("rounded", 1e-6), rounded, None, None, None, None]
    assert tried == [first, *others]
