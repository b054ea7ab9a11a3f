"""Options change between replays and nothing is captured or compiled anew; the text is that of launched steps."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fastspec import FastSpecGenerator, GenerateOutput, NGram, demo_pair
from fastspec.graphs.keys import StepKey
from fastspec.graphs.runner import GraphRunner
from fastspec.sampling.rules import MODES
from fastspec.shapes import FULL

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 6, 7, 8, 5, 6], [9], list(range(40, 90)), [300, 301, 300, 301]]
CALLS = 40


def options(seed: int, vocab: int) -> dict[str, Any]:
    """Options of every kind for four prompts, drawn at random."""
    rng = random.Random(seed)

    def each(*choices: Any) -> list[Any]:
        return [rng.choice(choices) for _ in PROMPTS]

    ids = [[rng.randrange(vocab) for _ in range(200)] for _ in PROMPTS]
    return {
        "max_new_tokens": rng.randint(8, 40),
        "do_sample": True,
        "temperature": each(0.0, 0.5, 1.0, 1.5),
        "top_k": each(0, 1, 20, 50),
        "top_p": each(1.0, 0.9, 0.5),
        "min_p": each(0.0, 0.05),
        "repetition_penalty": each(1.0, 1.2, 0.9),
        "presence_penalty": each(0.0, 0.5, -0.5),
        "frequency_penalty": each(0.0, 0.25),
        "logit_bias": [{one[0]: 2.0, one[1]: float("-inf")} if rng.random() < 0.5 else None for one in ids],
        "allowed_token_ids": [one if rng.random() < 0.3 else None for one in ids],
        "suppress_tokens": [one[:5] if rng.random() < 0.3 else None for one in ids],
        "min_new_tokens": each(0, 5),
        "eos_token_id": rng.choice([None, [ids[0][0], 5]]),
        "num_speculative_tokens": [None, *each(None, 0, 1, 3)[1:]],
        "seed": [rng.randrange(2**60) for _ in PROMPTS],
    }


def decoded(gen: FastSpecGenerator, seed: int) -> list[list[int]]:
    out = gen.generate(PROMPTS, return_dict_in_generate=True, **options(seed, gen.vocab_size))
    assert isinstance(out, GenerateOutput)
    return out.new_tokens


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """Keys that were captured, in order."""
    seen: list[Hashable] = []
    capture = GraphRunner._capture

    def counted(self: GraphRunner, key: Hashable, *given: Any, **options: Any) -> Any:
        seen.append(key)
        return capture(self, key, *given, **options)

    monkeypatch.setattr(GraphRunner, "_capture", counted)
    return seen


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Triton kernels that were compiled or loaded from its cache, in order."""
    from triton import knobs

    seen: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **given: seen.append(given["repr"])
    yield seen
    knobs.runtime.jit_post_compile_hook = before


@pytest.mark.parametrize("proposer", [None, NGram(1, 3)], ids=["model", "lookup, then model"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_captured_or_compiled_when_options_change(
    mode: str, proposer: NGram | None, captures: list[Hashable], compilations: list[str]
) -> None:
    made: dict[str, Any] = {"verification": mode, "proposer": proposer, "max_batch_size": 4, "progress": False}
    with FastSpecGenerator(*demo_pair(), **made) as gen, FastSpecGenerator(*demo_pair(), graphs=False, **made) as eager:
        gen.warmup(sampler=FULL)
        assert {key.shape.sampler for key in captures if isinstance(key, StepKey)} == {"greedy", "full"}
        eager_texts = [decoded(eager, seed) for seed in range(4)]
        decoded(gen, 0)  # torch's own kernels of admission are loaded
        torch.cuda.synchronize()
        before = (len(captures), len(compilations), counters["stats"]["unique_graphs"])
        assert before[0] > 0
        allocated = torch.cuda.memory_allocated()
        texts = [decoded(gen, seed) for seed in range(CALLS)]
        assert (len(captures), len(compilations), counters["stats"]["unique_graphs"]) == before
        assert torch.cuda.memory_allocated() == allocated
        assert texts[:4] == eager_texts
        assert len({str(text) for text in texts}) == CALLS
        gen.generate(PROMPTS, max_new_tokens=3, logprobs=1)
        assert len(captures) > before[0], "another kind of step is captured: the count can change"
