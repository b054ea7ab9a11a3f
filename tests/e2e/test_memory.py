"""Memory on a GPU: the plan against what is measured, nothing kept after close, nothing lost per call."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastspec import FastSpecGenerator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:the tokenizers of:UserWarning"),
    pytest.mark.filterwarnings("ignore:drafting does not pay:UserWarning"),
]
MIB = 2**20


def model(layers: int, hidden: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=8192,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    made = made.to(torch.bfloat16).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    made.model.rotary_emb = type(made.model.rotary_emb)(config)  # its buffers are no parameters
    return made


@pytest.fixture(scope="module")
def pair() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A third of a billion parameters, and a draft: large enough that no rounding of the allocator matters."""
    return model(16, 1024), model(2, 512)


@pytest.fixture
def baseline() -> int:
    """Allocated bytes before a test, the libraries' work areas included."""
    torch.ones(64, 64, device="cuda", dtype=torch.bfloat16) @ torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def made(pair: tuple[Any, Any], **options: Any) -> FastSpecGenerator:
    return FastSpecGenerator(*pair, device="cuda", progress=False, **{"max_length": 4096, **options})


def rows(count: int, length: int) -> list[list[int]]:
    return [[(17 * i + 5 * j) % 32000 for j in range(length)] for i in range(count)]


@pytest.mark.parametrize("formats", [(None, None), ("int4", "fp8"), ("fp8", "int4"), ("int8", "int8")], ids=str)
def test_the_plan_is_within_five_percent(
    pair: tuple[Any, Any], baseline: int, formats: tuple[str | None, str | None]
) -> None:
    """What is used the most at any time, from before loading until after a call."""
    with made(pair, target_quantization=formats[0], draft_quantization=formats[1]) as gen:
        gen.generate(rows(8, 700), max_new_tokens=20, do_sample=True, temperature=0.8, top_p=0.9, seed=0)
        measured = torch.cuda.max_memory_allocated() - baseline
        assert abs(gen.memory_plan.total - measured) <= 0.05 * measured, (gen.memory_plan, measured / MIB)


def test_closing_gives_everything_back(pair: tuple[Any, Any]) -> None:
    # one generator before the baseline: cuBLAS keeps its work area for the capture stream until the process ends
    with made(pair) as gen:
        gen.generate(rows(2, 50), max_new_tokens=8)
    del gen
    gc.collect()
    baseline = torch.cuda.memory_allocated()
    for _ in range(3):
        gen = made(pair)
        gen.generate(rows(2, 50), max_new_tokens=8)
        assert torch.cuda.memory_allocated() - baseline > 500 * MIB
        gen.close()
        del gen
        gc.collect()
        # the allocator's rounding of what torch itself keeps: far below any tensor of ours
        assert abs(torch.cuda.memory_allocated() - baseline) <= 16 * MIB


def test_three_hundred_calls_keep_nothing(pair: tuple[Any, Any]) -> None:
    with made(pair, max_length=256) as gen:
        gen.generate(rows(3, 40), max_new_tokens=6)
        gc.collect()
        before = torch.cuda.memory_allocated()
        for call in range(300):
            gen.generate(
                rows(1 + call % 3, 5 + call % 40), max_new_tokens=1 + call % 3, do_sample=call % 2 == 0, seed=call
            )
        gc.collect()
        assert torch.cuda.memory_allocated() == before
