"""Which modules are RMSNorms is told by what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fastspec.models.hosted.swaps import KnownNorm, known_norm

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
