"""RMSNorms are known by what they compute: each formula is told apart, and what computes another one is left alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fastspec.kernels.ops import TORCH_OPS
from fastspec.models.hosted.info import hosted_info
from fastspec.models.hosted.norms import Norm, epsilon, norm_kinds
from tests.helpers.hosted import config_of

KINDS: dict[str, type] = {"rms": LlamaRMSNorm, "rms_fp32": GptOssRMSNorm, "rms_plus_one": GemmaRMSNorm}


class OddRMSNorm(LlamaRMSNorm):
    """Divides by the mean of absolute values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / (x.abs().mean(-1, keepdim=True) + self.variance_epsilon))


class ShiftedRMSNorm(LlamaRMSNorm):
    """Has a bias, too."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.zeros(width))


class CentredRMSNorm(LlamaRMSNorm):
    """Takes the mean off, as a LayerNorm does."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x - x.mean(-1, keepdim=True))
        return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_formula_is_told_and_computed(kind: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        found = norm_kinds(nn.ModuleDict({"a": KINDS[kind](48)}))
    assert found == {"a": (kind, 48)}
    module = KINDS[kind](48)
    with torch.no_grad():
        module.weight.normal_(0.8, 0.3, generator=torch.Generator().manual_seed(1))
    module = module.to(dtype)
    running: Any = SimpleNamespace(ops=TORCH_OPS, inside=False)
    owner = type("Owner", (), {})()
    owner.__dict__.update(vars(running))
    eps = epsilon(module)
    assert eps is not None
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    ours = Norm(owner, module.weight.data, eps, kind)(x)  # type: ignore[arg-type]
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, module(x), rtol=2e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)
    assert not owner.inside


@pytest.mark.parametrize("kind", [OddRMSNorm, ShiftedRMSNorm, CentredRMSNorm, nn.LayerNorm])
def test_what_computes_another_formula_is_left_alone(kind: Any) -> None:
    assert norm_kinds(nn.ModuleDict({"a": kind(32)})) == {}


def test_all_norms_of_a_model_are_counted_and_said() -> None:
    info = hosted_info(config_of("deepseek_v3"))
    assert len(info.norms) == 2 * 2 + 2 * 2 + 1  # before each part, of latent queries and keys, before the head
    assert f", {len(info.norms)} norms" in info.hosting
    assert {kind for kind, _ in hosted_info(config_of("gemma4_text")).norms.values()} == {"rms_fp32"}
    assert hosted_info(config_of("gpt2")).norms == {}
    assert info.weight_bytes(torch.bfloat16) == 2 * info.parameters + info.kept_bytes
    assert copy.deepcopy(info.config).to_dict() == info.config.to_dict()
