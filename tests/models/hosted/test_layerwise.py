"""A trial whose hidden states differ as a whole looks at each layer: routers may turn over, attention may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fastspec.errors import UnsupportedModel
from fastspec.generator import FastSpecGenerator
from fastspec.models.hosted.layerwise import Layers
from fastspec.models.hosted.model import HostedModel
from tests.helpers.hosted import make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
OPTIONS: dict[str, Any] = {"max_length": 96, "page_size": 16, "device": "cpu", "progress": False}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which passes were compared layer by layer."""
    seen: list[str] = []
    compare = Layers.compare

    def note(self: Layers, own: Any, passes: Any, what: str) -> None:
        seen.append(what)
        compare(self, own, passes, what)

    monkeypatch.setattr(Layers, "compare", note)
    return seen


def made(dtype: torch.dtype) -> FastSpecGenerator:
    """DeepSeek V3 with four experts in two groups: in 16 bits rounding chooses another group for some tokens."""
    model = make_model("deepseek_v3", dtype=dtype)
    return FastSpecGenerator(model, model, num_speculative_tokens=4, dtype=dtype, **OPTIONS)


def test_a_router_that_rounding_turns_over_is_hosted(compared: list[str]) -> None:
    with made(torch.bfloat16) as gen:
        prompts = [[3, 5, 7, 9, 11], [8], [4, 90] * 12]
        options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "return_dict_in_generate": True}
        plain = gen.generate(prompts, num_speculative_tokens=0, **options)
        out = gen.generate(prompts, **options)
        assert out.new_tokens == plain.new_tokens  # type: ignore[union-attr]
        stats = out.stats  # type: ignore[union-attr]
        # the draft reads a prompt's last token in a step, the target in a pass, whose attention rounds weights to bf16
        assert stats.drafted - stats.accepted <= len(prompts)
        assert stats.accepted > 60
    assert "a whole pass" in compared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_of_one_layer_that_is_wrong_is_named(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = HostedModel.attend

    def wrong(self: HostedModel, module: Any, query: Any, *args: Any) -> torch.Tensor:
        return attend(self, module, query * (1.0 + module.layer_idx), *args)

    monkeypatch.setattr(HostedModel, "attend", wrong)
    with pytest.raises(UnsupportedModel, match=r"layer 'layers\.1\.self_attn': its attention in a whole pass"):
        made(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_layers_are_fed_has_to_be_right(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: another embedding than that of the ids."""
    hidden = HostedModel.hidden

    def wrong(self: HostedModel, rows: Any) -> torch.Tensor:
        return hidden(self, replace(rows, ids=(rows.ids + 1) % self.vocab_size))

    monkeypatch.setattr(HostedModel, "hidden", wrong)
    with pytest.raises(UnsupportedModel, match=r"what layer 'layers\.0\.self_attn' is fed in a whole pass .* differs"):
        made(dtype)
