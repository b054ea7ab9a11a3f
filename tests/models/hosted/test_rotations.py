"""Which modules turn heads by the known rotation, and that theirs is replaced for them alone."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

from fastspec.kernels import reference
from fastspec.models.hosted.swaps import rotates, use_our_rotation

apply_rotary_pos_emb = modeling_llama.apply_rotary_pos_emb


class Turning(nn.Module):
    """Turns its heads; what super() needs is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        """Queries times the scale, and keys."""
        assert super().extra_repr() == ""
        q, k = apply_rotary_pos_emb(q, k, *angles, **options)
        return q * self.scale, k


@pytest.mark.parametrize(("module", "known"), [(modeling_llama, True), (modeling_cohere, False), (modeling_glm, False)])
def test_rotations_are_told_by_what_they_compute(module: Any, known: bool) -> None:
    """Cohere turns neighbours, GLM a part of a head."""
    name = {modeling_llama: "LlamaAttention", modeling_cohere: "CohereAttention", modeling_glm: "GlmAttention"}[module]
    config = next(getattr(module, each) for each in dir(module) if each == name.replace("Attention", "Config"))
    part = getattr(module, name)(config(num_hidden_layers=1, hidden_size=32, num_attention_heads=2), 0)
    assert rotates(part) is known
    assert not rotates(nn.Linear(2, 2))


def test_a_module_gets_ours_and_others_keep_theirs() -> None:
    part, other = Turning().eval(), Turning().eval()
    assert rotates(part)
    calls: list[Tensor] = []

    class Ops:
        """Counts."""

        def rotate(self, q: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            """As the definition."""
            calls.append(q)
            return reference.rotate(q, *given)

    running: Any = type("Model", (SimpleNamespace,), {})(ops=Ops(), inside=False)
    use_our_rotation(part, running)
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    angles = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    for ours, theirs in zip(part(q, k, angles), other(q, k, angles), strict=True):
        assert torch.equal(ours, theirs)
    assert len(calls) == 1
    assert running.inside is False
    # what ours does not take goes to theirs: angles of another dtype, other options
    narrow = q.bfloat16(), k.bfloat16()
    assert part(*narrow, angles)[0].dtype == torch.float32
    part(q.transpose(1, 2), k.transpose(1, 2), angles, unsqueeze_dim=2)
    part(q, k, (angles[0][..., :1], angles[1][..., :1]))
    part(q.mT.contiguous().mT, k, angles)
    assert len(calls) == 1
    gone = ref(part)
    del part
    assert gone() is None, "it holds itself alive"
    gc.collect()
